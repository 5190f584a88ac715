"""The encoder of the Vision Transformer: position embeddings, layers, a norm.

A pre-norm Transformer (arXiv 2010.11929, equations 1 to 4) with the published
names of modules and parameters.

Shapes: B images, N tokens, D width of a token, M width of the MLP.
"""

import functools
from typing import Any

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
# Kernels are faster with a multiple of so many tokens, by the name of the
# implementation of attention. The encoder then pads the tokens, once.
_MULTIPLES = {'cudnn': 8}
# Fields of the encoder that its layers have too.
_BLOCK_FIELDS = (
  'mlp_dim', 'num_heads', 'dropout_rate', 'attention_dropout_rate',
  'attention', 'gelu', 'norm_eps', 'causal',
)  # fmt: skip


class MlpBlock(nn.Module):
  """Two dense layers with a GELU between.

  Attributes:
    mlp_dim: width M of the hidden layer.
    out_dim: width of the output, by default that of the input.
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
    dropout_rate: see Encoder, as for all that are not here.
    only_first: whether to compute the first token alone, [B, 1, D].
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
    only_first: whether the model reads the first token alone, the class token.
      The last layer then computes that token only, and the result is [B, 1, D].
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
    later, relative = [None] * (self.num_layers - 1), [None] * self.num_layers
    if tuple(parts) != PARTS:
      self._check_parts()
    if 'positions' in parts:
      x, later, relative = self._positions(x, train, grid)
    if 'layers' not in parts:
      return x
    if self.first_norm:
      x = nn.LayerNorm(self.norm_eps, name='first_norm', **types)(x)
    # Initialising parameters and sowing intermediates need separate layers, and
    # intermediates need all tokens of the last layer.
    sows = self.is_mutable_collection('intermediates')
    last = self.num_layers - 1
    looped = loop_lib.is_looped(self.scan, self.num_layers, train)
    loop = looped and not sows and not self.is_initializing()
    patches.check_choice('remat', self.remat, loop_lib.REMATS, _PLACE)
    length = None
    if not sows and all(own is None for own in (mask, *later, *relative)):
      length, x = self._pad(x, train)
    block = functools.partial(
      loop_lib.recomputed(Encoder1DBlock, self.remat, loop, (2, 6)),
      **dtypes.of(self, *_BLOCK_FIELDS),
    )
    drop_rates = [None] * self.num_layers
    if self.stochastic_depth:
      ends = 0, self.stochastic_depth
      drop_rates = np.linspace(*ends, self.num_layers).tolist()
    if loop:
      by_layer = drop_rates[:last], relative[:last], later
      x = self._scan_layers(block(parent=None), x, last, train, mask, length, by_layer)
    else:
      for i in range(last):
        x = block(name=f'encoderblock_{i}', layer=i)(
          x, not train, mask, drop_rates[i], relative[i], length
        )
        x = x if later[i] is None else x + later[i]
    if self.num_layers:
      only_first = self.only_first if only_first is None else only_first
      x = block(
        name=f'encoderblock_{last}',
        layer=last,
        only_first=only_first and not sows,
      )(x, not train, mask, drop_rates[last], relative[last], length)
    x = x if length is None else x[:, :length]
    x = nn.LayerNorm(self.norm_eps, name='encoder_norm', **types)(x)
    self.sow('intermediates', 'tokens', x)
    patches.sow_mean(self, f'layer_{self.num_layers}', x)
    return x

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
    if not rest or (train and self.dropout_rate) or self.is_initializing():
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

    Returns tokens [B, N, D]; what to add before each later layer, L - 1 times
    [1, N, D] or None; the relative embeddings of each layer, [2N - 1, E] or
    None.
    """
    kind = self._kind()
    nothing = [None] * self.num_layers
    if kind == 'none':
      return x, nothing[1:], nothing
    if kind == 'relative':
      module = positions.RelativeEmbedding
      size = (x.shape[1], x.shape[2] // self.num_heads)
      make = lambda name: module(name=name, param_dtype=self.param_dtype)(*size)
      tables = positions.by_layer(make, self.position_layers, self.num_layers)
      return x, nothing[1:], tables
    module = functools.partial(
      positions.AddPositionEmbs,
      kind=kind,
      grid=grid,
      table_grid=self.position_grid,
      param_dtype=self.param_dtype,
    )
    make = lambda name: module(name=name).table(x).astype(self.dtype)
    tables = positions.by_layer(make, self.position_layers, self.num_layers)
    x = x.astype(self.dtype) + tables[0]
    x = nn.Dropout(self.dropout_rate)(x, deterministic=not train)
    return x, tables[1:], nothing

  def _scan_layers(self, block, x, num_layers, train, mask, length, by_layer):
    """Applies the first `num_layers` layers in a loop, compiled once.

    `by_layer` has for each layer the rate of stochastic depth, the relative
    embeddings, and what to add after the layer.
    """
    params = self.variables['params']
    layers = [params[f'encoderblock_{i}'] for i in range(num_layers)]
    dropout = train and (
      self.dropout_rate or self.attention_dropout_rate or self.stochastic_depth
    )
    keys = [None] * num_layers
    if dropout:
      keys = jax.random.split(self.make_rng('dropout'), num_layers)

    def apply(x, params, key, rate, relative, later):
      rngs = None if key is None else {'dropout': key}
      variables = {'params': params}
      x = block.apply(variables, x, not train, mask, rate, relative, length, rngs=rngs)
      return x if later is None else x + later

    return loop_lib.over_layers(apply, x, layers, keys, *by_layer)
