"""Classification losses, one value per example, computed by optax."""

from collections.abc import Callable

import jax.numpy as jnp
import optax


def softmax_xent(logits, labels):
  """Computes the softmax cross-entropy.

  Args:
    logits: float [B, C].
    labels: float [B, C]: one-hot, multi-hot or smoothed. Rows with a sum above
      1 are scaled to sum to 1: an example with two labels has 1/2 for each.

  Returns:
    float32 [B].
  """
  labels = labels / jnp.maximum(labels.sum(axis=-1, keepdims=True), 1.0)
  return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels)


def sigmoid_xent(logits, labels):
  """Computes the sigmoid cross-entropy, summed over classes (issue #34).

  Args:
    logits: float [B, C].
    labels: float [B, C] in [0, 1], with any number of ones in a row.

  Returns:
    float32 [B].
  """
  losses = optax.sigmoid_binary_cross_entropy(
    logits.astype(jnp.float32), labels
  )  # [B, C]
  return losses.sum(axis=-1)


LOSSES = {'softmax': softmax_xent, 'sigmoid': sigmoid_xent}


def get_loss(name: str, label_smoothing: float = 0.0) -> Callable:
  """Returns a loss by name, a function (logits, labels) -> [B].

  Args:
    name: a key of LOSSES.
    label_smoothing: share of each label to spread evenly over all classes.

  Raises:
    ValueError: if the name is unknown, or the smoothing is not in [0, 1).
  """
  if name not in LOSSES:
    raise ValueError(
      f"loss='{name}' is unknown: use one of {sorted(LOSSES)} (config.loss)"
    )
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f'label_smoothing={label_smoothing} must be at least 0 and below 1'
    )
  loss = LOSSES[name]
  if not label_smoothing:
    return loss
  return lambda logits, labels: loss(
    logits, optax.smooth_labels(labels, label_smoothing)
  )
