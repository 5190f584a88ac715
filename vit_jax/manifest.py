r"""Lists the images of a folder and decodes each, once, ahead of any training.

  python -m vit_jax.manifest /data/photos

goes through /data/photos/train, test and so on, and writes what it finds beside
them: /data/photos/train.index.npz, test.index.npz. A training on that folder takes
these lists in place of looking for itself, as long as they are true:

- Of a folder of this machine, when images are added, removed or renamed, the list
  is made anew; files whose size and time of change are as they were are not
  decoded again.
- Of a folder in a bucket (gs://) nobody can see that without listing all of it: the
  list is taken as it is, with its date. Run this command again after a change.

It needs no accelerator, uses all cores, and says how far it is. To list millions of
images in seconds, and look at the first and the last bytes of each alone:

  python -m vit_jax.manifest /data/photos --check=form

and train with --config.broken_images=trust, which looks no further. An image that
is broken between its ends then stops the training when its turn comes, by name.

The exit status is 1 if images are broken. They are named, and remembered:
--config.broken_images=skip leaves them out.
"""

import argparse
import time

from vit_jax import cli

# --check: what is looked at.
_CHECKS = {
  'none': 'names alone',
  'form': 'the first and last bytes of every file',
  'decode': 'every image is decoded, a JPEG at 1/8 of its size',
}
_SHOWN = 10


def make(
  root: str, split: str, check: str = 'decode', max_pixels: int | None = None
) -> tuple[str, int, list[str]]:
  """Makes the index of a split, beside its images.

  Args:
    root: the folder, local or gs://.
    split: name of a folder in it, or of a manifest (train for train.jsonl); '.' is
      the folder itself.
    check: 'none', 'form' or 'decode', see above.
    max_pixels: images of more are broken; None: the default of the config.

  Returns:
    Where it is, the number of images, and the broken ones with the reasons.

  Raises:
    FileNotFoundError: if there is no such split.
    OSError: if a folder or a file cannot be read, or the index not be written.
  """
  from vit_jax.configs import common
  from vit_jax.data import checking
  from vit_jax.data import images
  from vit_jax.data import manifest
  from vit_jax.files import index as index_lib
  from vit_jax.files import paths as paths_lib
  from vit_jax.files import reading

  limit = max_pixels or common.get_config().max_image_pixels
  if manifest.exists(root, split):
    index = manifest.open_index(root, split, manifest.image_paths(root, split))
  else:
    index = checking.renew_index(root, split)
  levels = {
    'form': (index_lib.FORM, lambda path, _: reading.why_malformed(path)),
    'decode': (index_lib.DECODED, images.why_broken),
  }
  index.look_again(index.order)
  if check in levels:
    index.check(index.order, *levels[check], limit)
  path = index_lib.place(None, index.root, index.base)
  index.save(path)
  paths = paths_lib.Paths([(index, index.order)])
  broken = [f'{paths[i]}: {paths.reason(i)}' for i in paths.broken()]
  return path, len(index), broken


def main() -> int:
  """Makes the indices that the command line asks for; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m vit_jax.manifest',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('folder', help='the folder of the data set, also gs://')
  parser.add_argument(
    'splits',
    nargs='*',
    help="folders in it (by default all, and those of its .jsonl); '.' is the "
    'folder itself, with classes in it',
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
    help='images of more pixels are broken, as config.max_image_pixels says',
  )
  args = parser.parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  cli.load_tensorflow()
  from vit_jax.data import folder

  found = False
  for split in args.splits or folder.splits(args.folder):
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
        f'Broken images: {len(broken):,}. Mend or delete them, or train with '
        '--config.broken_images=skip, which leaves them out.'
      )
  return int(found)


if __name__ == '__main__':
  cli.run(main)
