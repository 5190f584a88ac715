"""Losses of predicted masks (arXiv 2005.12872, section 4.4 and appendix A.2).

Shapes: B images, N objects of an image (padded), h x w cells of a predicted
mask, H x W pixels.
"""

import jax
import jax.numpy as jnp

# Weights of the two losses in the sum of all losses of a detector.
FOCAL, DICE = 1.0, 1.0
# Weight of the pixels of an object, and exponent of the error of a pixel, in the
# focal loss (arXiv 1708.02002, section 3.2).
_ALPHA, _GAMMA = 0.25, 2


def focal(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Computes the focal loss [...], the mean over the pixels of masks [..., H, W].

  A target is 1 for pixels of the object, otherwise 0.
  """
  signed = jnp.where(targets > 0, logits, -logits)
  cross_entropy = jax.nn.softplus(-signed)
  weight = jnp.where(targets > 0, _ALPHA, 1 - _ALPHA)
  error = jax.nn.sigmoid(-signed)
  return (weight * error**_GAMMA * cross_entropy).mean(axis=(-2, -1))


def dice(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Computes the Dice loss (arXiv 1606.04797) with one more pixel in each sum.

  For logits and targets see `focal`; the result is from 0 to 1.
  """
  probabilities = jax.nn.sigmoid(logits)
  shared = (probabilities * targets).sum(axis=(-2, -1))
  total = probabilities.sum(axis=(-2, -1)) + targets.sum(axis=(-2, -1))
  return 1 - (2 * shared + 1) / (total + 1)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Computes the binary cross-entropy [...], the mean over points of masks [..., P].

  Targets are from 0 to 1.
  """
  return (jax.nn.softplus(logits) - logits * targets).mean(axis=-1)


def pairwise(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes `cross_entropy` and `dice` of each target with each prediction.

  Maps logits [Q, P] and targets [N, P] to two arrays [N, Q].
  """
  shared = targets @ logits.T / logits.shape[-1]
  entropies = jax.nn.softplus(logits).mean(axis=-1) - shared
  probabilities = jax.nn.sigmoid(logits)
  total = probabilities.sum(axis=-1) + targets.sum(axis=-1)[:, None]
  return entropies, 1 - (2 * targets @ probabilities.T + 1) / (total + 1)


def losses(
  logits: jax.Array, segments: jax.Array, counts: jax.Array
) -> dict[str, jax.Array]:
  """Computes the losses of the masks of objects: sums over them, float32 [B].

  Masks are enlarged to the size of the image one after the other, and again in the
  backward pass: the masks of 100 objects of a large image take 400 MB.

  Args:
    logits: float32 [B, N, h, w], the masks of the objects in their order.
    segments: int [B, H, W], number of the object of each pixel, from 1; 0 for
      pixels of none.
    counts: int [B], number of objects of each image, the first ones.
  """

  @jax.checkpoint
  def add(
    sums: dict[str, jax.Array], inputs: tuple[jax.Array, jax.Array]
  ) -> tuple[dict[str, jax.Array], None]:
    small, number = inputs
    mask = jax.image.resize(small, segments.shape, 'bilinear')  # [B, H, W]
    target = (segments == number + 1).astype(jnp.float32)
    is_object = number < counts
    return {
      'focal': sums['focal'] + jnp.where(is_object, focal(mask, target), 0.0),
      'dice': sums['dice'] + jnp.where(is_object, dice(mask, target), 0.0),
    }, None

  zeros = jnp.zeros(len(counts))
  numbers = jnp.arange(logits.shape[1])
  sums, _ = jax.lax.scan(
    add, {'focal': zeros, 'dice': zeros}, (logits.swapaxes(0, 1), numbers)
  )
  return sums
