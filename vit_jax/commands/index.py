r"""List the images of a folder and decode each one once, before training.

  vit_jax index /data/photos

For each split (/data/photos/train, test, ...) the results are written next to its
folder, such as /data/photos/train.index.npz. Training on /data/photos uses these lists
while they are up to date: images that are added, removed or renamed are noticed on
local disks, but not in buckets (gs://): there, run this command again after a change.
It needs no accelerator and saves its progress about every minute.

For images that are not 8-bit colour (.npy, TIFF, PNG of 16 bits), --statistics also
measures their values, and writes /data/photos/train.statistics.json. A run reads it with
--config.pp.range=percentile --config.pp.mean=measured --config.pp.std=measured.

To list millions of images without decoding them, use --check=none, and train with
--config.broken_images=trust.

The exit status is 1 if there are broken images. They are named and recorded;
--config.broken_images=skip leaves them out of training.
"""

from collections.abc import Sequence
import time

from vit_jax import console
from vit_jax.commands import flags

_SHOWN = 10  # Broken images of a split that are printed.

_FLAGS = {
  'folder': dict(help='folder of the data set, local or gs://'),
  'splits': dict(
    nargs='*',
    help="splits in the folder (all); '.': the folder itself, with one folder per class",
  ),
  '--check': dict(
    choices=('none', 'decode'),
    default='decode',
    help='none: only list names; decode: decode every image, a JPEG at 1/8 of its '
    'size (decode)',
  ),
  '--statistics': dict(
    action='store_true',
    help='measure the values of images that are not 8-bit colour, and write their range, '
    'mean and deviation next to the list, for config.pp.range, mean and std',
  ),
  '--max_image_pixels': dict(
    type=flags.count,
    help='images with more pixels count as broken (config.max_image_pixels)',
  ),
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  return flags.Parser('index', __doc__, _FLAGS)


def main(argv: Sequence[str]) -> int:
  """Lists and checks the splits of a folder; returns 1 if images are broken."""
  args = make_parser().parse_args(argv)
  from vit_jax.data import (
    checking,
    folder,
    indexing,
    pixel_statistics,
    registry,
    sources,
  )
  from vit_jax.data.coco import layout
  from vit_jax.data.lazy import tf

  unlisted = 'whose images are not listed: train without an index (config.dataset)'
  if args.folder.startswith(tuple(registry.SOURCES)):
    raise ValueError(f"'{args.folder}' is not a folder but a name, {unlisted}")
  if not tf.io.gfile.isdir(args.folder):
    raise FileNotFoundError(f"'{args.folder}' is not a folder that exists")
  for split in args.splits or checking.SPLITS:
    folder_format = sources.find_format(args.folder, split)
    if folder_format is not None and not folder_format.is_listed:
      raise ValueError(
        f"'{args.folder}' stores '{split}' in {folder_format.title}, {unlisted}"
      )
  has_broken = False
  splits = args.splits or layout.splits(args.folder)
  for split in splits or folder.splits(args.folder):
    start_time = time.perf_counter()
    path, count, broken = indexing.make(
      args.folder,
      split,
      args.check == 'decode',
      args.max_image_pixels,
      args.statistics,
    )
    seconds = time.perf_counter() - start_time
    images = console.pluralize(count, 'image')
    console.log(f'{path}: {images}, {console.duration(seconds)}.')
    if args.statistics and count:
      statistics = pixel_statistics.read(pixel_statistics.place(args.folder, split))
      channels = len(statistics.mean)
      console.log(
        f'  {console.pluralize(channels, "channel")} (--config.pp.channels={channels}), '
        f'range {_rounded(statistics.lowest)} to {_rounded(statistics.highest)}, mean '
        f'{_rounded(statistics.mean)}, deviation {_rounded(statistics.std)}'
      )
    for line in broken[:_SHOWN]:
      console.log(f'  broken: {line}')
    if broken:
      has_broken = True
      console.log(
        f'Broken images: {len(broken):,}. Repair, restore or delete them, or leave '
        'them out of the training with --config.broken_images=skip.'
      )
  return int(has_broken)


def _rounded(values: Sequence[float]) -> str:
  return f'({", ".join(f"{value:.6g}" for value in values)})'
