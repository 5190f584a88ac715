"""Mixes the images of a batch, and their labels in the same proportion.

Both methods draw once per batch: mixup (arXiv 1710.09412) averages an image and its
partner, CutMix (arXiv 1905.04899) replaces a rectangle of the image by its partner's.
The partner of a row is the previous row, and the last row for the first, as in
big_vision.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def check(mixup: float, cutmix: float, batch: int) -> None:
  """Raises ValueError if a batch of one example is to be mixed."""
  for key, value in (('mixup', mixup), ('cutmix', cutmix)):
    if value and batch < 2:
      raise ValueError(
        f'{key}={value} mixes an image with another image of its batch, but '
        f'batch={batch}: use --config.batch=2 or more, or '
        f'--config.task_options.{key}=0'
      )


def mix(
  batch: Mapping[str, jax.Array], rng: jax.Array, mixup: float, cutmix: float
) -> dict[str, jax.Array]:
  """Mixes a batch, before it is split into micro-batches.

  Mixup draws a ~ Beta(mixup, mixup) and weights an image by max(a, 1 - a) and
  its partner by the rest, as in big_vision. CutMix draws l ~ Beta(cutmix,
  cutmix) and a centre, uniform over the pixels. A rectangle about the centre,
  of the image's aspect ratio and the fraction 1 - l of its area, is clipped to the
  image and taken from the partner. The label's weight is the remaining part of
  the area. If both parameters are above 0, one of the methods is drawn with
  probability 1/2; with a parameter of 0 nothing is mixed.

  `batch` has `image` [B, H, W, C] and `label` [B, classes], float32; other entries
  are returned as they are.
  """
  check(mixup, cutmix, batch['image'].shape[0])
  if not mixup and not cutmix:
    return dict(batch)
  rng_method, rng_mixup, rng_cutmix = jax.random.split(rng, 3)
  height, width = batch['image'].shape[1:3]
  if mixup:
    weight = jax.random.beta(rng_mixup, mixup, mixup)
    label_weight = jnp.maximum(weight, 1 - weight)
    pixel_weights = jnp.full((height, width), label_weight)
  if cutmix:
    cutmix_weights = _outside_of_box(rng_cutmix, cutmix, height, width)  # [H, W]
  if mixup and cutmix:
    is_cutmix = jax.random.bernoulli(rng_method)
    pixel_weights = jnp.where(is_cutmix, cutmix_weights, pixel_weights)
    label_weight = jnp.where(is_cutmix, cutmix_weights.mean(), label_weight)
  elif cutmix:
    pixel_weights = cutmix_weights
    label_weight = cutmix_weights.mean()
  return {
    **batch,
    'image': _blend(batch['image'], pixel_weights[..., None]),
    'label': _blend(batch['label'], label_weight),
  }


def _blend(rows: jax.Array, weight: jax.Array) -> jax.Array:
  """Averages rows, of this weight (one, or per pixel), and their partners."""
  return weight * rows + (1 - weight) * jnp.roll(rows, 1, axis=0)


def _outside_of_box(rng: jax.Array, p: float, height: int, width: int) -> jax.Array:
  """Returns 1 outside a random box and 0 inside, float32 [H, W]."""
  rng_area, *rngs = jax.random.split(rng, 3)
  side = jnp.sqrt(1 - jax.random.beta(rng_area, p, p))
  inside = []
  for size, key in zip((height, width), rngs, strict=True):
    length = jnp.round(size * side).astype(jnp.int32)
    begin = jax.random.randint(key, (), 0, size) - length // 2
    places = jnp.arange(size)
    inside.append((places >= begin) & (places < begin + length))
  return 1 - (inside[0][:, None] & inside[1]).astype(jnp.float32)
