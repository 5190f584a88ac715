"""Lists the images of a folder and decodes each once: `vit_jax index`."""

import argparse
import time
from typing import TYPE_CHECKING

from vit_jax import console

if TYPE_CHECKING:
  from vit_jax.data.images import index as index_lib

_SHOWN = 10


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


def run(args: argparse.Namespace) -> int:
  """Runs `vit_jax index`; returns its exit status."""
  from vit_jax.data import checking, folder, manifest, parquet
  from vit_jax.data.coco import layout
  from vit_jax.data.lazy import tf

  if not tf.io.gfile.isdir(args.folder):
    raise FileNotFoundError(f"'{args.folder}' is not a folder that exists")
  for split in args.splits or checking.SPLITS:
    has_manifest = manifest.exists(args.folder, split)
    if not has_manifest and parquet.exists(args.folder, split):
      raise ValueError(
        f"'{args.folder}' has Parquet files of '{split}', whose images are not "
        'listed: train without an index (config.dataset)'
      )
  has_broken = False
  splits = args.splits or layout.splits(args.folder)
  for split in splits or folder.splits(args.folder):
    start_time = time.perf_counter()
    path, count, broken = make(
      args.folder, split, args.check == 'decode', args.max_image_pixels
    )
    seconds = time.perf_counter() - start_time
    images = console.pluralize(count, 'image')
    console.log(f'{path}: {images}, {console.duration(seconds)}.')
    for line in broken[:_SHOWN]:
      console.log(f'  broken: {line}')
    if broken:
      has_broken = True
      console.log(
        f'Broken images: {len(broken):,}. Repair, restore or delete them, or leave '
        'them out of the training with --config.broken_images=skip.'
      )
  return int(has_broken)
