"""The encoder of the Vision Transformer: position embeddings, layers, a norm.

A pre-norm Transformer (arXiv 2010.11929, equations 1 to 4) with the published
names of modules and parameters.

Shapes: B images, N tokens, D width of a token, M width of the MLP.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention,
  dtypes,
  gpu_layout,
  layer_stack as loop_lib,
  patches,
  positions,
)

_PLACE = 'config.model.transformer'


def quick_gelu(x):
  """Returns x * sigmoid(1.702 x), an approximation of GELU."""
  return x * nn.sigmoid(1.702 * x)


# Google's models were trained with the tanh approximation; timm and Hugging
# Face compute the exact function by default, CLIP another approximation.
GELUS = {
  'tanh': functools.partial(jax.nn.gelu, approximate=True),
  'erf': functools.partial(jax.nn.gelu, approximate=False),
  'quick': quick_gelu,
}


# What an encoder consists of, in order: the position embeddings before the first
# layer, and the layers with the last norm.
PARTS = ('positions', 'layers')
# Multiples of the number of tokens with which kernels are faster, by the name of the
# implementation of attention. The encoder then pads the tokens, once.
_MULTIPLES = {'cudnn': 8}
# Fields of the encoder that its layers have too.
_BLOCK_FIELDS = (
  'mlp_dim', 'num_heads', 'dropout_rate', 'attention_dropout_rate',
  'attention', 'gelu', 'norm_eps', 'causal',
)  # fmt: skip


class _Own(NamedTuple):
  """What differs between layers; None for nothing."""

  drop_rate: Any = None  # Of stochastic depth.
  relative: Any = None  # Relative position embeddings [2N - 1, E].
  added: Any = None  # What is added after the layer, [1, N, D].


class MlpBlock(nn.Module):
  """Two dense layers with a GELU between.

  Attributes:
    mlp_dim: width M of the hidden layer.
    out_dim: width of the output, by default the width of the input.
    dropout_rate: dropout after each dense layer.
    kernel_init: initialiser of the kernels.
    bias_init: initialiser of the biases.
    gelu: 'erf' for the exact function; 'tanh' and 'quick' for approximations.
  """

  mlp_dim: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  out_dim: int | None = None
  dropout_rate: float = 0.1
  kernel_init: Any = nn.initializers.xavier_uniform()
  bias_init: Any = nn.initializers.normal(stddev=1e-6)
  gelu: str = 'tanh'

  @nn.compact
  def __call__(self, inputs, *, deterministic):
    """Maps tokens [B, N, D] to [B, N, out_dim]."""
    patches.check_choice('gelu', self.gelu, GELUS, _PLACE)
    dense = functools.partial(
      nn.Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      **dtypes.of(self),
    )
    gelu = gpu_layout.recomputed(GELUS[self.gelu])
    x = gelu(dense(self.mlp_dim)(inputs))  # [B, N, M]
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
    x = dense(out_dim)(x)  # [B, N, out_dim]
    return nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)


def drop_branch(x, rate, rng):
  """Sets a residual branch to zero for some images (stochastic depth).

  The rest is divided by 1 - rate, so that the expectation stays the same (arXiv
  1603.09382; by image, as in arXiv 2106.10270).

  `rate` is the probability, a number or a scalar array below 1; x is [B, N, D].
  """
  kept = jax.random.bernoulli(rng, 1 - rate, (x.shape[0], 1, 1))  # [B, 1, 1]
  scaled = x / jnp.asarray(1 - rate, jnp.float32)
  return jnp.where(kept, scaled, 0).astype(x.dtype)


class Encoder1DBlock(nn.Module):
  """One layer of the encoder: attention, then MLP, pre-norm (equations 2, 3).

  Attributes:
    mlp_dim: width M of the MLP.
    num_heads: number of heads K.
    dropout_rate: see Encoder, as for all that are not described here.
    only_first: whether to compute only the first token, [B, 1, D].
    layer: number of the layer, from 0; the block sows the mean over the tokens
      of its first norm's result as `layer_<layer>`. None: it does not.
  """

  mlp_dim: int
  num_heads: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  attention: str = attention.AUTO
  only_first: bool = False
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  causal: bool = False
  param_dtype: Any = jnp.float32
  layer: int | None = None

  @nn.compact
  def __call__(
    self,
    inputs,
    deterministic,
    mask=None,
    drop_rate=None,
    relative=None,
    length=None,
  ):
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Args:
      inputs: the tokens.
      deterministic: whether dropout is off.
      mask: see Encoder.
      drop_rate: rate of stochastic depth, a number or a scalar array; None: 0.
      relative: relative position embeddings [2N - 1, E], or None.
      length: number of tokens before the padding; None: there is no padding.
    """

    def drop(x):
      if drop_rate is None or deterministic:
        return x
      return drop_branch(x, drop_rate, self.make_rng('dropout'))

    types = dtypes.of(self)
    x = nn.LayerNorm(self.norm_eps, **types)(inputs)
    if self.layer is not None:
      patches.sow_mean(self, f'layer_{self.layer}', x)
    x = attention.MultiHeadDotProductAttention(
      dropout_rate=self.attention_dropout_rate,
      **dtypes.of(self, 'num_heads', 'attention', 'only_first', 'causal'),
    )(
      x,
      mask=mask,
      relative=relative,
      length=length,
      deterministic=deterministic,
    )
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    first = attention.first_token(inputs) if self.only_first else inputs
    x = gpu_layout.residual(first, drop(x), not deterministic)
    y = nn.LayerNorm(self.norm_eps, **types)(x)
    mlp = MlpBlock(**dtypes.of(self, 'mlp_dim', 'dropout_rate', 'gelu'))
    y = mlp(y, deterministic=deterministic)
    x = gpu_layout.residual(x, drop(y), not deterministic)
    return gpu_layout.row_major(sharding.constrain_batch(x))


