r"""Print, draw or tabulate predictions for images.

  vit_jax predict --workdir=/tmp/digits image.png
  vit_jax predict --weights=hf://google/vit-base-patch16-224 photo.jpg
  vit_jax predict --workdir=/tmp/digits --out=table.parquet folder

Prints the top classes of each image; detectors print class, score and box (left, top,
right, bottom edge in pixels). With --out=FILE.parquet, .csv or .jsonl, or --out=FOLDER/
of Parquet files, any number of images becomes a table with one row per image; run the
same command again to resume it. Independent tasks write to one folder with
--shard=0/50, ..., --shard=49/50.
See docs/runs.md, docs/detection.md, docs/segmentation.md, docs/image_text.md and
docs/pixels.md.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import os
import re
import shlex
from typing import TYPE_CHECKING, Any

from absl import logging

from vit_jax import console
from vit_jax.commands import flags, hosts
from vit_jax.tasks import predict_flags

if TYPE_CHECKING:
  import ml_collections

  from vit_jax.inference import predictor as predictor_lib

TABLES = ('.parquet', '.csv', '.jsonl', '/')


def _shard(text: str) -> tuple[int, int]:
  """Parses I/N, the number of a shard from 0 and the number of shards."""
  match = re.fullmatch('([0-9]+)/([0-9]+)', text)
  shard, count = map(int, match.groups()) if match else (0, 0)
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
  '--out': dict(
    help='table to write (.parquet, .csv, .jsonl or FOLDER/), or PNG: required by models that '
    'draw images, optional for detectors and segmenters, which draw boxes or classes'
  ),
  '--embeddings': dict(
    metavar='LAYER',
    help='tables: add a column with the features of a layer, such as layer_3, or of all '
    'patches (in .parquet); without LAYER: the inputs of the head',
  ),
  '--broken': dict(
    choices=('row', 'stop'),
    help='tables: what a broken image does: add a row with an error, or stop (row)',
  ),
  '--dtype': dict(
    choices=('bfloat16', 'float16', 'int8'),
    help='keep the parameters in half, or their kernels in a quarter, of the memory',
  ),
  '--image_size': dict(
    type=flags.pixels,
    metavar='SIDE or HEIGHT,WIDTH',
    help="size of the model's input in pixels, for --weights and for detectors, whose "
    'SIDE is the shorter one (as the weights say, or as in the evaluation of the run)',
  ),
  '--option': dict(
    action='append',
    metavar='NAME=VALUE',
    help='override an option of the task, such as window=518; may be repeated',
  ),
}
_SHARDS: dict[str, dict[str, Any]] = {
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


def make_parser(tasks: Mapping[str, Any] | None = None) -> flags.Parser:
  """Returns the parser with the flags of tasks, by default of this package's."""
  parser = flags.Parser('predict', __doc__, _FLAGS)
  flags.add_model_flags(parser)
  flags.add_image_flags(parser)
  parser.add(_OUTPUT)
  shards = parser.add_argument_group('a folder of tables by independent tasks')
  exclusive = shards.add_mutually_exclusive_group()
  for flag, arguments_of_flag in _SHARDS.items():
    exclusive.add_argument(flag, **arguments_of_flag)
  hosts.add_flags(parser)
  names_by_flag: dict[str, list[str]] = {}
  arguments: dict[str, Mapping[str, Any]] = {}
  for name, task in (tasks or _tasks()).items():
    for flag, arguments_of_flag in task.FLAGS.items():
      names_by_flag.setdefault(flag, []).append(name)
      arguments.setdefault(flag, arguments_of_flag)
  for flag, names in names_by_flag.items():
    parser.add({flag: arguments[flag]}, f'task {", ".join(names)}')
  return parser


def _tasks(modules: Sequence[str] = ()) -> dict[str, Any]:
  """Returns FLAGS and IMAGELESS of this package's tasks, and the tasks in modules."""
  tasks: dict[str, Any] = dict(predict_flags.BY_TASK)
  for module in modules:
    from vit_jax.run import config as run_config  # Late: it imports JAX.

    with contextlib.suppress(ValueError):  # A module of an evaluator has no task.
      tasks[module] = run_config.get_task(module)
  return tasks


