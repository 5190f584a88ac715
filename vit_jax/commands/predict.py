r"""Print, draw or tabulate predictions for images.

  vit_jax predict --workdir=/tmp/digits image.png
  vit_jax predict --weights=hf://google/vit-base-patch16-224 photo.jpg
  vit_jax predict --workdir=/tmp/digits --out=table.parquet folder

Prints the top classes of each image; detectors print class, score and box (left, top,
right, bottom edge in pixels). With --out=FILE.parquet, .csv or .jsonl, or --out=FOLDER/
of Parquet files, any number of images becomes a table with one row per image; run the
same command again to resume it. Independent tasks write to one folder with
--shard=0/50, ..., --shard=49/50.
See docs/runs.md, docs/detection.md, docs/image_text.md and docs/pixels.md.
"""

import argparse
from collections.abc import Sequence
import re
import shlex

from vit_jax import console
from vit_jax.commands import flags, hosts

_MOST_SAMPLES = 4096  # Largest --sample.
TABLES = ('.parquet', '.csv', '.jsonl', '/')


def _shard(text: str) -> tuple[int, int]:
  """Parses I/N, the number of a shard from 0 and the number of shards."""
  match = re.fullmatch('([0-9]+)/([0-9]+)', text)
  shard, count = (int(match[1]), int(match[2])) if match else (0, 0)
  if shard >= count:
    raise argparse.ArgumentTypeError(
      f"'{text}' must be I/N with I from 0 to N - 1, such as 0/50 to 49/50"
    )
  return shard, count


_FLAGS = {
  'images': dict(
    nargs='*',
    help="image files of any size, folders, patterns such as 'photos/*.jpg', lists of "
    'paths (.txt, one per line; .jsonl, with an "image" in each line), or, for a table, '
    'a split NAME:SPLIT of a data set',
  ),
}
_OUTPUT = {
  '--top': dict(type=int, default=5, help='number of classes to print (5)'),
  '--out': dict(
    help='table to write (.parquet, .csv, .jsonl or FOLDER/), or PNG: required by models that '
    'draw images, optional for detectors, which draw boxes'
  ),
  '--embeddings': dict(
    metavar='LAYER',
    help='tables: add a column with the features of a layer, such as layer_3, or of all '
    'patches (in .parquet); without LAYER: the inputs of the head',
  ),
  '--broken': dict(
    choices=('row', 'stop'),
    default='row',
    help='tables: what a broken image does: add a row with an error, or stop (row)',
  ),
  '--dtype': dict(
    choices=('bfloat16', 'float16', 'int8'),
    help='keep the parameters in half, or their kernels in a quarter, of the memory',
  ),
}
_TASKS = {
  '--shard': dict(
    type=_shard,
    metavar='I/N',
    help='compute share I of N, from 0/N to N-1/N, of one --out=FOLDER/ that all tasks '
    'see',
  ),
  '--print': dict(
    type=flags.count,
    metavar='N',
    help='print the commands of N tasks, one per line, for a scheduler; compute nothing',
  ),
}
_DETECTORS = {
  '--threshold': dict(type=float, help='lowest score of an object, 0 to 1 (0.7)'),
  '--image_size': dict(
    type=flags.pixels,
    metavar='SIDE or HEIGHT,WIDTH',
    help="shorter side, or height and width, of the model's input in pixels (as in the "
    "run's evaluation)",
  ),
}
_TOWERS = {
  '--classes': dict(
    metavar='A;B;C',
    help="class names to choose from, as in --classes='a cat;a dog', or a file with one "
    "per line; the run's templates turn them into sentences",
  ),
  '--texts': dict(
    metavar='FILE', help='file with one text per line, to choose from or to embed'
  ),
}
_PIXELS = {
  '--sample': dict(type=int, help='number of images to draw'),
  '--complete': dict(nargs='+', help='image files whose lower part is drawn'),
  '--rows': dict(
    type=int, help='rows of the image to keep (half; all if it is wider than tall)'
  ),
  '--seed': dict(type=int, help='random seed (0)'),
  '--temperature': dict(type=float, help='below 1: more likely colours (1)'),
  '--top_k': dict(type=int, help='sample from the k most likely colours (all)'),
}


def make_parser() -> flags.Parser:
  parser = flags.Parser('predict', __doc__, _FLAGS)
  flags.add_model_flags(parser)
  flags.add_image_flags(parser)
  parser.add(_OUTPUT)
  parser.add(_TASKS, 'a folder of tables by independent tasks')
  parser.add(_DETECTORS, 'detectors')
  parser.add(_TOWERS, 'image and text towers (LiT, CLIP, SigLIP)')
  parser.add(_PIXELS, 'models of pixels')
  hosts.add_flags(parser)
  return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses and checks the flags: a command line must name one thing to do."""
  bare = '--embeddings'  # Without a layer; the next word may be a file.
  argv = [f'{bare}=features' if word == bare else word for word in argv]
  args = make_parser().parse_args(argv)
  only_texts = args.texts and args.embeddings and not args.images
  sources = {
    'images': bool(args.images or only_texts),
    '--sample': args.sample is not None,
    '--complete': bool(args.complete),
  }
  if sum(sources.values()) != 1:
    passed = ' and '.join(name for name, is_set in sources.items() if is_set)
    raise ValueError(
      'pass image files, --sample=NUMBER or --complete FILE, not '
      f'{passed or "none of them"} (see --help)'
    )
  if args.top < 1:
    raise ValueError(f'top={args.top} must be at least 1 (--top)')
  if args.sample is not None and not 1 <= args.sample <= _MOST_SAMPLES:
    raise ValueError(
      f'sample={args.sample} must be from 1 to {_MOST_SAMPLES:,}, which fit into one '
      'picture (--sample)'
    )
  if args.rows is not None and not args.complete:
    raise ValueError(f'--rows={args.rows} needs --complete FILE: add it')
  tasks = [f'--{name}' for name in ('shard', 'print') if getattr(args, name)]
  if len(tasks) > 1:
    raise ValueError(
      f'{" and ".join(tasks)} are mutually exclusive: leave out all but one'
    )
  if tasks and not (args.images and str(args.out or '').endswith('/')):
    raise ValueError(
      f'{tasks[0]} is for a folder with a table of images, not out={args.out}: pass '
      'images and --out=FOLDER/'
    )
  if tasks and args.coordinator:
    raise ValueError(f'{tasks[0]} is for independent tasks: leave out --coordinator')
  return args


def _command(argv: Sequence[str]) -> list[str]:
  """Returns the arguments of a command line without --print."""
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument('--print')
  return ['vit_jax', 'predict', *parser.parse_known_args(argv)[1]]


def main(argv: Sequence[str]) -> int:
  args = parse(argv)
  flags.check_output('out', args.out, is_folder=str(args.out or '').endswith('/'))
  if args.print:
    for shard in range(args.print):
      console.log(shlex.join([*_command(argv), f'--shard={shard}/{args.print}']))
    return 0

  def work() -> None:
    from vit_jax import predict

    predict.run(args)

  # Several hosts share a table, but neither a shard nor other outputs.
  args.distributed &= str(args.out or '').endswith(TABLES)
  args.distributed &= not args.shard
  return hosts.run(args, work)
