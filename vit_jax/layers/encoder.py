"""The encoder of the Vision Transformer: position embeddings, layers, a norm.

A pre-norm Transformer (arXiv 2010.11929, equations 1 to 4) with the published
names of modules and parameters. The field `config` of its modules is a
vit_jax.configs.models.Transformer.

Shapes: B images, N tokens, D width of a token, M width of the MLP, K heads, E width of
a head.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention,
  dtypes,
  grid_attention,
  layer_stack,
  norms,
  patches,
  position_kinds,
  positions,
  xla_hints,
)
from vit_jax.layers.dtypes import Array


def quick_gelu(x: Float[Array, '*axes']) -> Float[Array, '*axes']:
  """Returns x * sigmoid(1.702 x), an approximation of GELU."""
  return x * nn.sigmoid(1.702 * x)


# Google's models were trained with the tanh approximation; timm and Hugging
# Face compute the exact function by default, CLIP another approximation.
GELUS: dict[str, Callable[[Array], Array]] = {
  'tanh': functools.partial(jax.nn.gelu, approximate=True),
  'erf': functools.partial(jax.nn.gelu, approximate=False),
  'quick': quick_gelu,
}

# The parts of an encoder, in order: the position embeddings before the first layer,
# and the layers with the last norm.
PARTS = ('positions', 'layers')
# cuDNN's kernels are faster with a multiple of this number of tokens. The encoder then
# pads the tokens, once.
_MULTIPLE = 8
# Fields of a pytree that are not arrays.
_STATIC = {'static': True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
  """What the layers of an encoder share in a call."""

  train: bool = dataclasses.field(metadata=_STATIC)
  # Broadcastable to [B, K, N, N], True where a query may attend to a key.
  mask: Bool[Array, '...'] | None = None
  # Angles of rotary position embeddings.
  angles: Float[Array, 'N half_E'] | None = None
  # Number of tokens before the padding; None: there is no padding.
  length: int | None = dataclasses.field(default=None, metadata=_STATIC)
  # Number of patches (down, across).
  grid: tuple[int, int] | None = dataclasses.field(default=None, metadata=_STATIC)


class LayerInputs(NamedTuple):
  """What differs between the layers of an encoder; None for nothing."""

  # Rate of stochastic depth.
  drop_rate: float | Float[Array, ''] | None = None
  # Relative position embeddings [2N - 1, E], or biases of logits [K, N, N].
  relative: Float[Array, '...'] | None = None
  # Position embeddings that are added after the layer.
  added: Float[Array, '1 N D'] | None = None

  @property
  def has_positions(self) -> bool:
    """Whether position embeddings enter the layer or follow it."""
    return self.relative is not None or self.added is not None


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
  kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
  bias_init: nn.initializers.Initializer = nn.initializers.normal(stddev=1e-6)
  gelu: str = 'tanh'
  mlp: str = 'gelu'
  # Whether a norm follows the hidden layer, and its kind and epsilon.
  mlp_norm: bool = False
  norm: str = 'layer'
  norm_eps: float = 1e-6

  @nn.compact
  def __call__(
    self, inputs: Float[Array, 'B N D'], *, deterministic: bool
  ) -> Float[Array, 'B N out_dim']:
    """Applies the layers to each token."""
    types = dtypes.of(self)
    # In 16 bits, the hidden layer is float32 on CPUs, see xla_hints; the result is not.
    dense = functools.partial(
      nn.Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dot_general=xla_hints.dot_general,
      **types,
    )
    x = dense(self.mlp_dim)(inputs)  # [B, N, M]
    if self.mlp == 'swiglu':
      gate = dense(self.mlp_dim, name='gate')(inputs)
      x = xla_hints.recomputed(_gated)(gate, x)
    else:
      x = xla_hints.recomputed(GELUS[self.gelu])(x)
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    if self.mlp_norm:
      x = norms.make(self.norm, self.norm_eps, 'LayerNorm_0', **types)(x)
    out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
    x = dense(out_dim)(x).astype(dtypes.result_of(self, inputs))  # [B, N, out_dim]
    return nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)


def _gated(
  gate: Float[Array, 'B N M'], x: Float[Array, 'B N M']
) -> Float[Array, 'B N M']:
  return nn.silu(gate) * x


def drop_branch(
  x: Float[Array, 'B N D'], rate: float | Float[Array, ''], rng: Array
) -> Float[Array, 'B N D']:
  """Sets a residual branch to zero for some images (stochastic depth).

  The rest is divided by 1 - rate, so that the expectation stays the same (arXiv
  1603.09382; by image, as in arXiv 2106.10270). `rate` is below 1.
  """
  mask = jax.random.bernoulli(rng, 1 - rate, (x.shape[0], 1, 1))  # [B, 1, 1]
  scaled = x / jnp.asarray(1 - rate, jnp.float32)
  return jnp.where(mask, scaled, 0).astype(x.dtype)


class LayerScale(nn.Module):
  """Multiplies each channel by a learned number (arXiv 2103.17239, section 2)."""

  init: float
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, '*axes D']) -> Float[Array, '*axes D']:
    init = nn.initializers.constant(self.init)
    gamma = self.param('gamma', init, x.shape[-1:], self.param_dtype)
    x, gamma = nn.dtypes.promote_dtype(x, gamma, dtype=self.dtype)
    return x * gamma


class _Layer(nn.Module):
  """Makes the parts of a layer from the fields of an encoder."""

  config: model_configs.Transformer
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.nowrap
  def _norm(self, name: str) -> nn.Module:
    return norms.make(self.config.norm, self.config.norm_eps, name, **dtypes.of(self))

  @nn.nowrap
  def _mlp(self, **fields: Any) -> MlpBlock:
    return MlpBlock(
      self.config.mlp_dim,
      gelu=self.config.gelu,
      mlp=self.config.mlp,
      norm=self.config.norm,
      norm_eps=self.config.norm_eps,
      **dtypes.of(self),
      **fields,
    )

  @nn.nowrap
  def _attention(self, **fields: Any) -> attention.MultiHeadDotProductAttention:
    return attention.MultiHeadDotProductAttention(
      self.config.num_heads,
      qkv_bias=self.config.qkv_bias,
      qk_norm=self.config.qk_norm,
      norm=self.config.norm,
      norm_eps=self.config.norm_eps,
      **dtypes.of(self),
      **fields,
    )


class Block(_Layer):
  """One layer of the encoder: attention, then MLP, pre-norm (equations 2, 3).

  With `config.parallel`, both read the same norm: x + attention(norm(x)) +
  MLP(norm(x)).
  """

  # Number of the layer, from 0: the block sows the mean over the tokens of its first
  # norm's result as `layer_<layer>`, unless it is None.
  layer: int | None = None
  only_first: bool = False  # Whether to compute the first token only.
  axis: str | None = None  # See vit_jax.layers.grid_attention.along.

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, 'B N D'],
    context: Context,
    layer_inputs: LayerInputs = LayerInputs(),  # noqa: B008
  ) -> Float[Array, 'B _ D']:
    """Maps tokens [B, N, D] to tokens [B, N, D], or [B, 1, D] with `only_first`.

    `layer_inputs.added` has no effect here.
    """
    config, train = self.config, context.train
    y = self._norm('LayerNorm_0')(inputs)
    if self.layer is not None:
      patches.sow_mean(self, f'layer_{self.layer}', y)
    mlp = self._mlp(dropout_rate=config.dropout_rate, mlp_norm=config.mlp_norm)
    attend = functools.partial(
      self._attention(
        dropout_rate=config.attention_dropout_rate,
        attention=config.attention,
        only_first=self.only_first,
        causal=config.causal,
        attention_norm=config.attention_norm,
      ),
      mask=context.mask,
      relative=layer_inputs.relative,
      length=context.length,
      deterministic=not train,
    )
    x = grid_attention.along(self.axis, context.grid, attend, y, context.angles)
    x = nn.Dropout(config.dropout_rate)(x, deterministic=not train)
    x = self._scaled(x)
    first = attention.first_token(inputs) if self.only_first else inputs
    drop = functools.partial(self._drop, train, layer_inputs.drop_rate)
    if config.parallel:
      y = attention.first_token(y) if self.only_first else y
      x = x + self._scaled(mlp(y, deterministic=not train))
      x = xla_hints.residual(first, drop(x), train)
    else:
      x = xla_hints.residual(first, drop(x), train)
      y = mlp(self._norm('LayerNorm_1')(x), deterministic=not train)
      x = xla_hints.residual(x, drop(self._scaled(y)), train)
    return xla_hints.row_major(sharding.constrain_tokens(x))

  @nn.nowrap
  def _scaled(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
    """Multiplies a branch by its LayerScale, if there is one."""
    if self.config.layer_scale is None:
      return x
    return LayerScale(self.config.layer_scale, **dtypes.of(self))(x)

  @nn.nowrap
  def _drop(
    self, train: bool, rate: float | Float[Array, ''] | None, x: Float[Array, 'B N D']
  ) -> Float[Array, 'B N D']:
    if rate is None or not train:
      return x
    return drop_branch(x, rate, self.make_rng('dropout'))


class AxialBlock(Block):
  """One layer of axial attention: the blocks `row` and `column` (appendix D.6)."""

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, 'B N D'],
    context: Context,
    layer_inputs: LayerInputs = LayerInputs(),  # noqa: B008
  ) -> Float[Array, 'B N D']:
    """Maps patches [B, h*w, D] to [B, h*w, D]; see Block."""
    block = functools.partial(Block, self.config, **dtypes.of(self))
    row = block(layer=self.layer, axis='row', name='row')
    column = block(axis='column', name='column')
    return column(row(inputs, context, layer_inputs), context, layer_inputs)


class MAPHead(_Layer):
  """Attention pooling: one learned query attends to all tokens, an MLP follows.

  The head of "Scaling Vision Transformers" (arXiv 2106.04560, section 3.2) and of
  SigLIP, with the names of their published parameters.
  """

  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B D']:
    """Pools the tokens."""
    shape = (1, 1, x.shape[-1])
    param_dtype = dtypes.of(self)['param_dtype']
    probe = self.param('probe', nn.initializers.xavier_uniform(), shape, param_dtype)
    probe = jnp.broadcast_to(probe.astype(x.dtype), (x.shape[0], *shape[1:]))
    attend = self._attention(attention='default')
    x = attend(probe, x, deterministic=True)  # [B, 1, D]
    y = self._norm('LayerNorm_0')(x)
    mlp = self._mlp(dropout_rate=0.0)
    return (x + mlp(y, deterministic=True))[:, 0]


class Encoder(_Layer):
  """Position embeddings, the layers, and a last LayerNorm (equations 1 to 4).

  Where attention is cuDNN's, tokens are padded to a multiple of 8 before the first
  layer, and the padding is cut off after the last, if no mask, dropout or positions in
  later layers need to know; nothing else sees it.

  A subclass can replace BLOCK, the class of a layer: a Module with the fields and
  arguments of Block. Axial attention has its own.
  """

  BLOCK: ClassVar[type[nn.Module]] = Block

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B N D'],
    *,
    train: bool,
    mask: Bool[Array, '...'] | None = None,
    only_first: bool = False,
    grid: tuple[int, int] | None = None,
    parts: tuple[str, ...] = PARTS,
    layers: range | None = None,
    last_norm: bool = True,
    side_by_side: tuple[int, ...] = (),
  ) -> Float[Array, '_ _ _']:
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Args:
      x: tokens, [B, N, D].
      train: whether dropout is on.
      mask: bool, broadcastable to [B, K, N, N], True where a query may attend to a
        key, in every layer; None: everywhere.
      only_first: whether the model reads only the first token, the class token. The
        last layer then computes only that token, and the result is [B, 1, D].
      grid: number of patches (down, across), (h, w), the last h*w tokens; for position
        embeddings on a grid, `position_grid` and attention patterns.
      parts: what to apply, a selection from PARTS, so that a model can do something in
        between, such as drop tokens.
      layers: numbers of the layers to apply, from 0, possibly none; None: all. A model
        can so add tokens, or change the mask, between two layers.
      last_norm: whether a norm follows the layers, rather than the model's pooling.
      side_by_side: numbers of layers, from 1, whose tokens are returned side by side, each
        after that norm: [B, N, n D] of n layers. (): of the last layer.

    Raises ValueError if the tokens do not suit the position embeddings, or only a part
    is applied and later layers add position embeddings too.
    """
    config = self.config
    kind = position_kinds.kind_of(vars(config))
    if tuple(parts) != PARTS and kind != 'none' and config.position_layers != 'stem':
      raise ValueError(
        f"position_layers='{config.position_layers}' adds the positions of all "
        'tokens in later layers too, so that no token can be dropped, nor registers '
        "inserted, after the first ones are added: use position_layers='stem' "
        '(config.model.transformer.position_layers)'
      )
    by_layer = [LayerInputs()] * config.num_layers
    if 'positions' in parts:
      x, by_layer = self._with_positions(x, kind, train, grid)
    if 'layers' not in parts:
      return x
    numbers = range(config.num_layers) if layers is None else layers
    if config.first_norm and 0 in numbers:
      x = self._norm('first_norm')(x)
    context = self._context(x, kind, train, mask, grid)
    if not any(layer.has_positions for layer in by_layer):
      x, context = self._pad(x, context)
    if config.stochastic_depth:
      rates = np.linspace(0, config.stochastic_depth, config.num_layers).tolist()
      for i, rate in enumerate(rates):
        by_layer[i] = by_layer[i]._replace(drop_rate=rate)
    results = {}
    start = numbers.start
    for stop in sorted({*side_by_side, numbers.stop}):
      is_single = only_first and not side_by_side
      x = self._layers(x, context, by_layer, range(start, stop), is_single)
      results[stop] = x
      start = stop
    outputs = [results[number] for number in side_by_side or (numbers.stop,)]
    if context.length is not None:
      outputs = [x[:, : context.length] for x in outputs]
    if last_norm:
      norm = self._norm('encoder_norm')
      outputs = [norm(x) for x in outputs]
    x = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)
    if numbers.stop == config.num_layers:
      self.sow('intermediates', 'tokens', x)
      patches.sow_mean(self, f'layer_{config.num_layers}', x)
    return x

  @nn.nowrap
  def _with_positions(
    self,
    x: Float[Array, 'B N D'],
    kind: str,
    train: bool,
    grid: tuple[int, int] | None,
  ) -> tuple[Float[Array, 'B N D'], list[LayerInputs]]:
    """Adds the positions before the layers; also returns what each layer adds."""
    tables = position_kinds.table_kind(kind)
    if tables == 'none':
      return x, [LayerInputs()] * self.config.num_layers
    if tables in position_kinds.RELATIVE:
      relative = self._relative(tables, x, grid)
      return x, [LayerInputs(relative=table) for table in relative]
    x, later = self._add_positions(x, tables, train, grid)
    return x, [LayerInputs(added=table) for table in later]

  @nn.nowrap
  def _context(
    self,
    x: Float[Array, 'B N D'],
    kind: str,
    train: bool,
    mask: Bool[Array, '...'] | None,
    grid: tuple[int, int] | None,
  ) -> Context:
    config = self.config
    tokens = x.shape[1]
    if config.attention_pattern != 'global':
      field = f"attention_pattern='{config.attention_pattern}'"
      grid = positions.checked_grid(field, grid, tokens)
      if config.attention_pattern == 'local':
        local = grid_attention.local_mask(grid, config.attention_window, tokens)
        mask = local if mask is None else mask & local
    angles = None
    if kind in position_kinds.ROPES:
      angles = positions.rope_angles(
        grid,
        tokens,
        x.shape[2] // config.num_heads,
        kind,
        config.rope_temperature,
        config.rope_grid,
      )
    return Context(train=train, mask=mask, angles=angles, grid=grid)

  @nn.nowrap
  def _layers(
    self,
    x: Float[Array, 'B N D'],
    context: Context,
    by_layer: list[LayerInputs],
    numbers: range,
    only_first: bool,
  ) -> Float[Array, '_ _ D']:
    """Applies the layers of these numbers, all but the last in a loop if faster.

    Initialising parameters and sowing intermediates need separate layers, and
    intermediates need all tokens of the last layer.
    """
    config = self.config
    if not numbers:
      return x
    if sharding.sequence_shards() > 1:
      x = sharding.constrain_tokens(x)
    sows = self.is_mutable_collection('intermediates')
    is_looped = layer_stack.is_looped(config.scan, len(numbers), context.train)
    is_looped = is_looped and not sows and not self.is_initializing()
    block: Callable[..., Any] = layer_stack.recomputed(
      AxialBlock if config.attention_pattern == 'axial' else self.BLOCK,
      config.remat,
      is_looped,
    )
    block = functools.partial(block, config, **dtypes.of(self))
    *earlier, last = numbers
    if is_looped:
      names = [_name(i) for i in earlier]
      inputs = [by_layer[i] for i in earlier]
      x = self._loop(block(parent=None), names, x, context, inputs)
    else:
      for i in earlier:
        x = _apply(block(name=_name(i), layer=i), x, context, by_layer[i])
    is_single = only_first and not sows
    last_block = block(name=_name(last), layer=last, only_first=is_single)
    return _apply(last_block, x, context, by_layer[last])

  @nn.nowrap
  def _loop(
    self,
    block: Block,
    names: list[str],
    x: Float[Array, 'B N D'],
    context: Context,
    layers: list[LayerInputs],
  ) -> Float[Array, 'B N D']:
    """Applies the layers with these names in a loop."""
    config = self.config
    params = [self.variables['params'][name] for name in names]
    has_dropout = (
      config.dropout_rate or config.attention_dropout_rate or config.stochastic_depth
    )
    keys: Any = [None] * len(names)
    if context.train and has_dropout:
      keys = jax.random.split(self.make_rng('dropout'), len(names))

    def apply_layer(
      x: Float[Array, 'B N D'],
      params: Any,
      key: Array | None,
      layer_inputs: LayerInputs,
    ) -> Float[Array, 'B N D']:
      rngs = None if key is None else {'dropout': key}
      function = functools.partial(block.apply, {'params': params}, rngs=rngs)
      return _apply(function, x, context, layer_inputs)

    return layer_stack.over_layers(apply_layer, x, params, keys, layers)

  @nn.nowrap
  def _pad(
    self, x: Float[Array, 'B N D'], context: Context
  ) -> tuple[Float[Array, 'B _ D'], Context]:
    """Pads tokens at their end for cuDNN, if nothing needs to know.

    Dropout of the tokens would draw other noise with padding, so that tokens are
    then not padded.
    """
    config, train = self.config, context.train
    if context.mask is not None or config.attention_pattern != 'global':
      return x, context
    sows = self.is_initializing() or self.is_mutable_collection('intermediates')
    if sows or (train and config.dropout_rate):
      return x, context
    is_plain = not (train and config.attention_dropout_rate)
    head_dim = x.shape[2] // config.num_heads
    tokens = x.shape[1]
    name = attention.choose(config.attention, self.dtype, head_dim, tokens, is_plain)
    padding = -x.shape[1] % _MULTIPLE
    if name != 'cudnn' or not padding:
      return x, context
    angles = context.angles
    if angles is not None:
      angles = np.pad(angles, ((0, padding), (0, 0)))
    context = dataclasses.replace(context, length=x.shape[1], angles=angles)
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0))), context

  @nn.nowrap
  def _relative(
    self, kind: str, x: Float[Array, 'B N D'], grid: tuple[int, int] | None
  ) -> list[Float[Array, '...']]:
    """Returns the relative position embeddings or biases of each layer."""
    num_heads = self.config.num_heads

    def make(name: str) -> Float[Array, '...']:
      if kind == 'relative_bias':
        bias = positions.RelativeBias(param_dtype=self.param_dtype, name=name)
        return bias(grid, x.shape[1], num_heads)
      embedding = positions.RelativeEmbedding(param_dtype=self.param_dtype, name=name)
      return embedding(x.shape[1], x.shape[2] // num_heads)

    return self._by_layer(make)

  @nn.nowrap
  def _add_positions(
    self, x: Float[Array, 'B N D'], kind: str, train: bool, grid: tuple[int, int] | None
  ) -> tuple[Float[Array, 'B N D'], list[Float[Array, '1 N D'] | None]]:
    """Adds embeddings before the first layer.

    Returns the tokens, and the embeddings to add after each layer, or None.
    """

    def make(name: str) -> Float[Array, '1 N D']:
      module = positions.AddPositionEmbs(
        kind=kind,
        grid=grid,
        table_grid=self.config.position_grid,
        param_dtype=self.param_dtype,
        name=name,
      )
      return module.table(x).astype(self.dtype)

    first, *later = self._by_layer(make)
    x = x.astype(self.dtype) + first
    x = nn.Dropout(self.config.dropout_rate)(x, deterministic=not train)
    return x, [*later, None]

  @nn.nowrap
  def _by_layer(self, make: Callable[[str], Array]) -> list[Array | None]:
    return positions.by_layer(make, self.config.position_layers, self.config.num_layers)


def _name(layer: int) -> str:
  return f'encoderblock_{layer}'


def _apply(
  layer: Callable[..., Array],
  x: Float[Array, 'B N D'],
  context: Context,
  layer_inputs: LayerInputs,
) -> Float[Array, '_ _ D']:  # An interceptor of Flax may change the batch.
  """Applies a layer, and adds the position embeddings that follow it."""
  x = layer(x, context, layer_inputs)
  return x if layer_inputs.added is None else x + layer_inputs.added
