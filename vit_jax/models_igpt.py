"""iGPT: a Transformer on the pixels of an image, one token each.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020). A pixel is the
number of its colour in a palette; the pixels of an image are read row by row.
There are two objectives:

  causal   predicts each pixel from the pixels before it ("ar" in the paper)
  masked   predicts some pixels from all others ("BERT")

Shapes in the comments:
  B images    N pixels    C colours    D width of a token    L layers
  Q pixels of a piece

Parameters:

  start_token         [D], what the first pixel is predicted from (causal only)
  color_embedding     [C, D]
  position_embedding  [N, D]
  block_<i>           see vit_jax.layers.decoder
  norm/scale          [D]
  color_head/kernel   [D, C]
  class_head/kernel   [D, num_classes], only with classes
"""

from collections.abc import Callable
import functools
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention as attention_lib,
  decoder,
  dtypes,
  layer_stack as loop_lib,
  patches,
)
from vit_jax.layers.dtypes import Array

# Keys and values of each layer.
Cache: TypeAlias = list[decoder.Cache]
Position: TypeAlias = decoder.Position
# Maps `before`, `start` and `cache` of ImageGPT.extend to colours and the cache.
DrawNext: TypeAlias = Callable[
  [Int[Array, 'B Q'], Position, Cache], tuple[Int[Array, ' B'], Cache]
]


