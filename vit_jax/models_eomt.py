"""EoMT: segmentation with a plain Vision Transformer (arXiv 2503.19108).

Learned queries join the tokens of an image in the last layers of a Vision Transformer,
without changes to these layers (section 3.2). Each query then yields one class, and one
mask: the product of its state, after an MLP, with the features of each pixel, which are
the upscaled tokens of the patches.

In training, the queries of a layer attend only to the patches in the mask that they
predict before it ("masked attention", section 3.3), each with a probability that a
schedule anneals to 0. So prediction needs no masks, and the whole model is the encoder.

Shapes in the comments:
  B images    H, W image height and width    h, w patches down and across
  S tokens: Q queries, class token, registers and h*w patches
  D width of a token    C classes    L2 layers that read the queries
  U factor by which masks have more cells than patches down, and across
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vit_jax import models_vit
from vit_jax.distributed import sharding
from vit_jax.layers import dtypes, encoder, position_kinds, xla_hints
from vit_jax.layers.dtypes import Array

_NORM_EPS = 1e-6
# Initializes the layers after the encoder, as the released code does.
_INIT = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
_gelu = encoder.GELUS['erf']


class _Depthwise(nn.Module):
  """A depthwise convolution of 3 x 3 with the parameters of flax.linen.Conv.

  It is a sum of shifted maps, which CPUs compute ten times as fast as a convolution.
  """

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B h w D']) -> Float[Array, 'B h w D']:
    _, height, width, channels = x.shape
    kernel = self.param('kernel', _INIT, (3, 3, 1, channels), self.param_dtype)
    x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    if xla_hints.is_16_bit_on_cpu(x):  # CPUs would round each term.
      x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    total = jnp.zeros_like(x)
    for i in range(3):
      # Unlike an index, a slice also exports to ONNX with any number of images.
      rows = jax.lax.slice_in_dim(padded, i, i + height, axis=1)
      for j in range(3):
        shifted = jax.lax.slice_in_dim(rows, j, j + width, axis=2)
        total += shifted * kernel[i, j, 0]
    return total


class Upscale(nn.Module):
  """Doubles height and width of a feature map (section 3.1).

  A transposed convolution whose stride is its size, GELU, a depthwise convolution of
  3 x 3 and a LayerNorm.
  """

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B h w D']) -> Float[Array, 'B 2*h 2*w D']:
    b, height, width, channels = x.shape
    shape = (2, 2, channels, channels)
    kernel = self.param('kernel', _INIT, shape, self.param_dtype)
    bias = self.param('bias', nn.initializers.zeros, (channels,), self.param_dtype)
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    rows = []
    for kernel_of_row in kernel:  # One product a row: CPUs are faster than with all.
      matrix = kernel_of_row.swapaxes(0, 1).reshape(channels, 2 * channels)
      row = xla_hints.einsum('bhwd,de->bhwe', x, matrix)
      rows.append(row.reshape(b, height, 2 * width, channels))
    x = jnp.stack(rows, axis=2).reshape(b, 2 * height, 2 * width, channels)
    x = _gelu(x + bias)
    x = _Depthwise(name='depthwise', **dtypes.of(self))(x)
    return nn.LayerNorm(_NORM_EPS, name='norm', **dtypes.of(self))(x)


class MaskMlp(nn.Module):
  """An MLP of three layers from the states of queries to the kernels of their masks."""

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B Q D']) -> Float[Array, 'B Q D']:
    width = x.shape[-1]
    types = dtypes.of(self)
    x = _gelu(nn.Dense(width, kernel_init=_INIT, **types)(x))
    x = _gelu(nn.Dense(width, kernel_init=_INIT, **types)(x))
    return nn.Dense(width, kernel_init=_INIT, **types)(x)


class Eomt(models_vit.VisionTransformer):
  """A Vision Transformer with queries, each of which predicts a class and a mask.

  It has the fields of a Vision Transformer, whose head and pre-logits it lacks, and the
  parameters of one, so that it loads weights of other Vision Transformers. Logits and
  masks are always float32.
  """

  num_queries: int = 200  # Q.
  num_query_layers: int = 4  # L2, the last layers of the encoder.
  num_upscales: int = 2  # U is 2 to the power of this number.

  def setup(self) -> None:
    """Creates the submodules.

    Raises ValueError if the encoder has fewer layers than read the queries, or positions
    that queries lack.
    """
    super().setup()
    kind = position_kinds.kind_of(self.transformer)
    layers = self.transformer.get('position_layers', 'stem')
    if kind != 'none' and layers != 'stem':
      raise ValueError(
        f"position_embedding='{kind}' with position_layers='{layers}' concerns each layer's "
        "attention between patches, which kind='eomt' extends by queries without a place: "
        'use a linear head (leave out --config.model.kind=eomt), or weights of an encoder '
        'with other positions'
      )
    num_layers = self.transformer['num_layers']
    if not 1 <= self.num_query_layers <= num_layers:
      raise ValueError(
        f'num_query_layers={self.num_query_layers} must be from 1 to the number of '
        f'layers, {num_layers} (config.model.num_query_layers)'
      )
    types = dtypes.of(self)
    shape = (self.num_queries, self.hidden_size)
    init = nn.initializers.normal(1.0)
    self.queries = self.param('queries', init, shape, types['param_dtype'])
    wide_types = {**types, 'dtype': jnp.promote_types(types['dtype'], jnp.float32)}
    num_logits = (self.num_classes or 0) + 1
    self.class_head = nn.Dense(num_logits, kernel_init=_INIT, **wide_types)
    self.mask_mlp = MaskMlp(**types)
    self.upscales = [
      Upscale(name=f'upscale_{i}', **types) for i in range(self.num_upscales)
    ]

  def __call__(
    self,
    images: Float[Array, 'B H W C'],
    *,
    train: bool,
    mask_rates: Float[Array, '*layers'] | None = None,
  ) -> dict[str, Float[Array, 'P B Q ...']]:
    """Segments images.

    Args:
      images: float [B, H, W, C] in [-1, 1].
      train: whether dropout is on, which needs the rng 'dropout'.
      mask_rates: float [L2], for each layer with queries the probability that a query
        attends only to the patches of its mask, which needs the rng 'dropout'; None: no
        masks.

    Returns:
      A dict of P predictions, the last one after the last layer; with `mask_rates`, P =
      L2 + 1, those before each layer with queries come first, otherwise P = 1.
      `logits`, float32 [P, B, Q, num_classes + 1], the last one of no object; `masks`,
      float32 [P, B, Q, U*h, U*w], logits.
    """
    x = self.embed(images, flat=False)
    grid = x.shape[1:3]
    options = {'train': train, 'parts': ('layers',), **self._grid(x)}
    x = self.add_positions(x, train=train)  # [B, S - Q, D]
    num_layers = self.transformer['num_layers']
    first = num_layers - self.num_query_layers
    x = self.Transformer(x, layers=range(first), last_norm=False, **options)
    queries = self.queries.astype(x.dtype)
    queries = jnp.broadcast_to(queries, (x.shape[0], *queries.shape))
    x = jnp.concatenate([sharding.constrain_batch(queries), x], axis=1)
    if mask_rates is None:
      x = self.Transformer(x, layers=range(first, num_layers), **options)
      return jax.tree.map(lambda leaf: leaf[None], self._predict(x, grid))
    predictions = []
    for i in range(first, num_layers):
      state = self.Transformer(x, layers=range(i, i), **options)
      prediction = self._predict(state, grid)
      predictions.append(prediction)
      mask = self._attention_mask(
        prediction['masks'], mask_rates[i - first], grid, x.shape[1]
      )
      x = self.Transformer(
        x, layers=range(i, i + 1), mask=mask, last_norm=False, **options
      )
    state = self.Transformer(x, layers=range(num_layers, num_layers), **options)
    predictions.append(self._predict(state, grid))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *predictions)

  def _predict(
    self, x: Float[Array, 'B S D'], grid: tuple[int, int]
  ) -> dict[str, Float[Array, 'B Q ...']]:
    """Returns `logits` and `masks` of normalised tokens, the queries first."""
    queries = x[:, : self.num_queries]
    num_patches = grid[0] * grid[1]
    features = x[:, -num_patches:].reshape(x.shape[0], *grid, -1)
    for upscale in self.upscales:
      features = upscale(features)  # [B, U*h, U*w, D]
    kernels = self.mask_mlp(queries)
    masks = xla_hints.einsum('bqd,bhwd->bqhw', kernels, features, jnp.float32)
    return {'logits': self.class_head(queries), 'masks': masks}

  def _attention_mask(
    self,
    masks: Float[Array, 'B Q height width'],
    rate: Float[Array, ''],
    grid: tuple[int, int],
    num_tokens: int,
  ) -> Bool[Array, 'B 1 S S']:
    """Returns which tokens may attend to which: some queries only inside their masks."""
    shape = (*masks.shape[:2], *grid)
    masks = jax.image.resize(masks, shape, 'bilinear', antialias=False)
    is_inside = masks.reshape(*shape[:2], -1) > 0  # [B, Q, h*w]
    is_masked = jax.random.uniform(self.make_rng('dropout'), shape[:2]) < rate
    visible = is_inside | ~is_masked[..., None]
    # The patches are the last tokens; tokens that are not queries attend to all.
    num_before_patches = num_tokens - visible.shape[2]
    padding = ((0, 0), (0, num_tokens - self.num_queries), (num_before_patches, 0))
    return jnp.pad(visible, padding, constant_values=True)[:, None]
