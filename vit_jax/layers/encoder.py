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

from vit_jax.layers import attention
from vit_jax.scale import sharding

# Google's models were trained with the tanh approximation; timm and Hugging
# Face compute the exact function by default.
GELUS = {
  'tanh': functools.partial(jax.nn.gelu, approximate=True),
  'erf': functools.partial(jax.nn.gelu, approximate=False),
}

# What `remat` stores of a block for the backward pass, beside the block's
# input; everything else is recomputed.
REMAT_POLICIES = {
  'full': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class AddPositionEmbs(nn.Module):
  """Adds one learned vector to each position (section 3.1; T8, "1-D learned").

  Attributes:
    posemb_init: initialiser of the table.
    param_dtype: type of the parameters.
    dtype: type of the computation.
  """

  posemb_init: Any = nn.initializers.normal(stddev=0.02)
  param_dtype: Any = jnp.float32
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs):
    """Adds the embeddings to tokens [B, N, D]."""
    if inputs.ndim != 3:
      raise ValueError(
        f'inputs must be tokens [batch, tokens, width], got {inputs.shape}'
      )
    table = self.param(
      'pos_embedding',
      self.posemb_init,
      (1, *inputs.shape[1:]),
      self.param_dtype,
    )
    inputs, table = nn.dtypes.promote_dtype(inputs, table, dtype=self.dtype)
    return inputs + table  # [B, N, D]


class MlpBlock(nn.Module):
  """Two dense layers with a GELU between.

  Attributes:
    mlp_dim: width M of the hidden layer.
    dtype: type of the computation.
    param_dtype: type of the parameters.
    out_dim: width of the output, by default that of the input.
    dropout_rate: dropout after each dense layer.
    kernel_init: initialiser of the kernels.
    bias_init: initialiser of the biases.
    gelu: 'tanh' for the approximation, 'erf' for the exact function.
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
    """Maps tokens [B, N, D] to [B, N, out_dim].

    Raises:
      ValueError: if `gelu` has an unknown value.
    """
    if self.gelu not in GELUS:
      raise ValueError(
        f"gelu='{self.gelu}' is unknown: use one of {sorted(GELUS)} "
        '(config.model.transformer.gelu)'
      )
    dense = functools.partial(
      nn.Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    x = GELUS[self.gelu](dense(self.mlp_dim)(inputs))  # [B, N, M]
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
    x = dense(out_dim)(x)  # [B, N, out_dim]
    return nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)


class Encoder1DBlock(nn.Module):
  """One layer of the encoder: attention, then MLP, pre-norm (equations 2, 3).

  Attributes:
    mlp_dim: width M of the MLP.
    num_heads: number of heads K.
    dtype: type of the computation.
    dropout_rate: dropout after dense layers.
    attention_dropout_rate: dropout of the attention weights.
    attention: name of the implementation, see vit_jax.layers.attention.
    only_first: whether to compute the first token alone, [B, 1, D].
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
    causal: whether token i attends to tokens 0 to i only.
    param_dtype: type of the parameters.
  """

  mlp_dim: int
  num_heads: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  attention: str = 'default'
  only_first: bool = False
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  causal: bool = False
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs, deterministic, mask=None):
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Args:
      inputs: the tokens.
      deterministic: whether dropout is off.
      mask: bool, broadcastable to [B, K, N, N], True where a query may attend
        to a key; None: everywhere.
    """
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = nn.LayerNorm(self.norm_eps, **types)(inputs)
    x = attention.MultiHeadDotProductAttention(
      num_heads=self.num_heads,
      dropout_rate=self.attention_dropout_rate,
      attention=self.attention,
      only_first=self.only_first,
      causal=self.causal,
      **types,
    )(x, mask=mask, deterministic=deterministic)
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    x = x + (attention.first_token(inputs) if self.only_first else inputs)
    y = nn.LayerNorm(self.norm_eps, **types)(x)
    y = MlpBlock(
      mlp_dim=self.mlp_dim,
      dropout_rate=self.dropout_rate,
      gelu=self.gelu,
      **types,
    )(y, deterministic=deterministic)
    return sharding.constrain_batch(x + y)


