"""Classification losses, one value per example, computed by optax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import console


def softmax_xent(
  logits: jax.Array,
  labels: jax.Array,
  class_weights: jax.Array | None = None,
  smoothing: float = 0.0,
  gamma: float = 0.0,
) -> jax.Array:
  """Computes the softmax cross-entropy, float32 [B].

  Args:
    logits: float [B, C].
    labels: float [B, C], one-hot, multi-hot or smoothed. Rows with a sum above 1 are
      scaled to sum to 1: an example with two labels has 1/2 for each.
    class_weights: float32 [C], factors of the terms of the classes, as `weight` of
      PyTorch's cross_entropy without label smoothing. None: 1.
    smoothing: the fraction of each label, after weighting, to spread evenly over all
      classes.
    gamma: exponent of the focal loss (arXiv 1708.02002): the term of a class with
      probability p is multiplied by (1 - p)**gamma.
  """
  logits = logits.astype(jnp.float32)
  labels = _at_most_one(labels)
  if class_weights is not None:
    labels = labels * class_weights
  if smoothing and class_weights is None:
    labels = _at_most_one(optax.smooth_labels(labels, smoothing))
  elif smoothing:
    # Smoothing before weighting would give rare classes more weight than the label.
    mean = labels.sum(axis=-1, keepdims=True) / labels.shape[-1]
    labels = (1 - smoothing) * labels + smoothing * mean
  if not gamma:
    return optax.softmax_cross_entropy(logits, labels)
  log_p = jax.nn.log_softmax(logits)
  # Not 0, where powers below 1 have no gradient.
  miss = jnp.maximum(-jnp.expm1(log_p), jnp.finfo(jnp.float32).tiny)
  return -(labels * miss**gamma * log_p).sum(axis=-1)


def sigmoid_xent(
  logits: jax.Array,
  labels: jax.Array,
  class_weights: jax.Array | None = None,
  smoothing: float = 0.0,
  gamma: float = 0.0,
  alpha: float | None = None,
) -> jax.Array:
  """Computes the sigmoid cross-entropy, summed over classes, float32 [B].

  Args:
    logits: float [B, C].
    labels: float [B, C], any number of ones in a row.
    class_weights: float32 [C], factors of the terms of positive labels, as `pos_weight`
      of PyTorch's BCEWithLogitsLoss. None: 1.
    smoothing: the fraction of each label to spread evenly over all classes.
    gamma: exponent of the focal loss (arXiv 1708.02002), which has no class weights.
    alpha: weight of positive labels in the focal loss, and 1 - alpha of negative ones.
      None: 1 for both.
  """
  logits = logits.astype(jnp.float32)
  if smoothing:
    labels = optax.smooth_labels(labels, smoothing)
  if gamma or alpha is not None:
    losses = optax.sigmoid_focal_loss(
      logits, jnp.asarray(labels), alpha=alpha, gamma=gamma
    )
  elif class_weights is not None:
    positive = class_weights * labels * jax.nn.log_sigmoid(logits)
    losses = -(positive + (1 - labels) * jax.nn.log_sigmoid(-logits))
  else:
    losses = optax.sigmoid_binary_cross_entropy(logits, labels)
  return losses.sum(axis=-1)


Loss = Callable[..., jax.Array]
LOSSES: dict[str, Loss] = {'softmax': softmax_xent, 'sigmoid': sigmoid_xent}


def get_loss(
  name: str,
  label_smoothing: float = 0.0,
  logit_offsets: jax.Array | None = None,
  **options: Any,
) -> Loss:
  """Returns a loss of LOSSES, a function (logits, labels) -> [B].

  Args:
    name: key of LOSSES.
    label_smoothing: the fraction of each label to spread evenly over all classes.
    logit_offsets: float32 [C], are added to the logits, see `logit_adjustment`.
    **options: further arguments of the loss.
  """
  loss = LOSSES[name]

  def configured_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    if logit_offsets is not None:
      logits = logits.astype(jnp.float32) + logit_offsets
    return loss(logits, labels, smoothing=label_smoothing, **options)

  return configured_loss


def logit_adjustment(counts: np.ndarray, tau: float) -> np.ndarray:
  """Returns the offsets of the logit-adjusted loss (arXiv 2007.07314, equation 10).

  `counts` [C] are the training examples of each class, all above 0. Returns tau times
  the logarithm of the frequencies, float32 [C].
  """
  return (tau * np.log(counts / counts.sum())).astype(np.float32)


def balanced_weights(counts: np.ndarray) -> np.ndarray:
  """Returns the class weights n / (classes * count), as scikit-learn's 'balanced'.

  `counts` [C] are the training examples of each class, all above 0; n is their sum.
  Returns float32 [C].
  """
  return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def named_weights(
  weights: Mapping[str, float], class_names: Sequence[str]
) -> np.ndarray:
  """Returns weights by name in the order of the classes, 1 by default: float32 [C].

  Raises ValueError for a name that is not a class.
  """
  if unknown := sorted(weights.keys() - set(class_names)):
    raise ValueError(
      f'class_weights has {unknown[0]!r}, which is not one of the '
      f'{console.pluralize(len(class_names), "class")}, '
      f'{list(class_names[:5])}: use names of classes (config.class_weights)'
    )
  return np.array([weights.get(name, 1.0) for name in class_names], np.float32)


def label_weights(labels: jax.Array, class_weights: jax.Array) -> jax.Array:
  """Returns the weight of each example, float32 [B], by which the sum is divided.

  It is the weight of its class, or the mean over its labels [B, C]: a mixed image of
  30 % of one class and 70 % of another has .3 and .7 of their weights.
  """
  return (_at_most_one(labels) * class_weights).sum(axis=-1)


def _at_most_one(labels: jax.Array) -> jax.Array:
  """Scales rows with a sum above 1 to sum to 1."""
  return labels / jnp.maximum(labels.sum(axis=-1, keepdims=True), 1.0)
