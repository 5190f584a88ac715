"""Lists the images of a folder and decodes each once, for `vit_jax index`."""

import dataclasses
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from vit_jax.data.images import index as index_lib


def make(
  root: str,
  split: str,
  check: bool = True,
  max_pixels: int | None = None,
  statistics: bool = False,
) -> tuple[str, int, list[str]]:
  """Makes the index of a split, next to its images, which are decoded if `check`.

  `max_pixels` is config.max_image_pixels by default. With `statistics`, images may be
  other than of 8-bit colour, all have as many channels as the first one, and the
  statistics of their values are written next to the index. Returns the path of the
  index, the number of images, and the broken images with their reasons.
  """
  from vit_jax.configs import common
  from vit_jax.data import pixel_statistics, sources
  from vit_jax.data.images import image_files, images, index as index_lib

  limit = max_pixels or common.get_config().max_image_pixels
  listing = sources.list_images(root, split)
  index = listing.index
  explain = listing.explain or images.broken_reason
  paths = index_lib.Paths([(index, index.order)])
  channels = None
  if statistics and len(paths):
    channels = images.count_channels(image_files.read_file(paths[0]))
    explain = functools.partial(images.broken_reason, channels=channels)
  index.check_anew('channels', channels)
  index.forget_changed(index.order)
  path = index_lib.place(None, index.root, index.base)
  _save(index, path)  # An error comes before hours of checking.
  if check and index.check(index.order, explain, limit, lambda: index.save(path)):
    _save(index, path)
  reasons = paths.broken()
  broken = sorted({f'{paths[i]}: {reason}' for i, reason in reasons.items()})
  if channels is not None:
    measured = pixel_statistics.measure(paths.without(sorted(reasons)), channels)
    measured = dataclasses.replace(measured, num_images=len(index))
    pixel_statistics.write(pixel_statistics.place(root, split), measured)
  return path, len(index), broken


def _save(index: 'index_lib.Index', path: str) -> None:
  try:
    index.save(path)
  except OSError as e:
    raise OSError(
      f"the list '{path}' cannot be written: {e.strerror or e}; make its folder "
      'writable, or train without this command: a run stores lists in its workdir'
    ) from e
