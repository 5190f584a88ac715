"""The Vision Transformer as Flax Linen modules (arXiv 2010.11929, section 3.1).

A linear map turns each patch of an image into a token, and a pre-norm
Transformer encoder processes the tokens. Modules and parameters have their
published names, so that published weights fit without renaming.

Shapes in the comments:
  B images    H, W image height and width    C channels (or classes)
  h, w patches down and across               N tokens (h*w and the class token)
  D width of a token    M width of the MLP   K heads    E = D/K width of a head

`model.apply(..., mutable='intermediates')` also returns intermediate values:
every attention layer sows `attention_weights` [B, K, N, N], the encoder
`tokens` [B, N, D], and the model `features` [B, D], the pre-logits. For probes,
each layer sows `layer_0`, `layer_1`, ... [B, D], the mean over the tokens of
its first norm's result (the last one: of the encoder's norm). Otherwise
nothing is stored, and if only the class token is read, the last layer computes
no other token.

The model consists of three methods, which can be called separately:

  tokens = model.apply(variables, images, method='embed')  # [B, h*w, D]
  tokens = model.apply(variables, tokens, train=False, method='encode')
  logits = model.apply(variables, tokens, train=False, method='classify')

A subclass can insert other tokens between the calls. To drop tokens, as
masked autoencoders do (arXiv 2111.06377), it adds the positions first:

  tokens = self.add_positions(self.embed(images), train=train)  # [B, N, D]
  tokens = self.encode(tokens[:, kept], train=train, positioned=True)

It can add parameters to the published ones in a `setup` that calls
`super().setup()` first.
"""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vit_jax import models_resnet
from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention,
  dtypes,
  encoder as encoder_lib,
  norms,
  patches as patches_lib,
  position_kinds,
  positions,
)
from vit_jax.layers.dtypes import Array

# Names of the original.
PatchEmbedding = patches_lib.PatchEmbedding
AddPositionEmbs = positions.AddPositionEmbs
MlpBlock = encoder_lib.MlpBlock
MultiHeadDotProductAttention = attention.MultiHeadDotProductAttention
check_images = patches_lib.check_images
make_head = patches_lib.make_head


class Encoder1DBlock(nn.Module):
  """One layer of the encoder; see vit_jax.layers.encoder.Block."""

  mlp_dim: int
  num_heads: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1

  @nn.compact
  def __call__(
    self, inputs: Float[Array, 'B N D'], *, deterministic: bool
  ) -> Float[Array, 'B N D']:
    config = model_configs.Transformer(
      num_layers=1,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
    )
    block = encoder_lib.Block(config, self.dtype)
    nn.share_scope(self, block)
    return block(inputs, encoder_lib.Context(train=not deterministic))


class Encoder(nn.Module):
  """Position embeddings, layers and a norm; see vit_jax.layers.encoder.Encoder."""

  num_layers: int
  mlp_dim: int
  num_heads: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  add_position_embedding: bool = True

  @nn.compact
  def __call__(self, x: Float[Array, 'B N D'], *, train: bool) -> Float[Array, 'B N D']:
    config = model_configs.Transformer(
      num_layers=self.num_layers,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
      add_position_embedding=self.add_position_embedding,
    )
    encode = encoder_lib.Encoder(config)
    nn.share_scope(self, encode)
    return encode(x, train=train)


# Fields that an encoder class of a user may lack, and their defaults.
_OPTIONAL = {
  **dict(schema.defaults(model_configs.Transformer)),
  'dtype': jnp.float32,
  'param_dtype': jnp.float32,
}


