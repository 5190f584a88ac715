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
  grid_attention,
  layer_stack as loop_lib,
  norms,
  patches,
  position_kinds,
  positions,
  xla_hints,
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
MLPS = ('gelu', 'swiglu')


# What an encoder consists of, in order: the position embeddings before the first
# layer, and the layers with the last norm.
PARTS = ('positions', 'layers')
# cuDNN's kernels are faster with a multiple of this number of tokens. The encoder then
# pads the tokens, once.
_MULTIPLE = 8
# Fields of the encoder that its attention and attention pooling have too.
_ATTENTION_FIELDS = ('num_heads', 'norm', 'norm_eps', 'qkv_bias', 'qk_norm')
# Fields of attention pooling.
POOLING_FIELDS = ('mlp_dim', 'gelu', 'mlp', *_ATTENTION_FIELDS)
# Fields of the encoder that its layers have too.
_BLOCK_FIELDS = (
  'mlp_dim', 'dropout_rate', 'attention_dropout_rate', 'attention', 'gelu', 'causal',
  'parallel', 'mlp', 'layer_scale', 'mlp_norm', 'attention_norm', *_ATTENTION_FIELDS,
)  # fmt: skip


class _Own(NamedTuple):
  """What differs between layers; None for nothing."""

  drop_rate: Any = None  # Of stochastic depth.
  relative: Any = None  # Relative position embeddings [2N - 1, E], biases [K, N, N].
  added: Any = None  # What is added after the layer, [1, N, D].


class MlpBlock(nn.Module):
  """Two dense layers with a GELU, a key of GELUS, between.

  With mlp='swiglu', the hidden layer is silu(gate(x)) * Dense_0(x) instead (arXiv
  2002.05202), whose third dense layer has the width of the other two.
  """

  mlp_dim: int  # M, the width of the hidden layer.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  out_dim: int | None = None  # Width of the output; None: same as the input.
  dropout_rate: float = 0.1  # After each dense layer.
  kernel_init: Any = nn.initializers.xavier_uniform()
  bias_init: Any = nn.initializers.normal(stddev=1e-6)
  gelu: str = 'tanh'
  mlp: str = 'gelu'  # One of MLPS.
  # Whether a norm follows the hidden layer, and its kind and epsilon.
  mlp_norm: bool = False
  norm: str = 'layer'
  norm_eps: float = 1e-6

  @nn.compact
  def __call__(self, inputs, *, deterministic):
    """Maps tokens [B, N, D] to [B, N, out_dim]."""
    patches.check_choice('gelu', self.gelu, GELUS, _PLACE)
    patches.check_choice('mlp', self.mlp, MLPS, _PLACE)
    dense = functools.partial(
      nn.Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dot_general=xla_hints.dot_general,
      **dtypes.of(self),
    )
    x = dense(self.mlp_dim)(inputs)  # [B, N, M]
    if self.mlp == 'swiglu':
      gated = xla_hints.recomputed(lambda gate, x: nn.silu(gate) * x)
      x = gated(dense(self.mlp_dim, name='gate')(inputs), x)
    else:
      x = xla_hints.recomputed(GELUS[self.gelu])(x)
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    if self.mlp_norm:
      x = norms.make(self.norm, self.norm_eps, 'LayerNorm_0', **dtypes.of(self))(x)
    out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
    x = dense(out_dim)(x)  # [B, N, out_dim]
    return nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)


def drop_branch(x, rate, rng):
  """Sets a residual branch [B, N, D] to zero for some images (stochastic depth).

  The rest is divided by 1 - rate, so that the expectation stays the same (arXiv
  1603.09382; by image, as in arXiv 2106.10270). `rate` is a number or a scalar array
  below 1.
  """
  kept = jax.random.bernoulli(rng, 1 - rate, (x.shape[0], 1, 1))  # [B, 1, 1]
  scaled = x / jnp.asarray(1 - rate, jnp.float32)
  return jnp.where(kept, scaled, 0).astype(x.dtype)


