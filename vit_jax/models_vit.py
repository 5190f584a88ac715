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

The model is made of three methods, which can be called one by one:

  tokens = model.apply(variables, images, method='embed')  # [B, h*w, D]
  tokens = model.apply(variables, tokens, train=False, method='encode')
  logits = model.apply(variables, tokens, train=False, method='classify')

A subclass can thus put tokens of its own between them, and parameters of its own
beside the published ones, in a `setup` that calls `super().setup()` first.
"""

from collections.abc import Callable
from collections.abc import Mapping
import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax import models_resnet
from vit_jax.layers import attention
from vit_jax.layers import encoder as encoder_lib
from vit_jax.layers import patches as patches_lib
from vit_jax.scale import sharding

CLASSIFIERS = ('token', 'gap', 'unpooled', 'token_unpooled')

# The names under which the original has them.
PatchEmbedding = patches_lib.PatchEmbedding
AddPositionEmbs = encoder_lib.AddPositionEmbs
MlpBlock = encoder_lib.MlpBlock
MultiHeadDotProductAttention = attention.MultiHeadDotProductAttention
Encoder1DBlock = encoder_lib.Encoder1DBlock
Encoder = encoder_lib.Encoder
check_images = patches_lib.check_images
make_head = patches_lib.make_head


def _field(config: Any, name: str, default: Any = None) -> Any:
  """Reads `name` from a ConfigDict, a mapping or an object."""
  if isinstance(config, Mapping):
    return config.get(name, default)
  return getattr(config, name, default)


def encoder_fields(encoder: Callable, fields: Mapping[str, Any]) -> dict:
  """Returns the fields that an encoder is made with: of those given, what it has.

  An encoder of one's own may have the original's fields alone. What it lacks is
  left out where it says no more than that all is as by default.

  Args:
    encoder: class of the encoder, or a function that makes one.
    fields: all that a config says, with the types of computation and parameters.

  Raises:
    ValueError: names the fields that the encoder lacks, and those that it has.
  """
  known = inspect.signature(encoder).parameters
  if any(p.kind is p.VAR_KEYWORD for p in known.values()):
    return dict(fields)
  lacking = {key: fields[key] for key in fields if key not in known}
  wrong = {
    key: value
    for key, value in lacking.items()
    if not hasattr(Encoder, key) or value != getattr(Encoder, key)
  }
  if wrong:
    name = getattr(encoder, '__name__', encoder)
    has = sorted(set(known) - {'parent', 'name'})
    raise ValueError(
      f'config.model has unknown fields {sorted(wrong)}: {name} takes {has}, and '
      f'the config says {", ".join(f"{k}={v}" for k, v in wrong.items())} '
      '(config.model.transformer)'
    )
  return {key: fields[key] for key in fields if key in known}


class IdentityLayer(nn.Module):
  """Returns its input: gives an activation a name that can be captured."""

  @nn.compact
  def __call__(self, x):
    return x


class VisionTransformer(patches_lib.ImageModel):
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
    encoder: class of the encoder; it gets those of its fields that are given.
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

  def setup(self):
    """Makes the parts, named as published.

    Raises:
      ValueError: on an unknown classifier, and where the class token, which
        stands first, would be read and see nothing but itself.
    """
    if self.classifier not in CLASSIFIERS:
      raise ValueError(
        f"classifier='{self.classifier}' is unknown: use one of {CLASSIFIERS} "
        '(config.model.classifier)'
      )
    types = self._types()
    if self.resnet is not None:
      self.resnet_layers = models_resnet.make_resnet(
        **dict(self.resnet), **types
      )
    self.embedding = PatchEmbedding(
      features=self.hidden_size,
      patch_size=tuple(_field(self.patches, 'size')),
      **types,
    )
    if self.transformer is not None:
      fields = dict(self.transformer)
      if fields.get('causal') and self.classifier == 'token':
        raise ValueError(
          "classifier='token' reads the class token, which stands first, and with "
          "causal=True sees no other: use 'gap' or 'unpooled' "
          '(config.model.classifier)'
        )
      if self.classifier in ('token', 'token_unpooled'):
        self.cls = self.param(
          'cls',
          nn.initializers.zeros,
          (1, 1, self.hidden_size),
          types['param_dtype'],
        )
      self.Transformer = self.encoder(
        **encoder_fields(self.encoder, {**types, **fields})
      )
    if self.representation_size is not None:
      self.pre_logits = nn.Dense(self.representation_size, **types)
    else:
      self.pre_logits = IdentityLayer()
    if self.num_classes:
      self.head = make_head(self.num_classes, self.head_bias_init, **types)

  def _types(self):
    """Types of the computation and of the parameters, by name of argument."""
    return dict(
      dtype=jnp.dtype(self.dtype), param_dtype=jnp.dtype(self.param_dtype)
    )

  def __call__(self, inputs, *, train):
    """Computes logits: embeds images, encodes the tokens, classifies them.

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
    x = self.embed(inputs, flat=self.transformer is not None)
    x = self.encode(x, train=train, only_first=self.classifier == 'token')
    return self.classify(x, train=train)

  def embed(self, images, *, flat=True):
    """Makes a token of each patch, as yet without a position.

    Args:
      images: float [B, H, W, C] in [-1, 1].
      flat: whether the tokens come in one row, line by line.

    Returns:
      Tokens [B, h*w, D] in `dtype`; as a grid [B, h, w, D] where not `flat`.

    Raises:
      ValueError: on inputs of another rank, and where patches do not divide the
        image.
    """
    images = jnp.asarray(images)  # TensorFlow's tensors, too.
    check_images(images)
    x = images.astype(self._types()['dtype'])
    if self.resnet is not None:
      x = models_resnet.apply_resnet(x, self.resnet_layers)
    x = sharding.constrain_batch(self.embedding(x))  # [B, h, w, D]
    return x.reshape(x.shape[0], -1, x.shape[-1]) if flat else x

  def encode(self, tokens, *, train, mask=None, only_first=False):
    """Adds class token and positions, and applies the encoder.

    Args:
      tokens: [B, h*w, D], of `embed` or made of them.
      train: whether dropout is on.
      mask: which tokens may attend to which, bool, broadcastable to
        [B, K, N, N], the class token being the first; None: all to all.
      only_first: whether only the first of the result is wanted, the class token.

    Returns:
      Tokens [B, N, D], the class token first where the classifier has one, or
      [B, 1, D] for the first alone (an `encoder` of one's own gives all of them).
      The input where there is no transformer.

    Raises:
      ValueError: on tokens of another rank.
    """
    if self.transformer is None:
      return tokens
    if tokens.ndim != 3:
      raise ValueError(
        f'tokens must be [batch, tokens, width], got {tokens.shape}'
      )
    x = tokens.astype(self._types()['dtype'])
    if self.classifier in ('token', 'token_unpooled'):
      cls = jnp.broadcast_to(self.cls, (x.shape[0], 1, x.shape[-1]))
      x = jnp.concatenate([cls.astype(x.dtype), x], axis=1)  # [B, N, D]
    # An encoder of one's own need not know these arguments.
    extra = {} if mask is None else {'mask': mask}
    if only_first and self.encoder is Encoder:
      extra['only_first'] = True
    return self.Transformer(x, train=train, **extra)

  def classify(self, encoded, *, train):
    """Pools tokens as the classifier has it, and applies pre-logits and head.

    Args:
      encoded: tokens [B, N, D] of `encode`.
      train: has no effect here.

    Returns:
      What the model returns.
    """
    del train
    x = encoded
    if self.classifier == 'token':
      x = x[:, 0]  # [B, D]
    elif self.classifier == 'gap':
      x = x.mean(axis=range(1, x.ndim - 1))  # [B, D]
    x = self.pre_logits(x)
    if self.representation_size is not None:
      x = nn.tanh(x)
    self.sow('intermediates', 'features', x)
    return self.head(x) if self.num_classes else x
