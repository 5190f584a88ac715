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
  from vit_jax.data import checking, folder, manifest
  from vit_jax.data.coco import layout, source
  from vit_jax.data.images import images, index as index_lib, listing

  limit = max_pixels or common.get_config().max_image_pixels
  explain = images.broken_reason
  if manifest.exists(root, split):
    index = manifest.open_index(root, split)
  elif layout.exists(root, split):
    index, explain = source.open_index(root, split)
  else:
    index = checking.renew_index(root, split)
    listing.warn_of_ignored(index)
    if index.facts['metadata']:
      index = manifest.open_index(root, split, folder.listed_lines)
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
