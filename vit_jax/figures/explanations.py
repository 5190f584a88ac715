"""Explains predictions: how much each patch of an image speaks for a class.

  maps = explanations.explain(model, params, images, classes, 'legrad')

The methods:

  rollout           attention, followed through all layers (arXiv 2005.00928); the same
                    for every class
  rollout_gradient  rollout of attention times its gradient, positive parts, mean over
                    the heads (arXiv 2012.09838, with attention in place of its
                    relevance, as rules 5 and 6 of arXiv 2103.15679)
  legrad            the positive gradients of the attention weights, whose score in each
                    layer is the class's logit of that layer's tokens (arXiv 2404.03214)
  grad_cam          tokens, weighted by the mean gradient of each channel (arXiv
                    1610.02391), at the first norm of the last layer

All gradients are of the class's logit.

             class token   mean   attention pooling   axial   Mixer   BiT
  grad_cam   yes           yes    yes                 yes     yes     yes
  others     yes           yes    yes                 no      no      no

Shapes: B images, L layers, K heads, h x w patches, N tokens, D width of a token.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeAlias

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp

from vit_jax import models_bit, models_mixer, models_vit
from vit_jax.figures import internals
from vit_jax.layers import encoder as encoder_lib

# Methods and their names in figures.
METHODS = {
  'legrad': 'LeGrad',
  'rollout_gradient': 'Gradient-weighted rollout',
  'grad_cam': 'Grad-CAM',
  'rollout': 'Attention rollout',
}

Path: TypeAlias = tuple[str, ...]
# Maps (method of a module, args, kwargs, context) to its result, see
# flax.linen.intercept_methods.
Interceptor: TypeAlias = Callable[..., Any]


def explain(
  model: nn.Module, params: Any, images: Any, classes: Any, method: str = 'legrad'
) -> jax.Array:
  """Computes how much each patch speaks for a class.

  Each call compiles the model. To call it several times, compile it once:
  `jax.jit(functools.partial(explanations.explain, model, method='legrad'))`.

  Args:
    model: a classifier, see the top of this module.
    params: its parameters.
    images: float [B, H, W, C] in [-1, 1].
    classes: the class of each image, int [B], or one for all images.
    method: a key of METHODS.

  Returns:
    float32 [B, h, w]: the relevance of each patch, where each map is scaled to [0, 1]; 0
    everywhere if it is constant.

  Raises:
    ValueError: if the model lacks what the method needs, or a class is unknown.
  """
  reason = lacks(model, method)
  if reason is not None:
    raise ValueError(reason)
  images = jnp.asarray(images)
  classes = _checked_classes(classes, len(images), model.num_classes)
  compute = functools.partial(_COMPUTE[method], _without_remat(model))
  return jax.jit(lambda *args: _scaled(compute(*args)))(params, images, classes)


def lacks(model: Any, method: str) -> str | None:
  """Returns why a method cannot explain a model, in words; None if it can.

  Raises ValueError if the method is unknown.
  """
  if method not in METHODS:
    raise ValueError(
      f"method='{method}' is unknown: use one of {', '.join(METHODS)} (--explain)"
    )
  name = type(model).__name__
  kinds = models_vit.VisionTransformer, models_mixer.MlpMixer, models_bit.BitResNet
  if not isinstance(model, kinds):
    return f'model={name} cannot be explained: use a ViT, a Mixer or BiT'
  if not model.num_classes:
    return f'num_classes={model.num_classes} leaves no class to explain: add a head'
  if getattr(model, 'classifier', '').endswith('unpooled'):
    return (
      f"classifier='{model.classifier}' has logits of every token: use a classifier "
      'with one row per image (config.model.classifier)'
    )
  if method != 'grad_cam':
    reason = internals.lacks(model)
    if reason is not None:
      return f"{reason}, or method='grad_cam' (--explain=grad_cam)"
  if method in ('legrad', 'grad_cam') and _is_foreign(model):
    return (
      f'encoder={getattr(model.encoder, "__name__", model.encoder)} has layers of '
      f"unknown names: use method='rollout' or the package's encoder"
    )
  return None


def _is_foreign(model: Any) -> bool:
  """Returns whether a model has an encoder that this package does not define."""
  if getattr(model, 'transformer', None) is None:
    return False
  return model.encoder not in (encoder_lib.Encoder, models_vit.Encoder)


def _checked_classes(classes: Any, count: int, num_classes: int) -> jax.Array:
  """Returns the class of each image, int [B]; ValueError if they do not fit."""
  classes = jnp.asarray(classes)
  if not isinstance(classes, jax.core.Tracer):
    low, high = int(classes.min()), int(classes.max())
    if low < 0 or high >= num_classes:
      number = low if low < 0 else high
      raise ValueError(
        f'classes={number} is not among the {num_classes} classes '
        f'of the model: use 0 to {num_classes - 1}'
      )
  return jnp.broadcast_to(classes, (count,))


def _without_remat(model: Any) -> Any:
  """Returns a model whose layers are called once, so that they can be intercepted."""
  fields = getattr(model, 'transformer', None)
  if not fields or not fields.get('remat'):
    return model
  return model.clone(transformer={**fields, 'remat': ''})


def _scaled(maps: jax.Array) -> jax.Array:
  """Scales maps [B, h, w] to float32 in [0, 1]."""
  low = maps.min(axis=(1, 2), keepdims=True)
  spread = maps.max(axis=(1, 2), keepdims=True) - low
  scaled = (maps - low) / jnp.where(spread > 0, spread, 1)
  return scaled.clip(0, 1).astype(jnp.float32)  # Rounding may exceed the range.


def _rollout(
  model: Any, params: Any, images: jax.Array, classes: jax.Array
) -> jax.Array:
  """Computes attention rollout, [B, h, w]."""
  del classes
  grid = internals.patch_grid(model, params, images)
  weights, outputs = internals.forward(model, params, images)
  return internals.rollout_maps(internals.make_attention(model, weights, outputs, grid))


def _rollout_gradient(
  model: Any, params: Any, images: jax.Array, classes: jax.Array
) -> jax.Array:
  """Computes rollout of attention times gradient, [B, h, w].

  Without division by the sums of rows, which would remove the size of the gradients.
  """
  weights, gradients = _attention_gradients(model, params, images, classes)
  products = [nn.relu(w * g) for w, g in zip(weights, gradients, strict=True)]
  grid = internals.patch_grid(model, params, images)
  attention = internals.make_attention(model, products, None, grid)
  result = jnp.eye(weights[0].shape[-1])
  for product in attention.weights:
    result = result + product.mean(axis=1) @ result  # [B, N, N]
  return internals.on_grid(result, attention)


def _legrad(
  model: Any, params: Any, images: jax.Array, classes: jax.Array
) -> jax.Array:
  """Computes LeGrad, [B, h, w], over all layers.

  The tokens of a layer are averaged before the last norm and the head, as the authors'
  code does (legrad_torch 1.1), or read by attention pooling. Then its weights replace
  those of the layer.
  """
  names = [f'encoderblock_{i}' for i in range(model.transformer['num_layers'])]
  layers = [('Transformer', name) for name in names]
  tokens: list[jax.Array] = []
  pools = internals.has_pooling(model)

  def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    path = context.module.path
    if context.method_name != '__call__' or path not in layers:
      return call(*args, **kwargs)
    if path == layers[0]:
      tokens.clear()
    inputs, *other_args = args
    # A layer's score depends on its own weights only.
    x = call(jax.lax.stop_gradient(inputs), *other_args, **kwargs)
    tokens.append(x if pools else jnp.broadcast_to(x.mean(1, keepdims=True), x.shape))
    if path != layers[-1]:
      return x
    return jnp.concatenate(tokens)  # [L * B, N, D]

  tiled = jnp.tile(classes, len(layers))
  weights, gradients = _attention_gradients(model, params, images, tiled, intercept)
  # Weights that a mask sets to 0 do not count.
  positive = []
  for layer_weights, gradient in zip(weights, gradients):
    positive.append(jnp.where(layer_weights > 0, nn.relu(gradient), 0))
  grid = internals.patch_grid(model, params, images)
  if pools:
    pooling = positive[-1]  # [L * B, K, 1, N]
    relevance = pooling.reshape(len(layers), len(images), *pooling.shape[1:])
  else:
    relevance = jnp.stack(positive)  # [L, B, K, N, N]
  relevance = relevance.mean(axis=(0, 2, 3))  # [B, N]
  num_patches = grid[0] * grid[1]
  return relevance[:, -num_patches:].reshape(-1, *grid)


def _attention_gradients(
  model: Any,
  params: Any,
  images: jax.Array,
  classes: jax.Array,
  intercept: Interceptor | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns the attention weights of a model, and the gradients of the logits by them.

  Both are in the order of internals.forward.
  """

  def score(perturbations: Any) -> tuple[jax.Array, Any]:
    variables = {'params': params, 'perturbations': perturbations}
    logits, sown = _apply(model, variables, images, ['intermediates'], intercept)
    return _sum_of(logits, classes), sown['intermediates']

  def shapes() -> Any:
    collections = ['intermediates', 'perturbations']
    return _apply(model, {'params': params}, images, collections, intercept)[1]

  spec = jax.eval_shape(shapes).get('perturbations', {})
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
  gradients, sown = jax.grad(score, has_aux=True)(zeros)
  gradients = flax.traverse_util.flatten_dict(gradients, sep='/')
  sown = flax.traverse_util.flatten_dict(sown, sep='/')
  paths = sorted(gradients, key=internals.path_key)
  weights = [sown[path][0] for path in paths]
  return weights, [gradients[path] for path in paths]