class ImageGPT(patches.ImageModel):
  """iGPT.

  `model.apply(..., mutable='intermediates')` also returns what a linear probe
  reads: `layer_<l>`, float32 [B, D], for l from 0 to L, the mean over the
  pixels of the normalised tokens that enter the attention of layer l, and the last
  of the tokens that enter the head.

  Logits are always float32.
  """

  hidden_size: int  # D.
  num_layers: int  # L.
  num_heads: int
  num_colors: int = 512  # C, the colours of the palette.
  num_positions: int = 1024  # N, the pixels of an image.
  num_classes: int | None = 0  # Width of a head for fine-tuning; 0, None: no head.
  # Whether a pixel is predicted from the pixels before it; otherwise from all pixels
  # that are not masked.
  causal: bool = True
  attention: str = attention_lib.AUTO  # See vit_jax.layers.attention.
  attention_scale: str = 'exact'  # A key of vit_jax.layers.decoder.SCALES.
  remat: str = ''  # See vit_jax.layers.encoder.Encoder, as for `scan`.
  scan: bool | None = None
  model_name: str | None = None  # Name in the table of configs; has no effect.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  def setup(self) -> None:
    """Creates parameters and layers; raises ValueError for wrong fields."""
    attention_lib.check(self.attention, 0.0, key='config.model.attention')
    for name, kind in (
      ('attention_scale', model_configs.AttentionScale),
      ('remat', model_configs.Remat),
    ):
      schema.check(name, getattr(self, name), kind, 'config.model.')
    width = self.hidden_size
    types = dtypes.of(self)
    dtype = types['param_dtype']
    attention_lib.check_heads(self.num_heads, width)

    def normal(name: str, std: float, *shape: int) -> Float[Array, '...']:
      return self.param(name, nn.initializers.normal(std), shape, dtype)

    if self.causal:
      self.start_token = normal('start_token', 0.02, width)
    self.color_embedding = normal('color_embedding', 0.02, self.num_colors, width)
    table = 'position_embedding'
    self.position_embedding = normal(table, 0.01, self.num_positions, width)
    block = loop_lib.recomputed(decoder.Block, self.remat)
    fields = self._block_fields()
    self.block = [block(layer=i, **fields) for i in range(self.num_layers)]
    self.norm = nn.RMSNorm(decoder.NORM_EPS, **types)
    exact = dict(dtype=jnp.float32, param_dtype=dtype)
    head = functools.partial(
      nn.Dense, use_bias=False, kernel_init=nn.initializers.zeros, **exact
    )
    self.color_head = head(self.num_colors)
    if self.num_classes:
      self.class_head = head(self.num_classes)

  def _block_fields(self) -> dict[str, Any]:
    shared_names = ('num_heads', 'num_layers', 'causal', 'attention')
    return {'scale': self.attention_scale, **dtypes.of(self, *shared_names)}

  def __call__(
    self,
    colors: Int[Array, 'B N'],
    masked: Bool[Array, 'B N'] | None = None,
    *,
    train: bool = False,
  ) -> Float[Array, 'B N C'] | tuple[Float[Array, 'B N C'], Float[Array, 'B _']]:
    """Predicts the colours of pixels.

    Maps the numbers of their colours, int32 [B, N], to logits, float32 [B, N, C]; with
    classes to a pair of these and the logits of the classes, float32 [B, num_classes].
    `masked`, bool [B, N] or None, is True for pixels whose colour a model that is not
    causal must not see. `train` selects a loop over deep models, see `scan`; there is
    no dropout.

    Raises ValueError if the colours have another shape or type, or pixels of a causal
    model are masked.
    """
    if colors.ndim != 2 or not jnp.issubdtype(colors.dtype, jnp.integer):
      raise ValueError(
        'colors must be numbers of colours, integers [batch, pixels], got '
        f'{colors.dtype} {list(colors.shape)}'
      )
    if colors.shape[1] != self.num_positions:
      raise ValueError(
        f'colors has {colors.shape[1]} pixels an image, but the model has '
        f'{self.num_positions} positions: resize the images, or set '
        'config.model.num_positions'
      )
    if masked is not None and self.causal:
      raise ValueError(
        'masked is for a model with causal=False: a causal model sees only the '
        'pixels before the one that it predicts (config.model.causal)'
      )
    if self.causal:
      x = self._embed(jnp.pad(colors[:, :-1], ((0, 0), (1, 0))), 0)
    else:
      x = self._embed(colors, 0, masked)
    x = self.norm(self._encode(x, train))
    mean = x.mean(axis=1, dtype=jnp.float32)  # [B, D]
    self.sow('intermediates', f'layer_{self.num_layers}', mean)
    logits = self.color_head(x)
    return (logits, self.class_head(mean)) if self.num_classes else logits

  def _encode(self, x: Float[Array, 'B N D'], train: bool) -> Float[Array, 'B N D']:
    """Applies all layers to tokens, all but the last maybe in a loop."""
    # Initialising parameters and sowing intermediates need separate layers.
    apart = self.is_initializing() or self.is_mutable_collection('intermediates')
    layers = self.block
    if loop_lib.is_looped(self.scan, self.num_layers, train) and not apart:
      params = self.variables['params']
      layers = self.block[-1:]
      blocks = [params[f'block_{i}'] for i in range(self.num_layers - 1)]
      cls = loop_lib.recomputed(decoder.Block, self.remat, looped=True)
      block = cls(**self._block_fields(), parent=None)
      apply = lambda x, params: block.apply({'params': params}, x)[0]
      x = loop_lib.over_layers(apply, x, blocks)
    for layer in layers:
      x, _ = layer(x)
    return x

  def _embed(
    self,
    colors: Int[Array, 'B Q'],
    start: Position,
    masked: Bool[Array, 'B Q'] | None = None,
  ) -> Float[Array, 'B Q D']:
    """Makes tokens of the colours that they may see.

    In a causal model these are colours of the pixels before. `start` is the number
    of the first token; `masked` is True for tokens without a colour.
    """
    x = jnp.take(self.color_embedding, colors, axis=0)  # [B, Q, D]
    numbers = start + jnp.arange(colors.shape[1])  # [Q]
    if self.causal:
      x = jnp.where((numbers == 0)[:, None], self.start_token, x)
    if masked is not None:
      x = jnp.where(masked[..., None], 0, x)
    x = x + jnp.take(self.position_embedding, numbers, axis=0)
    return sharding.constrain_batch(x.astype(dtypes.of(self)['dtype']))

  def empty_cache(self, batch: int) -> Cache:
    """Returns the cache of `extend` before the first pixel of a batch of images."""
    heads = self.num_heads
    shape = (batch, heads, self.num_positions, self.hidden_size // heads)
    zeros = jnp.zeros(shape, dtypes.of(self)['dtype'])  # [B, K, N, E]
    return [(zeros, zeros) for _ in range(self.num_layers)]

  def extend(
    self, before: Int[Array, 'B Q'], start: Position, cache: Cache
  ) -> tuple[Float[Array, 'B Q C'], Cache]:
    """Predicts some pixels of a causal model, after the pixels of earlier calls.

    `before`, int32 [B, Q], are the colours of the pixel before each of these pixels
    (for pixel 0, any), `start` is the number of the first, an int32 scalar, and `cache`
    the result of earlier calls for the pixels before it, or `empty_cache`.

    Returns logits, float32 [B, Q, C], the same as for all pixels together, and the
    cache for the next call.
    """
    x = self._embed(before, start)
    new_cache = []
    for block, layer_cache in zip(self.block, cache, strict=True):
      x, layer_cache = block(x, layer_cache, start)
      new_cache.append(layer_cache)
    return self.color_head(self.norm(x)), new_cache


def log_likelihood(
  logits: Float[Array, 'B N C'], colors: Int[Array, 'B N']
) -> Float[Array, ' B']:
  """Computes the log-likelihood of images under a causal model, in nats.

  Divided by N and by -log(2), these are bits a dimension.
  """
  log_p = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(log_p, colors[..., None], axis=-1).sum((1, 2))


def draw(
  keys: Array,
  logits: Float[Array, 'B C'],
  temperature: float | Float[Array, ''],
  top_k: int | None = None,
) -> Int[Array, ' B']:
  """Draws a colour for each image; see `sample`.

  `keys` are random keys, one for each image.
  """
  if top_k is not None:
    least = jax.lax.top_k(logits, top_k)[0][:, -1:]
    logits = jnp.where(logits < least, -jnp.inf, logits)
  colors = jax.vmap(jax.random.categorical)(keys, logits / temperature)
  return colors.astype(jnp.int32)


def sample(
  model: ImageGPT,
  params: Any,
  prefix: Array,
  rng: Array,
  temperature: float = 1.0,
  top_k: int | None = None,
) -> Int[Array, 'B N']:
  """Draws the pixels of images after given ones, in one compiled loop.

  Args:
    model: a causal model.
    params: its parameters.
    prefix: colours of the first pixels, int32 [B, M]; M may be 0.
    rng: a random key, which is split into one for each image; or B keys, so that the
      images of a batch can be drawn in parts.
    temperature: by what logits are divided; below 1 likely colours become more
      likely.
    top_k: draw among this number of most likely colours; None for all.

  Returns the colours of all pixels, int32 [B, N]. Raises ValueError if the model is not
  causal, the prefix leaves no pixel to draw, or the temperature or `top_k` is out of
  range.
  """
  prefix = jnp.asarray(prefix, jnp.int32)
  if not model.causal:
    raise ValueError(
      'a model with causal=False predicts masked pixels from all others and '
      "cannot draw images: train one with the objective 'ar'"
    )
  if prefix.ndim != 2 or prefix.shape[1] >= model.num_positions:
    raise ValueError(
      f'prefix must be colours [batch, fewer than {model.num_positions} pixels], '
      f'got {list(prefix.shape)}: nothing is left to draw'
    )
  if not temperature > 0:
    raise ValueError(f'temperature={temperature} must be positive')
  if top_k is not None and not 1 <= top_k <= model.num_colors:
    raise ValueError(
      f'top_k={top_k} must be from 1 to the number of colours, '
      f'{model.num_colors}, or None for all colours'
    )
  keys = rng if rng.ndim else jax.random.split(rng, len(prefix))
  return _sample(model, params, prefix, keys, temperature, top_k)


@functools.partial(jax.jit, static_argnames=('model', 'top_k'))
def _sample(
  model: ImageGPT,
  params: Any,
  prefix: Int[Array, 'B M'],
  keys: Array,
  temperature: float | Float[Array, ''],
  top_k: int | None,
) -> Int[Array, 'B N']:
  """See `sample`; `keys` are random keys [B]."""
  draw_next = next_pixel(model, params, keys, temperature, top_k)
  # The prefix and the first new pixel at once, the others one after another.
  before = jnp.pad(prefix, ((0, 0), (1, 0)))  # [B, M + 1]
  first, cache = draw_next(before, 0, model.empty_cache(len(prefix)))
  positions = jnp.arange(prefix.shape[1] + 1, model.num_positions)
  later, _ = draw_pixels(draw_next, first, cache, positions)
  return jnp.concatenate([prefix, first[:, None], later], axis=1)


def next_pixel(
  model: ImageGPT,
  params: Any,
  keys: Array,
  temperature: float | Float[Array, ''] = 1.0,
  top_k: int | None = None,
) -> DrawNext:
  """Returns a function that draws one pixel of each image; see `sample`.

  The function takes `before`, `start` and `cache` of ImageGPT.extend, and
  returns the colour of the last of these pixels, int32 [B], and the cache. `keys`
  are random keys [B].
  """

  def draw_next(
    before: Int[Array, 'B Q'], start: Position, cache: Cache
  ) -> tuple[Int[Array, ' B'], Cache]:
    logits, cache = model.apply(
      {'params': params}, before, start, cache, method='extend'
    )
    last = start + before.shape[1] - 1
    pixel_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, last)
    return draw(pixel_keys, logits[:, -1], temperature, top_k), cache

  return draw_next


def draw_pixels(
  draw_next: DrawNext,
  color: Int[Array, ' B'],
  cache: Cache,
  positions: Int[Array, ' M'],
) -> tuple[Int[Array, 'B M'], Cache]:
  """Draws the pixels of numbers `positions` in one loop.

  Starts from the colour of the pixel before the first of them, and the
  cache for that position. Returns colours, and the cache after them.
  """

  def step(
    carry: tuple[Int[Array, ' B'], Cache], position: Int[Array, '']
  ) -> tuple[tuple[Int[Array, ' B'], Cache], Int[Array, ' B']]:
    color, cache = carry
    carry = draw_next(color[:, None], position, cache)
    return carry, carry[0]

  (_, cache), colors = jax.lax.scan(step, (color, cache), positions)
  return colors.T, cache
