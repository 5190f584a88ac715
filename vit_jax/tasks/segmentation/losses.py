"""Losses over pixels; those without a class (vit_jax.data.masks.IGNORED) do not count.

Shapes: B images of H x W pixels, scores on a grid of h x w cells, C classes.
"""

import jax
import jax.numpy as jnp
import optax

WeightedSum = tuple[jax.Array, jax.Array]  # float32 scalars: a sum, and its weight.


def resized(scores: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Resizes scores [B, h, w, C] bilinearly to a shape (H, W), float32 [B, H, W, C]."""
  b, _, _, c = scores.shape
  scores = scores.astype(jnp.float32)
  return jax.image.resize(scores, (b, *shape, c), 'bilinear', antialias=False)


def cross_entropy(
  scores: jax.Array, classes: jax.Array, class_weights: jax.Array | None = None
) -> WeightedSum:
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
  weights = (classes >= 0).astype(jnp.float32)  # [B, H, W]
  if class_weights is not None:
    weights *= class_weights[labels]
  return (losses * weights).sum(), weights.sum()