class Encoder(nn.Module):
  """Position embeddings, the layers, and a last LayerNorm (equations 1 to 4).

  Attributes:
    num_layers: number of layers.
    mlp_dim: width M of the MLP.
    num_heads: number of heads K.
    dropout_rate: dropout after dense layers and after the position embeddings.
    attention_dropout_rate: dropout of the attention weights.
    add_position_embedding: whether to add position embeddings.
    only_first: whether the model reads the first token alone, the class token.
      The last layer then computes that token only, and the result is [B, 1, D].
    attention: name of the implementation, see vit_jax.layers.attention.
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
    remat: what the backward pass recomputes. '': nothing; 'full': everything
      but each layer's input; 'dots': everything but the inputs and the results
      of the dense layers.
    scan: whether to apply all layers but the last in a loop, which compiles
      faster. Results are the same except for dropout's noise, and parameters
      keep their names.
    causal: whether token i attends to tokens 0 to i only, in every layer.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  num_layers: int
  mlp_dim: int
  num_heads: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  add_position_embedding: bool = True
  only_first: bool = False
  attention: str = 'default'
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  remat: str = ''
  scan: bool = False
  causal: bool = False
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, *, train, mask=None, only_first=None):
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Args:
      x: the tokens.
      train: whether dropout is on.
      mask: bool, broadcastable to [B, K, N, N], True where a query may attend
        to a key, in every layer; None: everywhere.
      only_first: overrides the field `only_first` unless it is None.

    Raises:
      ValueError: if `remat` has an unknown value.
    """
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    if self.add_position_embedding:
      x = AddPositionEmbs(name='posembed_input', **types)(x)
      x = nn.Dropout(self.dropout_rate)(x, deterministic=not train)
    # Initialising parameters and sowing intermediates need separate layers, and
    # intermediates need all tokens of the last layer.
    sows = self.is_mutable_collection('intermediates')
    last = self.num_layers - 1
    loop = self.scan and last > 0 and not sows and not self.is_initializing()
    if self.remat and self.remat not in REMAT_POLICIES:
      raise ValueError(
        f"remat='{self.remat}' is unknown: use '' or one of "
        f'{sorted(REMAT_POLICIES)} (config.model.transformer.remat)'
      )
    block = Encoder1DBlock
    if self.remat or loop:
      # By default a scan stores every activation of every layer. Results of
      # matrix products suffice: the rest is recomputed cheaply from them.
      policy = REMAT_POLICIES.get(
        self.remat, jax.checkpoint_policies.dots_saveable
      )
      block = nn.remat(
        block, static_argnums=(2,), policy=policy, prevent_cse=not loop
      )
    fields = dict(
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
      attention=self.attention,
      gelu=self.gelu,
      norm_eps=self.norm_eps,
      causal=self.causal,
      **types,
    )
    if loop:
      x = self._scan_layers(block(**fields, parent=None), x, last, train, mask)
    else:
      for i in range(last):
        x = block(name=f'encoderblock_{i}', **fields)(x, not train, mask)
    if self.num_layers:
      only_first = self.only_first if only_first is None else only_first
      x = block(
        name=f'encoderblock_{last}',
        only_first=only_first and not sows,
        **fields,
      )(x, not train, mask)
    x = nn.LayerNorm(self.norm_eps, name='encoder_norm', **types)(x)
    self.sow('intermediates', 'tokens', x)
    return x

  def _scan_layers(self, block, x, num_layers, train, mask):
    """Applies the first `num_layers` layers in a loop, compiled once."""
    params = self.variables['params']
    stacked = jax.tree.map(
      lambda *leaves: jnp.stack(leaves),
      *(params[f'encoderblock_{i}'] for i in range(num_layers)),
    )
    dropout = train and (self.dropout_rate or self.attention_dropout_rate)
    keys = (
      jax.random.split(self.make_rng('dropout'), num_layers)
      if dropout
      else None
    )

    def apply(x, layer):
      layer_params, key = layer
      rngs = None if key is None else {'dropout': key}
      return block.apply(
        {'params': layer_params}, x, not train, mask, rngs=rngs
      ), None

    return jax.lax.scan(apply, x, (stacked, keys))[0]