class LayerScale(nn.Module):
  """Multiplies each channel by a learned number (arXiv 2103.17239, section 2)."""

  init: float
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps tokens [B, N, D] to [B, N, D]."""
    init = nn.initializers.constant(self.init)
    gamma = self.param('gamma', init, x.shape[-1:], self.param_dtype)
    x, gamma = nn.dtypes.promote_dtype(x, gamma, dtype=self.dtype)
    return x * gamma


class Encoder1DBlock(nn.Module):
  """One layer of the encoder: attention, then MLP, pre-norm (equations 2, 3).

  With `parallel`, both read the same norm: x + attention(norm(x)) + MLP(norm(x)).

  The fields are as in Encoder, plus `layer`, the number of the layer, from 0: the
  block sows the mean over the tokens of its first norm's result as `layer_<layer>`,
  unless it is None, and `axis`, see vit_jax.layers.grid_attention.along.
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
  norm: str = 'layer'
  qkv_bias: bool = True
  qk_norm: bool = False
  parallel: bool = False
  mlp: str = 'gelu'
  layer_scale: float | None = None
  axis: str | None = None
  grid: tuple[int, int] | None = None
  mlp_norm: bool = False
  attention_norm: bool = False

  @nn.compact
  def __call__(
    self, inputs, deterministic, mask=None, drop_rate=None, relative=None, length=None,
    angles=None,
  ):  # fmt: skip
    """Maps tokens [B, N, D] to tokens [B, N, D], or [B, 1, D] with `only_first`.

    `mask` is as in Encoder, `drop_rate` the rate of stochastic depth, a number or a
    scalar array, `relative` are relative position embeddings [2N - 1, E], or biases
    [K, N, N], `length` is the number of tokens before the padding, and `angles`,
    [N, E/2], rotate queries and keys (rotary position embeddings); each may be None.
    """

    def drop(x):
      if drop_rate is None or deterministic:
        return x
      return drop_branch(x, drop_rate, self.make_rng('dropout'))

    def scale(x):
      init, types = self.layer_scale, dtypes.of(self)
      return x if init is None else LayerScale(init, **types)(x)

    norm = functools.partial(norms.make, self.norm, self.norm_eps, **dtypes.of(self))
    fields = 'mlp_dim', 'dropout_rate', 'gelu', 'mlp', 'mlp_norm', 'norm', 'norm_eps'
    mlp = MlpBlock(**dtypes.of(self, *fields))
    y = norm('LayerNorm_0')(inputs)
    if self.layer is not None:
      patches.sow_mean(self, f'layer_{self.layer}', y)
    attend = functools.partial(
      attention.MultiHeadDotProductAttention(
        dropout_rate=self.attention_dropout_rate,
        **dtypes.of(
          self, 'attention', 'only_first', 'causal', 'attention_norm', *_ATTENTION_FIELDS
        ),
      ),
      mask=mask, relative=relative, length=length, deterministic=deterministic,
    )  # fmt: skip
    x = grid_attention.along(self.axis, self.grid, attend, y, angles)
    x = scale(nn.Dropout(self.dropout_rate)(x, deterministic=deterministic))
    first = attention.first_token(inputs) if self.only_first else inputs
    if self.parallel:
      y = attention.first_token(y) if self.only_first else y
      x = x + scale(mlp(y, deterministic=deterministic))
      x = xla_hints.residual(first, drop(x), not deterministic)
    else:
      x = xla_hints.residual(first, drop(x), not deterministic)
      y = scale(mlp(norm('LayerNorm_1')(x), deterministic=deterministic))
      x = xla_hints.residual(x, drop(y), not deterministic)
    return xla_hints.row_major(sharding.constrain_tokens(x))


class AxialBlock(Encoder1DBlock):
  """One layer of axial attention: the blocks `row` and `column` (appendix D.6)."""

  @nn.compact
  def __call__(self, inputs, deterministic, *args):
    """Maps patches [B, h*w, D] to [B, h*w, D]; arguments as in Encoder1DBlock."""
    block = functools.partial(Encoder1DBlock, **dtypes.of(self, 'grid', *_BLOCK_FIELDS))
    x = block(axis='row', name='row', layer=self.layer)(inputs, deterministic, *args)
    return block(axis='column', name='column')(x, deterministic, *args)


class MAPHead(nn.Module):
  """Attention pooling: one learned query attends to all tokens, an MLP follows.

  The head of "Scaling Vision Transformers" (arXiv 2106.04560, section 3.2) and of
  SigLIP, with the names of their published parameters.
  """

  mlp_dim: int
  num_heads: int
  gelu: str = 'tanh'
  norm_eps: float = 1e-6  # Added to the variance in LayerNorm.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  norm: str = 'layer'  # These four are as in Encoder.
  qkv_bias: bool = True
  qk_norm: bool = False
  mlp: str = 'gelu'

  @nn.compact
  def __call__(self, x):
    """Maps tokens [B, N, D] to [B, D]."""
    types, init = dtypes.of(self), nn.initializers.xavier_uniform()
    shape = (1, 1, x.shape[-1])
    probe = self.param('probe', init, shape, types['param_dtype'])
    probe = jnp.broadcast_to(probe.astype(x.dtype), (x.shape[0], *shape[1:]))
    x = attention.MultiHeadDotProductAttention(
      attention='default', **dtypes.of(self, *_ATTENTION_FIELDS)
    )(probe, x, deterministic=True)  # [B, 1, D]
    y = norms.make(self.norm, self.norm_eps, 'LayerNorm_0', **types)(x)
    mlp = MlpBlock(dropout_rate=0.0, **dtypes.of(self, 'mlp_dim', 'gelu', 'mlp'))
    return (x + mlp(y, deterministic=True))[:, 0]


