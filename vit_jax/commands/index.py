r"""Lists the images of a folder and decodes each once, ahead of any training.

  vit_jax index /data/photos

reads /data/photos/train, test and so on, and writes its results beside these
folders: /data/photos/train.index.npz, test.index.npz (train.coco.index.npz for
images with annotations in COCO's format). A training on /data/photos uses these
lists instead of listing the folders itself, as long as the lists are up to date:

- On this machine's disks, the list is made again when images are added, removed
  or renamed. Files of unchanged size and modification time are not decoded
  again.
- In a bucket (gs://), detecting a change would require listing the whole
  folder. The list is used as it is, and its date is shown. Run this command
  again after a change.

The command needs no accelerator, uses all cores, shows its progress and saves it
about every minute; when stopped, run it again to resume. To list millions of
images in seconds without decoding them:

  vit_jax index /data/photos --check=none

Then train with --config.broken_images=trust, which does not check either. A
broken image stops the training when it is read; the error names it.

The exit status is 1 if images are broken. They are named and recorded in the
list; --config.broken_images=skip leaves them out.
"""

from collections.abc import Sequence

from vit_jax import console
from vit_jax.commands import flags

# Values of --check.
_CHECKS = {
  'none': 'list names only',
  'decode': 'decode every image, a JPEG at 1/8 of its size',
}


def make_parser() -> flags.Parser:
  parser = flags.Parser('index', __doc__)
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
    type=flags.count,
    help='images with more pixels count as broken (config.max_image_pixels)',
  )
  return parser


def main(argv: Sequence[str]) -> int:
  """Lists and checks the splits of a folder; 1 if there are broken images."""
  args = make_parser().parse_args(argv)
  console.load_tensorflow()
  from vit_jax.data import indexing

  return indexing.run(args)
