"""Converts a prepared TFDS data set (tfrecord for example) to array_record.

  vit_jax convert-data imagenet2012 --data_dir=/data/tfds

Training reads tfrecord files just as well: this is for files of other formats
and for compressed ones. The new files are written beside the old ones, take the
same space again, and are used from then on. After an interruption the same
command continues.
"""

from collections.abc import Sequence

from vit_jax import cli
from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  """Returns the parser of this command."""
  parser = flags.Parser('convert-data', __doc__)
  parser.add_argument('name', metavar='NAME', help='TFDS name of the data set')
  parser.add_argument(
    '--data_dir', help='folder of TFDS data sets (~/tensorflow_datasets)'
  )
  return parser


def main(argv: Sequence[str]) -> int:
  """Converts the data set that the command line names."""
  args = make_parser().parse_args(argv)
  cli.load_tensorflow()
  from vit_jax.data.tfds import convert

  folder = convert.convert(args.name, args.data_dir)
  print(f'{args.name}: array_record files are in {folder}')
  return 0
