"""Lists the images of a folder and decodes each once, for `vit_jax index`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from vit_jax.data.images import index as index_lib


def make(
  root: str, split: str, check: bool = True, max_pixels: int | None = None
) -> tuple[str, int, list[str]]:
  """Makes the index of a split, next to its images, which are decoded if `check`.

  `max_pixels` is config.max_image_pixels by default. Returns the path of the index,
  the number of images, and the broken images with their reasons.
  """
  from vit_jax.configs import common
  from vit_jax.data import sources
  from vit_jax.data.images import images, index as index_lib

  limit = max_pixels or common.get_config().max_image_pixels
  listings = (x.list_images(root, split) for x in sources.FORMATS)
  # Class folders, the last format, list any folder.
  listing = next(listing for listing in listings if listing is not None)
  index, explain = listing.index, listing.explain or images.broken_reason
  index.forget_changed(index.order)
  path = index_lib.place(None, index.root, index.base)
  _save(index, path)  # An error comes before hours of checking.
  if check and index.check(index.order, explain, limit, lambda: index.save(path)):
    _save(index, path)
  paths = index_lib.Paths([(index, index.order)])
  broken = {f'{paths[i]}: {reason}' for i, reason in paths.broken().items()}
  return path, len(index), sorted(broken)


def _save(index: 'index_lib.Index', path: str) -> None:
  try:
    index.save(path)
  except OSError as e:
    raise OSError(
      f"the list '{path}' cannot be written: {e.strerror or e}; make its folder "
      'writable, or train without this command: a run stores lists in its workdir'
    ) from e