class Encoder(nn.Module):
  """Position embeddings, the layers, and a last LayerNorm (equations 1 to 4).

  Where attention is cuDNN's, tokens are padded to a multiple of 8 before the first
  layer, and the padding is cut off after the last, if no mask, dropout or positions in
  later layers need to know; nothing else sees it.
  """

  num_layers: int
  mlp_dim: int  # M.
  num_heads: int  # K.
  # Dropout after dense layers and after the position embeddings.
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1  # Dropout of the attention weights.
  add_position_embedding: bool = True  # False is position_embedding='none'.
  # Whether the model reads only the first token, the class token. The last layer then
  # computes only that token, and the result is [B, 1, D].
  only_first: bool = False
  attention: str = attention.AUTO  # See vit_jax.layers.attention.
  gelu: str = 'tanh'  # A key of GELUS.
  norm_eps: float = 1e-6  # Added to the variance in norms.
  # What the backward pass recomputes. '': nothing; 'full': everything but each layer's
  # input; 'dots': everything but the inputs and the results of the dense layers.
  remat: str = ''
  # Whether to apply all layers but the last in a loop, which compiles faster. Results
  # are the same except for dropout's noise, and parameters keep their names. None: in
  # training on TPUs, with more than 12 layers.
  scan: bool | None = None
  # Probability that an image skips the attention of the last layer, and likewise the
  # MLP; it increases linearly from 0 in the first layer (arXiv 1603.09382). An image
  # skips both or neither of a layer with `parallel`.
  stochastic_depth: float = 0.0
  causal: bool = False  # Whether token i attends to tokens 0 to i only.
  first_norm: bool = False  # Whether a LayerNorm precedes the layers, as in CLIP.
  # See vit_jax.layers.positions. The grid is (height, width) in patches of learned
  # tables, which are resized to the grid of the images; None: the tables have that grid.
  position_embedding: str = 'learned_1d'
  position_layers: str = 'stem'
  position_grid: tuple[int, int] | None = None
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  # The following are variations of ViT-22B (arXiv 2302.05442, section 2).
  norm: str = 'layer'  # Kind of all norms, see vit_jax.layers.norms.
  qkv_bias: bool = True  # Whether queries, keys and values have biases.
  # Whether norms precede the product of queries and keys, one over each head.
  qk_norm: bool = False
  # Whether attention and MLP of a layer both read its input, after one norm.
  parallel: bool = False
  # The following are variations of DINOv2 (arXiv 2304.07193).
  # MLP of a layer: 'swiglu' multiplies two hidden layers of width M, one after a SiLU.
  mlp: str = 'gelu'
  # Initial value of learned factors on the channels of each branch; None: no factors.
  layer_scale: float | None = None
  # See vit_jax.layers.grid_attention. A window has an odd number of patches a side.
  attention_pattern: str = 'global'
  attention_window: int = 7
  # The following are variations of EVA-02 (arXiv 2303.11331, section 2.1). Rotary
  # embeddings: their temperature, and the grid to which `axial_rope` scales.
  rope_temperature: float = 100.0
  rope_grid: tuple[int, int] | None = None
  # Whether norms follow the hidden layer of the MLP, and the heads of attention.
  mlp_norm: bool = False
  attention_norm: bool = False

  @nn.compact
  def __call__(
    self, x, *, train, mask=None, only_first=None, grid=None, parts=PARTS,
    last_norm=True,
  ):  # fmt: skip
    """Maps tokens [B, N, D] to tokens [B, N, D].

    `mask`, bool, broadcastable to [B, K, N, N], is True where a query may attend to a
    key, in every layer; None: everywhere. `only_first` overrides the field unless it is
    None. `grid` is the number of patches (down, across), (h, w), the last h*w tokens;
    for position embeddings on a grid, `position_grid` and attention patterns. `parts`
    selects from PARTS what to apply, so that a model can do something in between, such
    as drop tokens. `last_norm` is whether a norm follows the layers, rather than the model's pooling.

    Raises ValueError if a field has an unknown value, the tokens do not suit the
    position embeddings or the attention pattern, or only a part is applied and later
    layers add position embeddings too.
    """
    norm = functools.partial(norms.make, self.norm, self.norm_eps, **dtypes.of(self))
    kind = position_kinds.kind_of(
      self.add_position_embedding,
      self.position_embedding,
      self.position_layers,
      self.position_grid,
    )
    if tuple(parts) != PARTS and kind != 'none' and self.position_layers != 'stem':
      raise ValueError(
        f"position_layers='{self.position_layers}' adds the positions of all "
        'tokens in later layers too, so that no token can be dropped, nor registers '
        "inserted, after the first ones are added: use position_layers='stem' "
        '(config.model.transformer.position_layers)'
      )
    own = [_Own()] * self.num_layers
    tables = position_kinds.table_kind(kind)
    if 'positions' in parts and tables != 'none':
      x, own = self._positions(x, tables, train, grid)
    if 'layers' not in parts:
      return x
    if self.first_norm:
      x = norm('first_norm')(x)
    if self.stochastic_depth:
      rates = np.linspace(0, self.stochastic_depth, self.num_layers).tolist()
      own = [each._replace(drop_rate=rate) for each, rate in zip(own, rates)]
    only_first = self.only_first if only_first is None else only_first
    mask = grid_attention.masked(
      self.attention_pattern, self.attention_window, grid, x.shape[1], mask,
      relative=kind in position_kinds.RELATIVE, only_first=only_first,
    )  # fmt: skip
    length = angles = None
    if kind in position_kinds.ROPES:
      size = (x.shape[1], x.shape[2] // self.num_heads)
      rope = (kind, self.rope_temperature, self.rope_grid)
      angles = positions.rope_angles(grid, *size, *rope)
    whole = mask is None and self.attention_pattern == 'global'
    if whole and all(each.relative is each.added is None for each in own):
      length, x = self._pad(x, train)
    if length is not None and angles is not None:
      angles = np.pad(angles, ((0, x.shape[1] - length), (0, 0)))
    x = self._layers(x, own, train, mask, length, angles, only_first, grid)
    x = x if length is None else x[:, :length]
    x = norm('encoder_norm')(x) if last_norm else x
    self.sow('intermediates', 'tokens', x)
    patches.sow_mean(self, f'layer_{self.num_layers}', x)
    return x

  def _layers(self, x, own, train, mask, length, angles, only_first, grid):
    """Applies all layers; all but the last in a loop where that is faster.

    Initialising parameters and sowing intermediates need separate layers, and
    intermediates need all tokens of the last layer.
    """
    patches.check_choice('remat', self.remat, loop_lib.REMATS, _PLACE)
    if not self.num_layers:
      return x
    if sharding.sequence_shards() > 1:
      x = sharding.constrain_tokens(x)
    sows = self.is_mutable_collection('intermediates')
    looped = loop_lib.is_looped(self.scan, self.num_layers, train)
    loop = looped and not sows and not self.is_initializing()
    layer = AxialBlock if self.attention_pattern == 'axial' else Encoder1DBlock
    block = functools.partial(
      loop_lib.recomputed(layer, self.remat, loop, (2, 6)),
      **dtypes.of(self, *_BLOCK_FIELDS),
      grid=grid,
    )

    def apply(layer, x, own):
      x = layer(x, not train, mask, own.drop_rate, own.relative, length, angles)
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
    layer = block(name=last, layer=len(first), only_first=only_first and not sows)
    return apply(layer, x, own[-1])

  def _pad(self, x, train):
    """Pads tokens [B, N, D] at their end for cuDNN; returns N or None, and the tokens.

    Dropout of the tokens would draw other noise with padding, so that tokens are
    then not padded.
    """
    plain = not (train and self.attention_dropout_rate)
    head_dim = x.shape[2] // self.num_heads
    name = attention.choose(self.attention, self.dtype, head_dim, plain)
    rest = -x.shape[1] % _MULTIPLE
    sees = self.is_initializing() or self.is_mutable_collection('intermediates')
    if name != 'cudnn' or not rest or sees or (train and self.dropout_rate):
      return None, x
    return x.shape[1], jnp.pad(x, ((0, 0), (0, rest), (0, 0)))

  def _positions(self, x, kind, train, grid):
    """Adds embeddings before the first layer; returns the tokens and a list of _Own."""
    if kind in position_kinds.RELATIVE:
      module, size = positions.RelativeBias, (grid, x.shape[1], self.num_heads)
      if kind == 'relative':
        module = positions.RelativeEmbedding
        size = (x.shape[1], x.shape[2] // self.num_heads)
      module = functools.partial(module, param_dtype=self.param_dtype)
      make = lambda name: module(name=name)(*size)
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