def encoder_fields(encoder: Callable, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arguments of an encoder: its types, and the fields of `transformer`.

  An encoder with the argument `config`, as vit_jax.layers.encoder.Encoder has, gets a
  Transformer, and the other fields by name. An encoder class of a user, or a function
  that makes an encoder, may lack fields. Such a field is left out if it has its default
  value; otherwise ValueError lists the fields that the encoder has.
  """
  parameters = inspect.signature(encoder).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return dict(fields)
  arguments = dict(fields)
  if 'config' in parameters:
    config = _transformer_of(arguments)
    arguments = {k: v for k, v in arguments.items() if not hasattr(config, k)}
    arguments['config'] = config
  unknown = {}
  for key in sorted(arguments.keys() - parameters.keys()):
    value = arguments.pop(key)
    if key not in _OPTIONAL or value != _OPTIONAL[key]:
      unknown[key] = value
  if unknown:
    name = getattr(encoder, '__name__', encoder)
    accepted = sorted(set(parameters) - {'parent', 'name'})
    raise ValueError(
      f'config.model has unknown fields {sorted(unknown)}: {name} takes {accepted}, but '
      f'the config gives {", ".join(f"{k}={v}" for k, v in unknown.items())}'
      '; add these fields to it, or set the defaults (config.model.transformer)'
    )
  return arguments


def _transformer_of(fields: Mapping[str, Any]) -> model_configs.Transformer:
  """Returns the fields of this package's encoder from a mapping that may have others."""
  names = schema.fields(model_configs.Transformer)
  return model_configs.Transformer(**{k: v for k, v in fields.items() if k in names})


class IdentityLayer(nn.Module):
  """Returns its input; names an activation, so that it can be captured."""

  @nn.compact
  def __call__(self, x: Float[Array, '*axes']) -> Float[Array, '*axes']:
    return x


class VisionTransformer(patches_lib.ImageModel):
  """The Vision Transformer, optionally behind a ResNet (hybrid).

  Softmax, the statistics of norms and the logits are always float32.
  """

  num_classes: int | None  # Width of the head; 0 or None: returns pre-logits.
  # Has a field `size`, (height, width) of a patch: in pixels, or for a hybrid in cells
  # of the ResNet's feature map.
  patches: Any
  # Fields of `encoder`, by default those of vit_jax.configs.models.Transformer; None: no
  # encoder.
  transformer: Any
  hidden_size: int  # D.
  # Fields of vit_jax.models_resnet.make_resnet, `num_layers` (units per stage, possibly
  # none), `width_factor` and optionally `eps`; None: no ResNet.
  resnet: Any = None
  # Width of a dense layer with tanh before the head (the paper's pre-training head,
  # section 3.1), or None.
  representation_size: int | None = None
  # 'token' reads the class token, 'gap' and 'token_gap' the mean over patches, without
  # and with a class token next to them, 'token_with_gap' class token and mean side by
  # side (as DINOv2's linear classifiers), 'map' and 'token_map' likewise the result of
  # attention pooling (see vit_jax.layers.encoder.MAPHead); 'unpooled' and
  # 'token_unpooled' apply the head to every token, without and with a class token.
  classifier: str = 'token'
  head_bias_init: float = 0.0  # -10 for the 21k models.
  encoder: Callable[..., nn.Module] = encoder_lib.Encoder
  model_name: str | None = None  # Name in the table of configs; has no effect.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  head_init: str = 'zeros'  # A key of vit_jax.layers.patches.HEAD_INITS.
  # Number of learned tokens without positions that the encoder reads in addition, after
  # the class token ("Vision Transformers Need Registers", arXiv 2309.16588).
  registers: int = 0
  # Whether a norm follows the pooling instead of the layers, as in MAE's fine-tuning
  # (arXiv 2111.06377, section A.1).
  pool_norm: bool = False
  # Whether a distillation token follows the class token and has a head of its own. The
  # logits are the mean of both heads', in training too (arXiv 2012.12877, section 4).
  distilled: bool = False

  def setup(self) -> None:
    """Creates the submodules, with published names.

    Raises ValueError if the classifier is unknown or does not suit `distilled`, or if
    causal attention hides the other tokens from the class token that it reads, or from
    registers.
    """
    schema.check(
      'classifier', self.classifier, model_configs.Classifier, 'config.model.'
    )
    if self.distilled and self.classifier != 'token':
      raise ValueError(
        f"classifier='{self.classifier}' reads no distillation token, which "
        "distilled=True adds: use 'token' (config.model.classifier)"
      )
    types = dtypes.of(self)
    if self.resnet is not None:
      self.resnet_layers = models_resnet.make_resnet(**dict(self.resnet), **types)
    self.embedding = PatchEmbedding(
      features=self.hidden_size,
      patch_size=tuple(self.patches['size']),
      **types,
    )
    fields = dict(self.transformer or {})
    if self.transformer is not None:
      self._check_attention(fields)
      width = self.hidden_size
      dtype = types['param_dtype']
      if self.has_class_token:
        self.cls = self.param('cls', nn.initializers.zeros, (1, 1, width), dtype)
      if self.distilled:
        init = nn.initializers.normal(stddev=0.02)
        self.dist = self.param('dist', init, (1, 1, width), dtype)
      if self.registers:
        shape = (1, self.registers, width)
        init = nn.initializers.normal(1e-6)
        self.register_tokens = self.param('register_tokens', init, shape, dtype)
      self.Transformer = self.encoder(
        **encoder_fields(self.encoder, {**types, **fields})
      )
    if self.classifier in ('map', 'token_map'):
      self.MAPHead_0 = encoder_lib.MAPHead(_transformer_of(fields), **types)
    if self.pool_norm:
      kind, eps = fields.get('norm', 'layer'), fields.get('norm_eps', 1e-6)
      self._pool_norm = norms.make(kind, eps, 'pool_norm', **types)
    size = self.representation_size
    self.pre_logits = IdentityLayer() if size is None else nn.Dense(size, **types)
    if self.num_classes:
      options = dict(bias=self.head_bias_init, init=self.head_init, **types)
      self.head = make_head(self.num_classes, **options)
      if self.distilled:
        self.head_dist = make_head(self.num_classes, **options, name='head_dist')

  @nn.nowrap
  def _check_attention(self, fields: Mapping[str, Any]) -> None:
    """Raises ValueError if attention keeps tokens from those that they need."""
    if fields.get('causal') and self.classifier == 'token':
      raise ValueError(
        "classifier='token' reads the class token, which comes first and with "
        "causal=True attends to itself only: use 'gap' or 'unpooled' "
        '(config.model.classifier)'
      )
    if fields.get('causal') and self.registers:
      raise ValueError(
        f'registers={self.registers} come before the patches and with causal=True '
        'attend to none of them: use 0 (config.model.registers)'
      )
    is_axial = fields.get('attention_pattern') == 'axial'
    if is_axial and (self.has_class_token or self.registers):
      raise ValueError(
        f"classifier='{self.classifier}' and registers={self.registers} add tokens "
        "without a row or column, which attention_pattern='axial' needs: use 'gap', "
        "'map' or 'unpooled', and 0 (config.model)"
      )

  @property
  def has_class_token(self) -> bool:
    """Whether the class token comes before the other tokens."""
    return self.classifier.startswith('token')

  @property
  def needs_grid(self) -> bool:
    """Whether `encode` needs the grid of tokens, `embed(..., flat=False)`."""
    fields = self.transformer or {}
    kind = fields.get('position_embedding', 'learned_1d')
    on_grid = position_kinds.needs_grid(kind, fields.get('position_grid'))
    return on_grid or fields.get('attention_pattern', 'global') != 'global'

  def __call__(
    self, inputs: Float[Array, 'B H W C'], *, train: bool
  ) -> Float[Array, '_ ... classes']:
    """Computes logits: embeds images, encodes the tokens, classifies them.

    Maps images, float [B, H, W, C] in [-1, 1], to float32 [B, num_classes], or [B, N,
    num_classes] for an unpooled classifier; without a head to the pre-logits, of type
    `dtype`. `train` turns dropout on, which needs the rng 'dropout'.

    Raises ValueError if the classifier is unknown, the inputs have another rank, or
    the patch size does not divide the image size.
    """
    flat = self.transformer is not None and not self.needs_grid
    x = self.embed(inputs, flat=flat)
    only_first = self.classifier == 'token' and not self.distilled
    x = self.encode(x, train=train, only_first=only_first)
    return self.classify(x, train=train)

  def embed(
    self, images: Float[Array, 'B H W C'], *, flat: bool = True
  ) -> Float[Array, 'B *N D']:
    """Maps each patch to a token, without its position embedding.

    Maps images, float [B, H, W, C] in [-1, 1], to tokens of type `dtype`: [B, h*w, D],
    row by row, if `flat`, else a grid [B, h, w, D].
    """
    images = jnp.asarray(images)  # Accepts TensorFlow's tensors.
    check_images(images)
    x = images.astype(dtypes.of(self)['dtype'])
    if self.resnet is not None:
      see = lambda i, x: patches_lib.sow_mean(self, f'stage_{i}', x)
      x = models_resnet.apply_resnet(x, self.resnet_layers, see)
    x = sharding.constrain_batch(self.embedding(x))  # [B, h, w, D]
    return x.reshape(x.shape[0], -1, x.shape[-1]) if flat else x

  def add_positions(
    self, tokens: Float[Array, 'B *N D'], *, train: bool
  ) -> Float[Array, 'B ... D']:
    """Puts the class token first, adds position embeddings, inserts the registers.

    Takes the tokens that `encode` takes. Returns class token, registers and patches,
    [B, N, D], the input of `encode(..., positioned=True)`, also after some patches were
    dropped. Without a transformer it returns its input.

    Raises ValueError if the tokens have another rank, later layers add positions too,
    or an encoder class of a user adds positions itself.
    """
    if self.transformer is None:
      return tokens
    parameters = inspect.signature(type(self.Transformer).__call__).parameters
    if 'parts' not in parameters:
      raise ValueError(
        f'{type(self.Transformer).__name__} adds position embeddings and applies '
        'its layers in one call: to do one of them give its __call__ an argument '
        "`parts`, as vit_jax.layers.encoder.Encoder has (config.model's encoder)"
      )
    x = self._with_class_token(tokens)
    x = self.Transformer(x, train=train, parts=('positions',), **self._grid(tokens))
    if not self.registers:
      return x
    registers = self.register_tokens.astype(x.dtype)
    registers = jnp.broadcast_to(registers, (x.shape[0], *registers.shape[1:]))
    first = int(self.has_class_token) + self.distilled
    return jnp.concatenate([x[:, :first], registers, x[:, first:]], axis=1)

  def encode(
    self,
    tokens: Float[Array, 'B *N D'],
    *,
    train: bool,
    mask: Bool[Array, '...'] | None = None,
    only_first: bool = False,
    positioned: bool = False,
    side_by_side: tuple[int, ...] = (),
  ) -> Float[Array, '_ ... _']:
    """Adds class token and position embeddings, and applies the encoder.

    Args:
      tokens: [B, h, w, D] or [B, h*w, D], from `embed`, possibly modified.
        Position embeddings on a grid need the former.
      train: whether dropout is on.
      mask: bool, broadcastable to [B, K, N, N], True where a query may attend
        to a key, of class token, registers and patches in this order; None: everywhere.
      only_first: whether to compute only the first token, the class token. An
        encoder class of a user computes all tokens regardless.
      positioned: whether the tokens come from `add_positions`, possibly
        fewer, [B, n, D].
      side_by_side: see vit_jax.layers.encoder.Encoder.

    Returns:
      Tokens [B, N, D] without registers, the class token first if there is one;
      [B, 1, D] with `only_first`. Without a transformer, the input.

    Raises ValueError if the tokens have another rank, or see `add_positions`.
    """
    if self.transformer is None:
      return tokens
    # An encoder class of a user need not accept these arguments.
    extra = {} if mask is None else {'mask': mask}
    if positioned or self.registers:
      extra['parts'] = ('layers',)
      if not positioned:
        extra.update(self._grid(tokens))
        tokens = self.add_positions(tokens, train=train)
      x = tokens
    else:
      x = self._with_class_token(tokens)
      extra.update(self._grid(tokens))
    if self.pool_norm:
      extra['last_norm'] = False
    if side_by_side:
      extra['side_by_side'] = side_by_side
    if only_first and self.encoder is encoder_lib.Encoder:
      extra['only_first'] = True
    x = self.Transformer(x, train=train, **extra)
    if not self.registers:
      return x
    first = int(self.has_class_token) + self.distilled
    patches = x[:, first + self.registers :]
    return jnp.concatenate([x[:, :first], patches], axis=1)

  def _with_class_token(self, tokens: Float[Array, '...']) -> Float[Array, 'B N D']:
    """Returns tokens as a sequence, after class and distillation token."""
    if tokens.ndim not in (3, 4):
      raise ValueError(
        'tokens must be [batch, tokens, width] or [batch, height, width of the '
        f'grid, width], got {tokens.shape}'
      )
    x = tokens.astype(dtypes.of(self)['dtype'])
    x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, h*w, D]
    if self.has_class_token:
      params = [self.cls, self.dist] if self.distilled else [self.cls]
      shape = (x.shape[0], 1, x.shape[-1])
      first = [jnp.broadcast_to(token, shape).astype(x.dtype) for token in params]
      x = jnp.concatenate([*first, x], axis=1)  # [B, N, D]
    return x

  def _grid(self, tokens: Float[Array, 'B ... D']) -> dict[str, tuple[int, int]]:
    """Returns the encoder's argument `grid`, if it needs one and the tokens have it."""
    on_grid = self.needs_grid and tokens.ndim == 4
    return {'grid': tokens.shape[1:3]} if on_grid else {}

  def classify(
    self, encoded: Float[Array, 'B ... D'], *, train: bool
  ) -> Float[Array, 'B *N classes']:
    """Pools tokens as `classifier` specifies; applies pre-logits and head.

    Returns the model's result, see `__call__`; `train` has no effect here.
    """
    del train
    x = encoded
    if self.distilled:
      x = x[:, :2]  # [B, 2, D]
    elif self.classifier == 'token':
      x = x[:, 0]  # [B, D]
    elif self.classifier == 'token_gap':
      x = x[:, 1:].mean(axis=1)  # [B, D]
    elif self.classifier == 'token_with_gap':
      x = jnp.concatenate([x[:, 0], x[:, 1:].mean(axis=1)], axis=1)  # [B, 2 D]
    elif self.classifier == 'gap':
      x = x.mean(axis=range(1, x.ndim - 1))  # [B, D]
    elif self.classifier == 'map':
      x = self.MAPHead_0(x)  # [B, D]
    elif self.classifier == 'token_map':
      x = self.MAPHead_0(x[:, 1:])  # [B, D]
    if self.pool_norm:
      x = self._pool_norm(x)
    x = self.pre_logits(x)
    if self.representation_size is not None:
      x = nn.tanh(x)
    features = x.mean(axis=1) if self.distilled else x
    self.sow('intermediates', 'features', features)
    if not self.num_classes:
      return features
    if self.distilled:
      return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
    return self.head(x)
