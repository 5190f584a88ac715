r"""Prints the predictions of a trained model for images, such as their classes.

  vit_jax predict --workdir=/tmp/digits image.png other.jpg
  vit_jax predict --weights=model.safetensors image.png
  vit_jax predict --workdir=/tmp/digits folder 'gs://bucket/*.jpg'

Any number of images becomes a table with a row an image (.parquet, .csv, .jsonl);
the same command resumes a table that was stopped or killed:

  vit_jax predict --workdir=/tmp/digits --out=table.parquet folder
  vit_jax predict --workdir=/tmp/digits --out=table.csv list.txt
  vit_jax predict --workdir=/tmp/digits --out=table.parquet --embeddings cifar10:test

A model of pixels (configs/igpt.py) draws images, and completes their lower part:

  vit_jax predict --workdir=/tmp/igpt --sample=16 --out=samples.png
  vit_jax predict --workdir=/tmp/igpt --complete half.png --out=whole.png

Image and text towers choose among any classes or texts, and embed both:

  vit_jax predict --weights=LiT-B16B.npz --classes='a cat;a dog' photo.jpg
  vit_jax predict --weights=LiT-B16B.npz --embeddings --out=images.parquet folder
  vit_jax predict --weights=LiT-B16B.npz --embeddings --out=texts.parquet \
    --texts=texts.txt

A detector prints class, score and box (left, top, right, bottom edge in pixels)
of each object, and draws them:

  vit_jax predict --workdir=/tmp/detr street.jpg --out=boxes.png

The task of the run decides what is predicted: see the class Predictor in the
file of the task, such as vit_jax/tasks/classify.py.
"""

import argparse
from collections.abc import Sequence

from vit_jax.commands import flags, hosts

# Greatest number of images of --sample.
_MOST_SAMPLES = 4096
TABLES = ('.parquet', '.csv', '.jsonl')


def make_parser() -> flags.Parser:
  parser = flags.Parser('predict', __doc__)
  parser.add_argument(
    'images',
    nargs='*',
    help='image files of any size, folders with such files, patterns such as '
    "'photos/*.jpg', lists of paths (.txt, a path a line; .jsonl, each line "
    'with an "image"), or a split of a data set, NAME:SPLIT, for a table',
  )
  flags.add_model_flags(parser)
  parser.add_argument(
    '--top', type=int, default=5, help='number of classes to print (5)'
  )
  parser.add_argument(
    '--out',
    help='table to write, .parquet, .csv or .jsonl; or PNG to write: required '
    'for tasks whose result is a picture, optional for detectors, which draw '
    'boxes on the images',
  )
  parser.add_argument(
    '--embeddings',
    metavar='LAYER',
    help='tables: a column of features of a layer, such as --embeddings=layer_3; '
    '--embeddings alone: the inputs of the head',
  )
  parser.add_argument(
    '--broken',
    choices=('row', 'stop'),
    default='row',
    help='tables: whether a broken image is a row with an error, or stops the '
    'work (row)',
  )
  parser.add_argument(
    '--threshold',
    type=float,
    help='detectors: least score of an object, from 0 to 1 (0.7)',
  )
  parser.add_argument(
    '--image_size',
    type=flags.pixels,
    metavar='SIDE or HEIGHT,WIDTH',
    help='detectors: pixels of the shorter side, or height and width, of the '
    'images that the network sees (as in the evaluation of the run)',
  )
  parser.add_argument(
    '--dtype',
    choices=('bfloat16', 'float16'),
    help='keeps the parameters in this type, in half of the memory',
  )
  _add_flags_of_some_models(parser)
  hosts.add_flags(parser)
  return parser


def _add_flags_of_some_models(parser):
  group = parser.add_argument_group('image and text towers (LiT, CLIP, SigLIP)')
  group.add_argument(
    '--classes',
    metavar='A;B;C',
    help="names of classes to choose from, as in --classes='a cat;a dog', or a "
    'file with one in each line; they become sentences by the templates of the run',
  )
  group.add_argument(
    '--texts',
    metavar='FILE',
    help='file with a text in each line, to choose from as they are',
  )
  group = parser.add_argument_group('models of pixels')
  group.add_argument('--sample', type=int, help='number of images to draw')
  group.add_argument(
    '--complete', nargs='+', help='image files whose lower part to draw'
  )
  group.add_argument(
    '--rows',
    type=int,
    help="rows to keep of the model's image (all rows of an image that is low "
    'for its width, half of the rows of any other)',
  )
  group.add_argument('--seed', type=int, help='seed of drawing (0)')
  group.add_argument(
    '--temperature',
    type=float,
    help='below 1: more likely colours (1)',
  )
  group.add_argument(
    '--top_k', type=int, help='draw among so many likely colours (all)'
  )


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses and checks the flags; raises ValueError for wrong ones.

  A command line must name one thing to do.
  """
  alone = '--embeddings'  # Without a layer; the next word may be a file.
  argv = [f'{alone}=features' if word == alone else word for word in argv]
  args = make_parser().parse_args(argv)
  alone = args.texts and args.embeddings and not args.images
  given = {
    'images': bool(args.images) or bool(alone),
    '--sample': args.sample is not None,
    '--complete': bool(args.complete),
  }
  if sum(given.values()) != 1:
    raise ValueError(
      'give one of image files, --sample=NUMBER and --complete FILE, not '
      + (' and '.join(k for k, v in given.items() if v) or 'none of them')
    )
  if args.top < 1:
    raise ValueError(f'--top={args.top} must be 1 or more')
  if args.sample is not None and not 1 <= args.sample <= _MOST_SAMPLES:
    raise ValueError(
      f'--sample={args.sample} must be from 1 to {_MOST_SAMPLES:,}, which are drawn '
      'into one picture'
    )
  if args.rows is not None and not args.complete:
    raise ValueError(f'--rows={args.rows} is a part of --complete FILE: give that too')
  return args


def main(argv: Sequence[str]) -> int:
  args = parse(argv)
  flags.check_output('out', args.out)

  def work():
    from vit_jax import predict

    predict.run(args)

  # Only a table is the work of several hosts.
  args.distributed &= str(args.out or '').endswith(TABLES)
  return hosts.run(args, work)
