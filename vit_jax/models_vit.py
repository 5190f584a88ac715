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
model `features` [B, D], the pre-logits. Nothing is stored when nobody asks.
"""

from collections.abc import Mapping
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import attention
from vit_jax import models_resnet
from vit_jax import sharding

MultiHeadDotProductAttention = attention.MultiHeadDotProductAttention

CLASSIFIERS = ('token', 'gap', 'unpooled', 'token_unpooled')

# The two ways to compute the GELU: Google's models were trained with the tanh
# approximation, timm and Hugging Face compute the function itself unless told.
GELUS = {
  'tanh': functools.partial(jax.nn.gelu, approximate=True),
  'erf': functools.partial(jax.nn.gelu, approximate=False),
}

# What a block under `remat` keeps for the backward pass; all else is computed
# again. None keeps nothing but the block's input.
REMAT_POLICIES = {
  'full': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


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


class AddPositionEmbs(nn.Module):
  """Adds one learned vector to each position (section 3.1; T8, "1-D learned").

  Attributes:
    posemb_init: initialiser of the table.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  posemb_init: Any = nn.initializers.normal(stddev=0.02)
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

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
    out_dim: width of the output, by default that of the input.
    dropout_rate: dropout after each dense layer.
    gelu: 'tanh' approximation, or 'erf', the exact function.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  mlp_dim: int
  out_dim: int | None = None
  dropout_rate: float = 0.1
  gelu: str = 'tanh'
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs, *, deterministic):
    """Maps tokens [B, N, D] to [B, N, out_dim].

    Raises:
      ValueError: if `gelu` is none of its values.
    """
    if self.gelu not in GELUS:
      raise ValueError(
        f"gelu='{self.gelu}' is unknown: use one of {sorted(GELUS)} "
        '(config.model.transformer.gelu)'
      )
    dense = functools.partial(
      nn.Dense,
      kernel_init=nn.initializers.xavier_uniform(),
      bias_init=nn.initializers.normal(stddev=1e-6),
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    x = GELUS[self.gelu](dense(self.mlp_dim)(inputs))  # [B, N, M]
    x = nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)
    x = dense(self.out_dim or inputs.shape[-1])(x)  # [B, N, D]
    return nn.Dropout(self.dropout_rate)(x, deterministic=deterministic)


class Encoder1DBlock(nn.Module):
  """One layer of the encoder: attention, then MLP, pre-norm (equations 2, 3).

  Attributes:
    mlp_dim: width M of the MLP.
    num_heads: number of heads K.
    dropout_rate: dropout after dense layers.
    attention_dropout_rate: dropout of the attention weights.
    attention: how attention is computed, see vit_jax.attention.
    only_first: whether only the first token is computed, [B, 1, D].
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  mlp_dim: int
  num_heads: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  attention: str = 'default'
  only_first: bool = False
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs, deterministic):
    """Maps tokens [B, N, D] to [B, N, D]."""
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = nn.LayerNorm(self.norm_eps, **types)(inputs)
    x = MultiHeadDotProductAttention(
      num_heads=self.num_heads,
      dropout_rate=self.attention_dropout_rate,
      attention=self.attention,
      only_first=self.only_first,
      **types,
    )(x, deterministic=deterministic)
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
    add_position_embedding: whether positions are told apart at all.
    only_first: whether only the first token is read, the class token. The last
      layer then computes no other, and the result is [B, 1, D].
    attention: how attention is computed, see vit_jax.attention.
    gelu: see MlpBlock.
    norm_eps: added to the variance in LayerNorm.
    remat: '' keeps all activations; 'full' keeps each layer's input alone and
      computes the rest again in the backward pass; 'dots' keeps the results of
      the dense layers too.
    scan: whether to loop over the layers, but for the last, rather than to write
      them out: compiles faster, and computes the same but for dropout's noise.
      Parameters keep their names.
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
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, *, train):
    """Maps tokens [B, N, D] to tokens [B, N, D].

    Raises:
      ValueError: if `remat` is none of its values.
    """
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    if self.add_position_embedding:
      x = AddPositionEmbs(name='posembed_input', **types)(x)
      x = nn.Dropout(self.dropout_rate)(x, deterministic=not train)
    # Parameters are made, and intermediates seen, layer by layer and in full.
    seen = self.is_mutable_collection('intermediates')
    last = self.num_layers - 1
    loop = self.scan and last > 0 and not seen and not self.is_initializing()
    if self.remat and self.remat not in REMAT_POLICIES:
      raise ValueError(
        f"remat='{self.remat}' is unknown: use '' or one of "
        f'{sorted(REMAT_POLICIES)} (config.model.transformer.remat)'
      )
    block = Encoder1DBlock
    if self.remat or loop:
      # A loop stores what the backward pass needs as it is: better the results of
      # matrix products alone, from which the rest follows without another one.
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
      **types,
    )
    if loop:
      x = self._scan_layers(block(**fields, parent=None), x, last, train)
    else:
      for i in range(last):
        x = block(name=f'encoderblock_{i}', **fields)(x, not train)
    if self.num_layers:
      only_first = self.only_first and not seen
      name = f'encoderblock_{last}'
      x = block(name=name, only_first=only_first, **fields)(x, not train)
    x = nn.LayerNorm(self.norm_eps, name='encoder_norm', **types)(x)
    self.sow('intermediates', 'tokens', x)
    return x

  def _scan_layers(self, block, x, num_layers, train):
    """Applies the first layers in a loop, which is compiled once for them all."""
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
        {'params': layer_params}, x, not train, rngs=rngs
      ), None

    return jax.lax.scan(apply, x, (stacked, keys))[0]


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
