"""Losses over pixels; those without a class (vit_jax.data.masks.IGNORED) do not count.

Shapes: B images of H x W pixels, scores on a grid of h x w cells, C classes.
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.tasks import base


def resized(scores: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Resizes scores [B, h, w, C] bilinearly to a shape (H, W), float32 [B, H, W, C]."""
  b, _, _, c = scores.shape
  scores = scores.astype(jnp.float32)
  return jax.image.resize(scores, (b, *shape, c), 'bilinear', antialias=False)


def cross_entropy(
  scores: jax.Array, classes: jax.Array, class_weights: jax.Array | None = None
) -> base.WeightedSum:
  """Returns the cross-entropy of logits that are resized to the pixels.

  Args:
    scores: logits [B, h, w, C].
    classes: classes of the pixels, int32 [B, H, W], negative for none.
    class_weights: float32 [C], weights of pixels by class; None for equal weights. As in
      PyTorch's CrossEntropyLoss, the sum is divided by the sum of the weights.
  """
  logits = resized(scores, classes.shape[1:])
  labels = jnp.maximum(classes, 0)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  weights = pixel_weights(classes, class_weights)
  return (losses * weights).sum(), weights.sum()


def pixel_weights(
  classes: jax.Array, class_weights: jax.Array | None = None
) -> jax.Array:
  """Returns the weights of pixels in `cross_entropy`, float32 [B, H, W]."""
  weights = (classes >= 0).astype(jnp.float32)
  if class_weights is not None:
    weights *= jnp.asarray(class_weights)[jnp.maximum(classes, 0)]
  return weights


def dice(scores: jax.Array, classes: jax.Array) -> jax.Array:
  """Returns the Dice loss of each image, float32 [B], the mean over the classes.

  The loss of a class is 1 - (2 sum(p t) + 1) / (sum(p^2) + sum(t^2) + 1), of
  probabilities p and targets t (arXiv 1606.04797, section 3; the ones are
  mmsegmentation's). For the arguments see `cross_entropy`.
  """
  probabilities = jax.nn.softmax(resized(scores, classes.shape[1:]))
  is_counted = (classes >= 0)[..., None]
  probabilities = jnp.where(is_counted, probabilities, 0.0)
  targets = jax.nn.one_hot(classes, scores.shape[-1])  # Zeros where negative.
  pixels = (1, 2)
  shared = (probabilities * targets).sum(axis=pixels)  # [B, C]
  total = (probabilities**2).sum(axis=pixels) + targets.sum(axis=pixels)
  return (1 - (2 * shared + 1) / (total + 1)).mean(axis=-1)