def _apply(
  model: Any,
  variables: Any,
  images: jax.Array,
  mutable: list[str],
  intercept: Interceptor | None,
) -> tuple[jax.Array, Any]:
  """Returns the logits of a model and its mutable collections."""
  intercept = intercept or (lambda call, args, kwargs, _: call(*args, **kwargs))
  with nn.intercept_methods(intercept):
    return model.apply(variables, images, train=False, mutable=mutable)


def _sum_of(logits: jax.Array, classes: jax.Array) -> jax.Array:
  """Returns the sum over images of the logits [B, C] of their classes [B]."""
  return jnp.take_along_axis(logits, classes[:, None], axis=1).sum()


def _grad_cam(
  model: Any, params: Any, images: jax.Array, classes: jax.Array
) -> jax.Array:
  """Computes Grad-CAM, [B, h, w].

  Not after the last layer: of its tokens, a class token is all that the head reads.
  """
  path = _cam_path(model)
  activations: list[jax.Array] = []

  def score(perturbation: Any) -> tuple[jax.Array, jax.Array]:
    activations.clear()

    def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
      result = call(*args, **kwargs)
      if context.method_name != '__call__' or context.module.path != path:
        return result
      activations.append(result)
      return result + perturbation

    variables = {'params': params}
    # Sowing models apply their layers one by one.
    logits, _ = _apply(model, variables, images, ['intermediates'], intercept)
    return _sum_of(logits, classes), activations[-1]

  spec = jax.eval_shape(lambda: score(0)[1])
  zeros = jnp.zeros(spec.shape, spec.dtype)
  gradients, tokens = jax.grad(score, has_aux=True)(zeros)
  grid = _token_grid(model, params, images, tokens.shape)
  tokens = _patches(tokens, grid)
  gradients = _patches(gradients, grid)
  channels = gradients.mean(axis=1, keepdims=True)
  return nn.relu((tokens * channels).sum(axis=-1)).reshape(-1, *grid)


