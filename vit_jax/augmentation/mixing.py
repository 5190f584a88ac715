"""Mixes the images of a batch, and their labels in the same proportion.

Both methods work on the whole batch inside the compiled update, with one draw
for all of it: mixup (arXiv 1710.09412) averages an image and its partner,
CutMix (arXiv 1905.04899) puts a rectangle of the partner into it. The partner
of a row is the row before it, that of the first row the last, as in big_vision.

Mix before a batch is cut into micro-batches, or each of them gets a draw of its
own and partners from its own rows.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def check(mixup: float, cutmix: float, batch: int):
  """Checks the settings of `mix`.

  Args:
    mixup: `config.task_options.mixup`.
    cutmix: `config.task_options.cutmix`.
    batch: `config.batch`.

  Raises:
    ValueError: if one of the first two is negative or no finite number, or a
      batch of 1 is to be mixed.
  """
  for key, value in (('mixup', mixup), ('cutmix', cutmix)):
    if not (isinstance(value, int | float) and 0 <= value < float('inf')):
      raise ValueError(
        f'{key}={value} must be a number of at least 0, 0.2 for one; 0 is none '
        f'(config.task_options.{key})'
      )
    if value and batch < 2:
      raise ValueError(
        f'{key}={value} mixes an image with another one of its batch, but '
        f'batch={batch}: use --config.batch=2 or more, or '
        f'--config.task_options.{key}=0'
      )


def mix(batch: Mapping, rng, mixup: float, cutmix: float) -> dict:
  """Mixes a batch; can be jitted, with `mixup` and `cutmix` static.

  Mixup draws a ~ Beta(mixup, mixup) and takes the share max(a, 1 - a) of an
  image and the rest of its partner, as in big_vision. CutMix draws l ~
  Beta(cutmix, cutmix) and a middle, uniform over the pixels; the rectangle
  about it, with the shape of the image and the share 1 - l of its area, is
  clipped to the image and comes from the partner. The share of its label is
  what is left of the area.

  Args:
    batch: `image` [B, H, W, C] and `label` [B, classes], float32, split over
      devices in whatever way; other entries are passed on.
    rng: random key.
    mixup: parameter of mixup's distribution; 0 is no mixup.
    cutmix: the same for CutMix. Where both are above 0, one of them is drawn
      for the batch, either as likely.

  Returns:
    A dict like `batch`.

  Raises:
    ValueError: on settings that `check` refuses.
  """
  check(mixup, cutmix, batch['image'].shape[0])
  if not mixup and not cutmix:
    return dict(batch)
  which, rng_mixup, rng_cutmix = jax.random.split(rng, 3)
  height, width = batch['image'].shape[1:3]
  if mixup:
    kept = _mixup_share(rng_mixup, mixup)
    pixels = jnp.full((height, width), kept)
  if cutmix:
    cut_pixels = _outside_of_box(rng_cutmix, cutmix, height, width)  # [H, W]
    cut_kept = cut_pixels.mean()
  if mixup and cutmix:
    cut = jax.random.bernoulli(which)
    pixels = jnp.where(cut, cut_pixels, pixels)
    kept = jnp.where(cut, cut_kept, kept)
  elif cutmix:
    pixels, kept = cut_pixels, cut_kept
  return {
    **batch,
    'image': _blend(batch['image'], pixels[..., None]),
    'label': _blend(batch['label'], kept),
  }


def _blend(rows, share):
  """Takes a share (one, or one a pixel) of each row, the rest of another."""
  return share * rows + (1 - share) * jnp.roll(rows, 1, axis=0)


def _mixup_share(rng, p):
  share = jax.random.beta(rng, p, p)
  return jnp.maximum(share, 1 - share)


def _outside_of_box(rng, p, height, width):
  """Returns 1 outside of a random box and 0 inside, float32 [H, W]."""
  rng_share, *rngs = jax.random.split(rng, 3)
  side = jnp.sqrt(1 - jax.random.beta(rng_share, p, p))
  inside = []
  for size, key in zip((height, width), rngs, strict=True):
    length = jnp.round(size * side).astype(jnp.int32)
    begin = jax.random.randint(key, (), 0, size) - length // 2
    places = jnp.arange(size)
    inside.append((places >= begin) & (places < begin + length))
  return 1 - (inside[0][:, None] & inside[1]).astype(jnp.float32)
