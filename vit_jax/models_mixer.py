"""MLP-Mixer as Flax Linen modules (arXiv 2105.01601), published names.

The model maps patches to tokens as the Vision Transformer does, but replaces
attention with an MLP over the tokens.

Shapes in the comments:
  B images    H, W image height and width    C channels (or classes)
  N patches   D width of a token
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax.distributed import sharding
from vit_jax.layers import dtypes, patches, xla_hints
from vit_jax.layers.dtypes import Array


class MlpBlock(nn.Module):
  """Two dense layers with a GELU (tanh approximation) between."""

  mlp_dim: int  # Width of the hidden layer.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, '*axes F']) -> Float[Array, '*axes F']:
    options = {'dot_general': xla_hints.dot_general, **dtypes.of(self)}
    dense = functools.partial(nn.Dense, **options)
    y = dense(self.mlp_dim)(x)
    y = xla_hints.recomputed(nn.gelu)(y)
    return dense(x.shape[-1])(y).astype(dtypes.result_of(self, x))


class MixerBlock(nn.Module):
  """One layer: an MLP over the tokens, then one over the channels, pre-norm."""

  tokens_mlp_dim: int  # Width of the hidden layer of the MLP over tokens.
  channels_mlp_dim: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  layer: int = 0  # Its number, see vit_jax.layers.patches.sow_mean.

  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
    types = dtypes.of(self)
    y = nn.LayerNorm(**types)(x)
    patches.sow_mean(self, f'layer_{self.layer}', y)
    y = y.swapaxes(1, 2)  # [B, D, N]
    y = MlpBlock(self.tokens_mlp_dim, name='token_mixing', **types)(y)
    x = x + y.swapaxes(1, 2)  # [B, N, D]
    y = nn.LayerNorm(**types)(x)
    y = MlpBlock(self.channels_mlp_dim, name='channel_mixing', **types)(y)
    return sharding.constrain_batch(x + y)


class MlpMixer(patches.ImageModel):
  """MLP-Mixer; its logits are always float32."""

  patches: Any  # Has a field `size`, (height, width) of a patch in pixels.
  num_classes: int | None  # Width of the head; 0 or None: returns the mean token.
  num_blocks: int
  hidden_dim: int  # D.
  tokens_mlp_dim: int
  channels_mlp_dim: int
  model_name: str | None = None  # Name in the table of configs; has no effect.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: Float[Array, 'B H W C'], *, train: bool
  ) -> Float[Array, 'B _']:
    """Computes logits.

    Maps images, float [B, H, W, C] in [-1, 1], to float32 [B, num_classes]; without a
    head to features [B, D]. The MLPs over tokens need images of the size at
    initialisation. `train` has no effect, as there is no dropout.

    Raises ValueError if the inputs have another rank, or the patch size does not
    divide the image size.
    """
    del train
    inputs = jnp.asarray(inputs)  # Accepts TensorFlow's tensors.
    patches.check_images(inputs)
    types = dtypes.of(self)
    x = patches.PatchEmbedding(
      self.hidden_dim, tuple(self.patches['size']), name='stem', **types
    )(inputs)  # [B, h, w, D]
    x = sharding.constrain_batch(x)
    x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, N, D]
    for i in range(self.num_blocks):
      x = MixerBlock(self.tokens_mlp_dim, self.channels_mlp_dim, layer=i, **types)(x)
    x = nn.LayerNorm(name='pre_head_layer_norm', **types)(x)
    patches.sow_mean(self, f'layer_{self.num_blocks}', x)
    x = x.mean(axis=1)  # [B, D]
    self.sow('intermediates', 'features', x)
    if not self.num_classes:
      return x
    return patches.make_head(self.num_classes, 0.0, **types)(x)