class MAPHead(nn.Module):
  """Attention pooling: one learned query attends to all tokens, an MLP follows.

  The head of "Scaling Vision Transformers" (arXiv 2106.04560, section 3.2) and of
  SigLIP, with the names of their published parameters.

  Attributes:
    mlp_dim: width of the MLP.
    num_heads: number of heads.
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
  """

  mlp_dim: int
  num_heads: int
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps tokens [B, N, D] to [B, D]."""
    types, init = dtypes.of(self), nn.initializers.xavier_uniform()
    shape = (1, 1, x.shape[-1])
    probe = self.param('probe', init, shape, types['param_dtype'])
    probe = jnp.broadcast_to(probe.astype(x.dtype), (x.shape[0], *shape[1:]))
    x = attention.MultiHeadDotProductAttention(
      attention='default', **dtypes.of(self, 'num_heads')
    )(probe, x, deterministic=True)  # [B, 1, D]
    y = nn.LayerNorm(self.norm_eps, **types)(x)
    mlp = MlpBlock(dropout_rate=0.0, **dtypes.of(self, 'mlp_dim', 'gelu'))
    return (x + mlp(y, deterministic=True))[:, 0]


class Encoder(nn.Module):
  """Position embeddings, the layers, and a last LayerNorm (equations 1 to 4).

  Attributes:
    num_layers: number of layers.
    mlp_dim: width M of the MLP.
    num_heads: number of heads K.
    dropout_rate: dropout after dense layers and after the position embeddings.
    attention_dropout_rate: dropout of the attention weights.
    add_position_embedding: False is `position_embedding='none'`.
    only_first: whether the model reads only the first token, the class token. The
      last layer then computes only that token, and the result is [B, 1, D].
    attention: name of the implementation, see vit_jax.layers.attention. Where it
      is cuDNN's, tokens are padded to a multiple of 8 before the first layer, and
      the padding is cut off after the last, if no mask, dropout or positions in
      later layers need to know; nothing else sees it.
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
    remat: what the backward pass recomputes. '': nothing; 'full': everything
      but each layer's input; 'dots': everything but the inputs and the results
      of the dense layers.
    scan: whether to apply all layers but the last in a loop, which compiles
      faster. Results are the same except for dropout's noise, and parameters
      keep their names. None: in training on TPUs, with more than 12 layers.
    stochastic_depth: probability that an image skips the attention of the last
      layer, and likewise the MLP; it increases linearly from 0 in the first
      layer (arXiv 1603.09382).
    causal: whether token i attends to tokens 0 to i only, in every layer.
    first_norm: whether a LayerNorm comes before the first layer, as in CLIP.
    position_embedding: kind of position embeddings, 'learned_1d', 'learned_2d',
      'sincos2d', 'relative' or 'none', see vit_jax.layers.positions.
    position_layers: the layers that add them, 'stem', 'every' or 'shared'.
    position_grid: grid (height, width) in patches of learned tables, which are
      resized to the grid of the images; None: the tables have that grid.
  """

  num_layers: int
  mlp_dim: int
  num_heads: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  add_position_embedding: bool = True
  only_first: bool = False
  attention: str = attention.AUTO
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  remat: str = ''
  scan: bool | None = None
  stochastic_depth: float = 0.0
  causal: bool = False
  first_norm: bool = False
  position_embedding: str = 'learned_1d'
  position_layers: str = 'stem'
  position_grid: tuple[int, int] | None = None
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, *, train, mask=None, only_first=None, grid=None, parts=PARTS):
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Args:
      x: the tokens.
      train: whether dropout is on.
      mask: bool, broadcastable to [B, K, N, N], True where a query may attend
        to a key, in every layer; None: everywhere.
      only_first: overrides the field `only_first` unless it is None.
      grid: number of patches (down, across), (h, w), the last h*w tokens; for
        position embeddings on a grid, and for `position_grid`.
      parts: the parts of PARTS to apply, so that a model can do something
        between them, such as drop tokens.

    Raises:
      ValueError: if a field has an unknown value, the tokens do not suit the
        position embeddings, or only a part is applied and later layers add
        position embeddings too.
    """
    types = dtypes.of(self)
    if tuple(parts) != PARTS:
      self._check_parts()
    own = [_Own()] * self.num_layers
    if 'positions' in parts:
      x, own = self._positions(x, train, grid)
    if 'layers' not in parts:
      return x
    if self.first_norm:
      x = nn.LayerNorm(self.norm_eps, name='first_norm', **types)(x)
    if self.stochastic_depth:
      rates = np.linspace(0, self.stochastic_depth, self.num_layers).tolist()
      own = [each._replace(drop_rate=rate) for each, rate in zip(own, rates)]
    length = None
    if mask is None and all(each.relative is each.added is None for each in own):
      length, x = self._pad(x, train)
    x = self._layers(x, own, train, mask, length, only_first)
    x = x if length is None else x[:, :length]
    x = nn.LayerNorm(self.norm_eps, name='encoder_norm', **types)(x)
    self.sow('intermediates', 'tokens', x)
    patches.sow_mean(self, f'layer_{self.num_layers}', x)
    return x

  def _layers(self, x, own, train, mask, length, only_first):
    """Applies all layers; all but the last in a loop where that is faster.

    `own` has an _Own per layer. Initialising parameters and sowing intermediates
    need separate layers, and intermediates need all tokens of the last layer.
    """
    patches.check_choice('remat', self.remat, loop_lib.REMATS, _PLACE)
    if not self.num_layers:
      return x
    sows = self.is_mutable_collection('intermediates')
    looped = loop_lib.is_looped(self.scan, self.num_layers, train)
    loop = looped and not sows and not self.is_initializing()
    block = functools.partial(
      loop_lib.recomputed(Encoder1DBlock, self.remat, loop, (2, 6)),
      **dtypes.of(self, *_BLOCK_FIELDS),
    )

    def apply(layer, x, own):
      x = layer(x, not train, mask, own.drop_rate, own.relative, length)
      return x if own.added is None else x + own.added

    *first, last = [f'encoderblock_{i}' for i in range(self.num_layers)]
    if loop:
      params = [self.variables['params'][name] for name in first]
      keys = [None] * len(first)
      if train and (
        self.dropout_rate or self.attention_dropout_rate or self.stochastic_depth
      ):
        keys = jax.random.split(self.make_rng('dropout'), len(first))
      layer = block(parent=None)

      def apply_pure(x, params, key, own):
        rngs = None if key is None else {'dropout': key}
        function = functools.partial(layer.apply, {'params': params}, rngs=rngs)
        return apply(function, x, own)

      x = loop_lib.over_layers(apply_pure, x, params, keys, own[:-1])
    else:
      for i, name in enumerate(first):
        x = apply(block(name=name, layer=i), x, own[i])
    only_first = self.only_first if only_first is None else only_first
    layer = block(name=last, layer=len(first), only_first=only_first and not sows)
    return apply(layer, x, own[-1])

  def _pad(self, x, train):
    """Pads tokens [B, N, D] at their end to the multiple that kernels like.

    Dropout of the tokens would draw other noise with padding, so that tokens are
    then not padded.

    Returns:
      N, or None if nothing is padded; the tokens.
    """
    name = attention.choose(
      self.attention,
      self.dtype,
      x.shape[2] // self.num_heads,
      not (train and self.attention_dropout_rate),
    )
    rest = -x.shape[1] % _MULTIPLES.get(name, 1)
    sees = self.is_initializing() or self.is_mutable_collection('intermediates')
    if not rest or sees or (train and self.dropout_rate):
      return None, x
    return x.shape[1], jnp.pad(x, ((0, 0), (0, rest), (0, 0)))

  def _check_parts(self):
    """Raises ValueError if the layers have positions of their own."""
    if self._kind() != 'none' and self.position_layers != 'stem':
      raise ValueError(
        f"position_layers='{self.position_layers}' adds the positions of all "
        'tokens in later layers too, so that no token can be dropped after the '
        "first ones are added: use position_layers='stem' "
        '(config.model.transformer.position_layers)'
      )

  def _kind(self):
    return positions.kind_of(
      self.add_position_embedding,
      self.position_embedding,
      self.position_layers,
      self.position_grid,
    )

  def _positions(self, x, train, grid):
    """Adds position embeddings before the first layer.

    Returns tokens [B, N, D] and an _Own per layer.
    """
    kind, nothing = self._kind(), [_Own()] * self.num_layers
    if kind == 'none':
      return x, nothing
    if kind == 'relative':
      module, tokens, width = positions.RelativeEmbedding, x.shape[1], x.shape[2]
      make = lambda name: module(name=name, param_dtype=self.param_dtype)(
        tokens, width // self.num_heads
      )
      tables = positions.by_layer(make, self.position_layers, self.num_layers)
      return x, [_Own(relative=table) for table in tables]
    module = functools.partial(
      positions.AddPositionEmbs,
      kind=kind,
      grid=grid,
      table_grid=self.position_grid,
      param_dtype=self.param_dtype,
    )
    make = lambda name: module(name=name).table(x).astype(self.dtype)
    first, *later = positions.by_layer(make, self.position_layers, self.num_layers)
    x = x.astype(self.dtype) + first
    x = nn.Dropout(self.dropout_rate)(x, deterministic=not train)
    return x, [_Own(added=table) for table in [*later, None]]
