r"""Train or fine-tune a model, or run a study.

  vit_jax train --config=configs/digits.py --workdir=/tmp/digits
  vit_jax train --config=configs/pretrain.py:ti16,/data/pets --workdir=/tmp/pets
  vit_jax train --config=configs/vit.py:b16,cifar10 \
    --config.pretrained=ViT-B_16.npz --workdir=/tmp/cifar10

Set any key of the config with --config.KEY=VALUE, such as --config.base_lr=0.01 or
--config.task_options.mixup=0.2; docs/config.md lists them. To resume a stopped run, run
the same command again. To use several hosts, run it on each: TPU pods and SLURM jobs
connect by themselves.

`python -m vit_jax.main` is the original's name for this command. --evaluate is
`vit_jax evaluate`.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib

from vit_jax import console
from vit_jax.commands import evaluate, flags, hosts, run_flags

# config.trainer -> 'module:function' of (config, workdir).
TRAINERS = {
  'train': 'vit_jax.train:train_and_evaluate',
  'inference_time': 'vit_jax.inference_time:inference_time',
  'noisy_student': 'vit_jax.studies.noisy_student:noisy_student',
  'study': 'vit_jax.studies.study:study',
  'transfer': 'vit_jax.studies.study:transfer',
  'vtab': 'vit_jax.studies.vtab:vtab',
}
# Trainers of many independent runs.
STUDIES = ('study', 'vtab')


_FOLDS_HELP = (
  'cross-validation: train a run for each of K folds of the training data, which tests it, '
  'and report mean and standard deviation'
)


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('train', __doc__)
  parser.add_config()
  text = 'folder for checkpoints, metrics and config, local or gs://'
  parser.add({'--workdir': dict(help=text)})
  evaluate.add_flags(parser, '--evaluate')
  parser.add({'--folds': dict(type=int, metavar='K', help=_FOLDS_HELP)})
  run_flags.add_flags(parser, 'a study')
  hosts.add_flags(parser)
  return parser


def parse(
  argv: Sequence[str],
  check_config: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
  """Parses the flags; ValueError for flags that contradict each other."""
  args = make_parser().parse_args(argv, check_config=check_config)
  flags.require(args, workdir='FOLDER')
  if args.evaluate is None and args.config is None:
    raise ValueError(
      'add --config=FILE to train, or --evaluate=SPLIT to evaluate a run (see --help)'
    )
  if args.evaluate is not None and (args.print or args.run or args.folds is not None):
    raise ValueError(
      '--print, --run and --folds are for training: leave them out, or leave out '
      '--evaluate'
    )
  for name in evaluate.NAMES:
    if args.evaluate is None and getattr(args, name) is not None:
      raise ValueError(
        f'--{name}={getattr(args, name)} is for evaluation: add '
        '--evaluate=validation, or leave out the flag'
      )
  return args


def _check_config(args: argparse.Namespace) -> None:
  if args.evaluate is None:
    from vit_jax.commands import start_checks  # Late, for a fast --help.

    start_checks.check_run(args)


def main(argv: Sequence[str]) -> int:
  """Runs the trainer of a config, or an evaluation; returns the exit status."""
  args = parse(argv, _check_config)
  if args.evaluate is not None:
    return evaluate.run(args)
  trainer = args.config.get('trainer', 'train')
  if trainer not in TRAINERS:
    raise ValueError(
      f"trainer='{trainer}' must be one of {', '.join(TRAINERS)} (config.trainer)"
    )
  if args.folds is not None and trainer != 'train':
    raise ValueError(
      f"trainer='{trainer}' does not support --folds={args.folds}, only the config of a "
      'single run does (config.trainer)'
    )
  if args.folds is not None:
    trainer = 'study'
  if (args.print or args.run) and trainer not in STUDIES:
    raise ValueError(
      f"trainer='{trainer}' does not support --print and --run: only "
      f'{" and ".join(STUDIES)} (config.trainer), --folds and `vit_jax sweep` do'
    )

  def work() -> None:
    config = args.config
    name, function = TRAINERS[trainer].split(':')
    module = importlib.import_module(name)
    if args.folds is not None:
      config = module.cross_validation(config, args.folds)
    if args.print:
      runs = module.make_runs(config)
      run_flags.print_commands('train', argv, runs, args.workdir)
      return
    console.log(f'Config: {args.config_file}')
    if args.run:
      from vit_jax.studies import runs as runs_lib

      runs = runs_lib.select(module.make_runs(config), args.run)
      checkpoints = config.get('checkpoints', 'newest')
      runs_lib.train_all(runs, args.workdir, checkpoints).finish()
      return
    getattr(module, function)(config, args.workdir)

  return hosts.run(args, work)
