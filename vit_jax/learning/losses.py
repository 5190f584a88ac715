"""Classification losses, one value per example, computed by optax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def softmax_xent(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Computes the softmax cross-entropy, float32 [B].

  Labels [B, C] are one-hot, multi-hot or smoothed. Rows with a sum above 1 are
  scaled to sum to 1: an example with two labels has 1/2 for each.
  """
  labels = _to_shares(labels)
  return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels)


def sigmoid_xent(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Computes the sigmoid cross-entropy, summed over classes, float32 [B].

  Labels [B, C] have any number of ones in a row.
  """
  logits = logits.astype(jnp.float32)
  return optax.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1)


Loss = Callable[[jax.Array, jax.Array], jax.Array]
LOSSES: dict[str, Loss] = {'softmax': softmax_xent, 'sigmoid': sigmoid_xent}


def get_loss(name: str, label_smoothing: float = 0.0) -> Loss:
  """Returns a loss of LOSSES, a function (logits, labels) -> [B].

  `label_smoothing` is the fraction of each label to spread evenly over all classes.
  """
  loss = LOSSES[name]
  if not label_smoothing:
    return loss

  def smoothed_loss(logits, labels):
    if name == 'softmax':
      labels = _to_shares(labels)
    return loss(logits, optax.smooth_labels(labels, label_smoothing))

  return smoothed_loss


def _to_shares(labels: jax.Array) -> jax.Array:
  """Scales rows with a sum above 1 to sum to 1."""
  return labels / jnp.maximum(labels.sum(axis=-1, keepdims=True), 1.0)
