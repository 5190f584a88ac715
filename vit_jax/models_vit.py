"""The Vision Transformer as Flax Linen modules (arXiv 2010.11929, section 3.1).

An image is cut into patches, each patch becomes one token by a linear map, and
a plain pre-norm Transformer encoder reads the tokens. Names of modules and
parameters are the published ones, so published weights fit without renaming.

Shapes in the comments:
  B images    H, W image height and width    C channels (or classes)
  h, w patches down and across               N tokens (h*w, plus the class token)
  D width of a token    M width of the MLP   K heads    E = D/K width of a head

Look inside with `model.apply(..., mutable='intermediates')`: every attention
layer sows `attention_weights` [B, K, N, N], the encoder `tokens` [B, N, D], the
model `features` [B, D], the pre-logits. When nobody asks, nothing is stored, and
where the class token alone is read the last layer computes no other.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax import models_resnet
from vit_jax.layers import attention
from vit_jax.layers import encoder as encoder_lib
from vit_jax.scale import sharding

CLASSIFIERS = ('token', 'gap', 'unpooled', 'token_unpooled')

# The names under which the original has them.
AddPositionEmbs = encoder_lib.AddPositionEmbs
MlpBlock = encoder_lib.MlpBlock
MultiHeadDotProductAttention = attention.MultiHeadDotProductAttention
Encoder1DBlock = encoder_lib.Encoder1DBlock
Encoder = encoder_lib.Encoder


def _field(config: Any, name: str, default: Any = None) -> Any:
  """Reads `name` from a ConfigDict, a mapping or an object."""
  if isinstance(config, Mapping):
    return config.get(name, default)
  return getattr(config, name, default)


def check_images(images):
  """Raises ValueError if `images` are not [B, H, W, C]."""
  if images.ndim != 4:
    raise ValueError(
      'images must be [batch, height, width, channels], got '
      f'{images.shape}; batches have no device dimension here'
    )


def make_head(num_classes: int, bias: float, dtype, param_dtype) -> nn.Dense:
  """The linear classifier, of zeros at first; logits are float32 or wider.

  Args:
    num_classes: number of logits.
    bias: initial value of the bias.
    dtype: type of the computation before it.
    param_dtype: type of the parameters.
  """
  return nn.Dense(
    num_classes,
    name='head',
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(bias),
    dtype=jnp.promote_types(dtype, jnp.float32),
    param_dtype=param_dtype,
  )


class IdentityLayer(nn.Module):
  """Returns its input: gives an activation a name that can be captured."""

  @nn.compact
  def __call__(self, x):
    return x


class PatchEmbedding(nn.Module):
  """Cuts images into patches and maps each to a token (equation 1).

  The same numbers as a convolution whose stride is its size, written as one
  matrix product, which is faster on every backend.

  Attributes:
    features: width D of a token.
    patch_size: (height, width) of a patch in pixels.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  features: int
  patch_size: tuple[int, int]
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps images [B, H, W, C] to a grid of tokens [B, h, w, D].

    Raises:
      ValueError: if patches do not divide the image.
    """
    ph, pw = self.patch_size
    b, height, width, c = x.shape
    for name, size, patch in (('height', height, ph), ('width', width, pw)):
      if size < patch:
        raise ValueError(
          f'image {name} {size} is smaller than one patch of {patch}: resize '
          f'the images to a multiple of {patch} (config.pp.crop) or use smaller '
          'patches (config.model.patches.size)'
        )
      if size % patch:
        low = size - size % patch
        raise ValueError(
          f'image {name} {size} is not a multiple of the patch {name} {patch}: '
          f'use {low} or {low + patch} (config.pp.crop) or other patches '
          '(config.model.patches.size)'
        )
    kernel = self.param(
      'kernel',
      nn.initializers.lecun_normal(),
      (ph, pw, c, self.features),
      self.param_dtype,
    )
    bias = self.param(
      'bias', nn.initializers.zeros, (self.features,), self.param_dtype
    )
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    h, w = height // ph, width // pw
    x = x.reshape(b, h, ph, w, pw, c).swapaxes(2, 3)  # [B, h, w, ph, pw, C]
    x = x.reshape(b, h, w, ph * pw * c)
    return x @ kernel.reshape(-1, self.features) + bias  # [B, h, w, D]


class VisionTransformer(nn.Module):
  """The Vision Transformer, with or without a ResNet in front of it (hybrid).

  Attributes:
    num_classes: width of the head; 0 or None gives the pre-logits instead.
    patches: has a field `size`, (height, width) of a patch: in pixels, or for a
      hybrid in cells of the ResNet's feature map.
    transformer: arguments of `encoder`; None leaves the encoder out.
    hidden_size: width D of a token.
    resnet: None, or has fields `num_layers` (units per stage, possibly none),
      `width_factor` and possibly `eps` (see vit_jax.models_resnet).
    representation_size: width of a dense layer with tanh before the head (the
      paper's pre-training head, section 3.1), or None.
    classifier: 'token' reads the class token, 'gap' the mean over patches;
      'unpooled' and 'token_unpooled' apply the head to every token, without and
      with a class token.
    head_bias_init: initial bias of the head (-10 for the 21k models).
    encoder: class of the encoder.
    model_name: name in the table of configs; has no effect.
    dtype: type of the computation, 'bfloat16' for one. Softmax, the norms'
      statistics and the logits are float32 whatever it is.
    param_dtype: type of the parameters.
  """

  num_classes: int | None
  patches: Any
  transformer: Any
  hidden_size: int
  resnet: Any = None
  representation_size: int | None = None
  classifier: str = 'token'
  head_bias_init: float = 0.0
  encoder: type[nn.Module] = Encoder
  model_name: str | None = None
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs, *, train):
    """Computes logits.

    Args:
      inputs: images, float [B, H, W, C] in [-1, 1].
      train: whether dropout is on (needs the rng 'dropout').

    Returns:
      Logits, float32 [B, num_classes], or [B, N, num_classes] for an unpooled
      classifier; the pre-logits in `dtype` where there is no head.

    Raises:
      ValueError: on an unknown classifier, on inputs of another rank, and where
        patches do not divide the image.
    """
    if self.classifier not in CLASSIFIERS:
      raise ValueError(
        f"classifier='{self.classifier}' is unknown: use one of {CLASSIFIERS} "
        '(config.model.classifier)'
      )
    check_images(inputs)
    types = dict(
      dtype=jnp.dtype(self.dtype), param_dtype=jnp.dtype(self.param_dtype)
    )
    x = inputs.astype(types['dtype'])
    if self.resnet is not None:
      x = models_resnet.apply_resnet(x, **dict(self.resnet), **types)
    x = PatchEmbedding(
      features=self.hidden_size,
      patch_size=tuple(_field(self.patches, 'size')),
      name='embedding',
      **types,
    )(x)  # [B, h, w, D]
    x = sharding.constrain_batch(x)

    if self.transformer is not None:
      x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, N, D]
      if self.classifier in ('token', 'token_unpooled'):
        cls = self.param(
          'cls',
          nn.initializers.zeros,
          (1, 1, self.hidden_size),
          types['param_dtype'],
        )
        cls = jnp.broadcast_to(cls, (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([cls.astype(x.dtype), x], axis=1)  # [B, N+1, D]
      fields = dict(self.transformer)
      if self.classifier == 'token' and self.encoder is Encoder:
        fields['only_first'] = True
      x = self.encoder(name='Transformer', **types, **fields)(x, train=train)

    if self.classifier == 'token':
      x = x[:, 0]  # [B, D]
    elif self.classifier == 'gap':
      x = x.mean(axis=range(1, x.ndim - 1))  # [B, D]
    if self.representation_size is not None:
      x = nn.tanh(
        nn.Dense(self.representation_size, name='pre_logits', **types)(x)
      )
    else:
      x = IdentityLayer(name='pre_logits')(x)
    self.sow('intermediates', 'features', x)
    if not self.num_classes:
      return x
    return make_head(self.num_classes, self.head_bias_init, **types)(x)
