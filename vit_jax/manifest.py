r"""Lists the images of a folder and decodes each once, ahead of any training.

  python -m vit_jax.manifest /data/photos

reads /data/photos/train, test and so on, and writes its results beside these
folders: /data/photos/train.index.npz, test.index.npz (train.coco.index.npz for
images with annotations in COCO's format). A training on /data/photos uses these lists instead of listing the folders itself, as long as
the lists are up to date:

- On this machine's disks, the list is made again when images are added, removed
  or renamed. Files of unchanged size and modification time are not decoded
  again.
- In a bucket (gs://), detecting a change would require listing the whole
  folder. The list is used as it is, and its date is shown. Run this command
  again after a change.

The command needs no accelerator, uses all cores, and shows its progress. To
list millions of images in seconds, checking only the first and last bytes of
each:

  python -m vit_jax.manifest /data/photos --check=form

Then train with --config.broken_images=trust, which checks no further. An image
that is broken elsewhere stops the training when it is read; the error names it.

The exit status is 1 if images are broken. They are named and recorded in the
list; --config.broken_images=skip leaves them out.
"""

import argparse
import time

from vit_jax import cli

# Values of --check.
_CHECKS = {
  'none': 'list names only',
  'form': 'check the first and last bytes of every file',
  'decode': 'decode every image, a JPEG at 1/8 of its size',
}
_SHOWN = 10


def make(
  root: str, split: str, check: str = 'decode', max_pixels: int | None = None
) -> tuple[str, int, list[str]]:
  """Makes the index of a split, beside its images.

  Args:
    root: the folder, local or gs://.
    split: name of a folder in `root`, or of a manifest (train for train.jsonl);
      '.' for `root` itself.
    check: 'none', 'form' or 'decode', see the top of this module.
    max_pixels: images with more pixels count as broken; None: the config's
      default.

  Returns:
    (path of the index, number of images, broken images with their reasons).

  Raises:
    FileNotFoundError: if there is no such split.
    OSError: if a folder or a file cannot be read, or the index cannot be
      written.
  """
  from vit_jax.annotations import layout
  from vit_jax.annotations import source
  from vit_jax.configs import common
  from vit_jax.data import checking
  from vit_jax.data import manifest
  from vit_jax.files import images
  from vit_jax.files import index as index_lib
  from vit_jax.files import paths as paths_lib
  from vit_jax.files import reading

  limit = max_pixels or common.get_config().max_image_pixels
  why = images.why_broken
  if manifest.exists(root, split):
    index = manifest.open_index(root, split, manifest.image_paths(root, split))
  elif layout.exists(root, split):
    index, why = source.open_index(root, split)
  else:
    index = checking.renew_index(root, split)
  levels = {
    'form': (index_lib.FORM, lambda path, _: reading.why_malformed(path)),
    'decode': (index_lib.DECODED, why),
  }
  index.look_again(index.order)
  path = index_lib.place(None, index.root, index.base)
  _save(index, path)  # An error comes before hours of checking.
  if check in levels:
    index.check(index.order, *levels[check], limit)
    _save(index, path)
  paths = paths_lib.Paths([(index, index.order)])
  broken = [f'{paths[i]}: {paths.reason(i)}' for i in paths.broken()]
  return path, len(index), broken


def _save(index, path):
  try:
    index.save(path)
  except OSError as e:
    raise OSError(
      f"the list '{path}' cannot be written: {e.strerror or e}; make its folder "
      'writable, or train without this command: a run keeps its lists in its '
      'workdir'
    ) from e


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of this command."""
  parser = cli.parser('vit_jax.manifest', __doc__)
  parser.add_argument('folder', help='folder of the data set, local or gs://')
  parser.add_argument(
    'splits',
    nargs='*',
    help='splits in the folder (by default all with annotations, or else all '
    "folders and .jsonl files); '.' for the folder itself, with a folder per "
    'class',
  )
  parser.add_argument(
    '--check',
    choices=_CHECKS,
    default='decode',
    help='; '.join(f'{k}: {v}' for k, v in _CHECKS.items()) + ' (decode)',
  )
  parser.add_argument(
    '--max_image_pixels',
    type=int,
    help='images with more pixels count as broken (config.max_image_pixels)',
  )
  return parser


def main() -> int:
  """Lists and checks the splits of the folder; returns the exit status."""
  args = make_parser().parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  cli.load_tensorflow()
  from vit_jax.annotations import layout
  from vit_jax.data import folder

  found = False
  splits = args.splits or layout.splits(args.folder)
  for split in splits or folder.splits(args.folder):
    began = time.perf_counter()
    path, count, broken = make(
      args.folder, split, args.check, args.max_image_pixels
    )
    seconds = time.perf_counter() - began
    cli.say(f'{path}: {count:,} images, {cli.duration(seconds)}.')
    for line in broken[:_SHOWN]:
      cli.say(f'  broken: {line}')
    if broken:
      found = True
      cli.say(
        f'Broken images: {len(broken):,}. Repair, restore or delete them, or leave them out '
        'of the training with --config.broken_images=skip.'
      )
  return int(found)


if __name__ == '__main__':
  cli.run(main)