def _named_modules(argv: Sequence[str]) -> list[str]:
  """Returns the values of --task."""
  modules = []
  for i, word in enumerate(argv):
    if word.startswith('--task='):
      modules.append(word.removeprefix('--task='))
    elif word == '--task':
      modules += argv[i + 1 : i + 2]
  return modules


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses and checks the flags.

  Those of tasks that are set are in `options`, by name without dashes.
  """
  bare = '--embeddings'  # Without a layer; the next word may be a file.
  argv = [f'{bare}=features' if word == bare else word for word in argv]
  tasks = _tasks(_named_modules(argv))
  args = make_parser(tasks).parse_args(argv)
  args.options = {}
  imageless: set[str] = set()
  for task in tasks.values():
    for flag in task.FLAGS:
      name = flag.removeprefix('--')
      if getattr(args, name) is not None:
        args.options[name] = getattr(args, name)
    imageless.update(task.IMAGELESS)
  _check_images(args, imageless)
  _check_tables(args)
  return args


def _check_images(args: argparse.Namespace, imageless: Collection[str]) -> None:
  """Raises ValueError if there is nothing to predict from."""
  if not args.images and args.options.keys().isdisjoint(imageless):
    alternatives = ', '.join(f'--{name}' for name in sorted(imageless))
    raise ValueError(f'pass image files, or one of {alternatives} (see --help)')


def _check_tables(args: argparse.Namespace) -> None:
  """Raises ValueError for flags of tables without one, or of shards with others."""
  shards = [f'--{name}' for name in ('shard', 'print') if getattr(args, name)]
  if shards and not (args.images and str(args.out or '').endswith('/')):
    raise ValueError(
      f'{shards[0]} is for a folder with a table of images, not out={args.out}: pass '
      'images and --out=FOLDER/'
    )
  is_table = str(args.out or '').endswith(TABLES)
  for name, is_used in (('embeddings', is_table), ('broken', _is_table(args))):
    if getattr(args, name) and not is_used:
      raise ValueError(
        f'--{name} is for a table of images: pass images and --out=table.parquet (.csv, '
        '.jsonl) or --out=FOLDER/'
      )
  if shards and args.coordinator:
    raise ValueError(f'{shards[0]} is for independent tasks: leave out --coordinator')


def _is_table(args: argparse.Namespace) -> bool:
  """Returns whether a table of images is to be written."""
  return str(args.out or '').endswith(TABLES) and bool(args.images)


def _command(argv: Sequence[str]) -> list[str]:
  """Returns the arguments of a command line without --print."""
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument('--print')
  return ['vit_jax', 'predict', *parser.parse_known_args(argv)[1]]


def main(argv: Sequence[str]) -> int:
  """Prints or writes predictions; returns the exit status."""
  args = parse(argv)
  flags.check_output('out', args.out, is_folder=str(args.out or '').endswith('/'))
  if args.print:
    for shard in range(args.print):
      console.log(shlex.join([*_command(argv), f'--shard={shard}/{args.print}']))
    return 0
  # Several hosts share a table of images, but neither a shard nor other outputs.
  args.distributed &= _is_table(args) and not args.shard
  return hosts.run(args, functools.partial(run, args))


def run(args: argparse.Namespace) -> None:
  """Prints or writes what the flags ask for."""
  import jax

  from vit_jax.data.images import listing
  from vit_jax.inference import tables

  is_table = tables.is_table(args.out)
  if is_table:
    tables.check(args.out, resumes=bool(args.images))
  elif jax.process_count() > 1:
    raise ValueError(
      'several processes need a table: pass --out=table.parquet (.csv, .jsonl) or '
      '--out=FOLDER/'
    )
  split = _split(args.images)
  if not split:
    inputs = args.images
    args.images = listing.expand(inputs)
    _check_not_an_input(args.out, (*inputs, *args.images))
  elif not is_table:
    raise ValueError(
      f"'{args.images[0]}' is a split of a data set, whose predictions are "
      'written as a table: pass --out=table.parquet (.csv, .jsonl) or --out=FOLDER/'
    )
  model = _load(args)
  if args.option:
    from vit_jax.evaluators import evaluation

    model = model.with_options(evaluation.parse_options(args.option))
  _check_flags(model, args, is_table)
  options = model.parse_flags(args.options)
  if args.image_size is not None and model.task.CANVASES:
    options['image_size'] = args.image_size
  if is_table and args.images:
    _write_table(model, args, options, split)
  else:
    _print(model, args.images, out=args.out, **options)


def _check_not_an_input(out: str | None, inputs: Sequence[str]) -> None:
  """Raises ValueError if the file to write is one of the images or lists."""
  if not out or out.endswith('/'):
    return
  target = os.path.realpath(out)
  if any(os.path.realpath(path) == target for path in inputs):
    raise ValueError(
      f"out='{out}' is also an input, which it would replace: pass another path (--out)"
    )


def _load(args: argparse.Namespace) -> 'predictor_lib.Predictor':
  """Loads the model, for images of --image_size unless it takes images of any size."""
  load = functools.partial(
    flags.load_model, args, dtype=args.dtype, max_image_pixels=args.max_image_pixels
  )
  size = args.image_size
  if size is None or args.workdir:
    model = load()
    if size is not None and not model.task.CANVASES:
      raise ValueError(
        f"image_size={size} is for detectors and for --weights, and the run in '"
        f"{args.workdir}' has learned images of {model.config.pp.crop} pixels: leave it "
        'out (--image_size)'
      )
    return model
  model = load(image_size=(size, size) if isinstance(size, int) else size)
  return load() if model.task.CANVASES else model


def _check_flags(
  model: 'predictor_lib.Predictor', args: argparse.Namespace, is_table: bool
) -> None:
  """Raises ValueError if flags do not fit the task of a model."""
  task = model.task
  name_of_task = f"the task '{model.config.task}'"
  for name in args.options:
    if f'--{name}' not in task.FLAGS:
      raise ValueError(f'{name_of_task} has no --{name}: leave it out')
    needs = task.NEEDS.get(name, ())
    has_images = 'images' in needs and args.images
    if needs and not (has_images or args.options.keys() & {*needs}):
      texts = ['images' if x == 'images' else f'--{x}' for x in needs]
      raise ValueError(
        f'--{name} needs {" or ".join(texts)}: add it, or leave out --{name}'
      )
  is_imageless = any(name in task.IMAGELESS for name in args.options)
  if not args.images and not is_imageless:
    raise ValueError(f'{name_of_task} predicts from images: pass image files')
  if is_table:
    return
  if args.out and not (task.DRAWS or is_imageless):
    raise ValueError(
      f'{name_of_task} prints its predictions and writes no picture: leave out --out, or '
      'write a table (--out=table.parquet, .csv or .jsonl)'
    )
  if not args.out and not task.PRINTS:
    raise ValueError(
      f'{name_of_task} writes its predictions as a picture: pass --out=FILE.png'
    )


def _print(
  model: 'predictor_lib.Predictor',
  images: Sequence[str],
  **options: Any,
) -> None:
  """Prints predictions; skips broken images, and raises an error at the end."""
  printed = 0
  try:
    lines = model.report(images, **options)
    if options['out']:  # A picture shows all images.
      lines = list(lines)
    for line in lines:
      console.log(line)
      printed += 1
    return
  except (ValueError, OSError):
    faults, readable = _check_readable(images[printed:], model.config)
    if not faults or len(images) == 1:
      raise
  for fault in faults:
    logging.warning('Skipped: %s', fault)
  if readable:
    for line in model.report(readable, **options):
      console.log(line)
  raise ValueError(
    f'{len(faults):,} of {len(images):,} images cannot be read, such as {faults[0]}: fix '
    'or delete the files named above'
  )


def _check_readable(
  images: Sequence[str], config: 'ml_collections.ConfigDict'
) -> tuple[list[str], list[str]]:
  """Returns why images cannot be read, and the images that can be read."""
  from vit_jax.inference import tables, user_images

  source = user_images.for_model(images, config)
  with futures.ThreadPoolExecutor() as pool:
    check = functools.partial(tables.fault, source)
    faults = list(pool.map(check, range(source.num_examples)))
  readable = [image for image, fault in zip(images, faults) if not fault]
  return [fault for fault in faults if fault], readable


def _split(images: Sequence[str]) -> list[str]:
  """Returns name and split of a data set named as NAME:SPLIT; [] of files."""
  from vit_jax.data.lazy import tf

  if len(images) != 1:
    return []
  name, colon, split = images[0].partition(':')
  if not colon or split.startswith('//') or tf.io.gfile.exists(images[0]):
    return []
  return [name, split]


def _write_table(
  model: 'predictor_lib.Predictor',
  args: argparse.Namespace,
  options: Mapping[str, Any],
  split: Sequence[str],
) -> None:
  """Writes the table that the flags ask for."""
  from vit_jax.data import sources
  from vit_jax.inference import tables, user_images

  if split:
    dataset, name = split
    source = sources.open_split(model.config, name, ('image',), dataset=dataset)
  else:
    source = user_images.for_model(args.images, model.config)
  options = {'embeddings': args.embeddings, **options}
  columns = model.columns(**options)
  if args.option:
    options['option'] = args.option
  tables.write(
    model,
    source,
    args.out,
    columns,
    {'flags': options, 'split': split},
    args.broken or 'row',
    args.shard,
  )