def _patches(x: jax.Array, grid: tuple[int, int]) -> jax.Array:
  """Returns the values of patches, float32 [B, h*w, D]."""
  flat = x.reshape(len(x), -1, x.shape[-1])
  num_patches = grid[0] * grid[1]
  return flat[:, -num_patches:].astype(jnp.float32)


def _cam_path(model: Any) -> Path:
  """Returns the module whose result Grad-CAM weights."""
  if isinstance(model, models_bit.BitResNet):
    return (f'block{len(model.num_layers)}',)
  if isinstance(model, models_mixer.MlpMixer):
    return f'MixerBlock_{model.num_blocks - 1}', 'LayerNorm_0'
  if model.transformer is None:
    return ('embedding',)
  layer = f'encoderblock_{model.transformer["num_layers"] - 1}'
  if model.transformer.get('attention_pattern') == 'axial':
    return 'Transformer', layer, 'row', 'LayerNorm_0'
  return 'Transformer', layer, 'LayerNorm_0'


def _token_grid(
  model: Any, params: Any, images: jax.Array, shape: tuple[int, ...]
) -> tuple[int, int]:
  """Returns the number of patches (down, across) of tokens of a shape."""
  if len(shape) == 4:
    return shape[1:3]
  if isinstance(model, models_mixer.MlpMixer):
    height, width = model.patches['size']
    return images.shape[1] // height, images.shape[2] // width
  return internals.embedding_grid(model, params, images)


_COMPUTE: dict[str, Callable[..., jax.Array]] = {
  'rollout': _rollout,
  'rollout_gradient': _rollout_gradient,
  'legrad': _legrad,
  'grad_cam': _grad_cam,
}
