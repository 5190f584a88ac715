r"""Choose a learning rate, or other values, on held-out data, and test the best.

  vit_jax sweep --config=configs/vit.py:b16,cifar10 \
    --values='config.base_lr=.001,.003,.01,.03' --workdir=/tmp/sweep

Follows the protocol of the paper (table 4, B.1.1): a run with each value is trained
on a part of the training data and compared on the held-out rest. The best value is
then trained on all training data with several seeds, and tested. Prints the mean and
the standard deviation, and writes choice.json, test.json and sweep.png to the workdir.

The default values are the learning rates of the paper, for the data sets of its table
4. By default the rest of config.pp.train is held out: 'train[98%:]' for 'train[:98%]'.

The same command resumes after an interruption; finished runs are not trained again, so
values and seeds can be added later. For a scheduler, whose machines see the workdir (a
folder or gs://), --print prints one command per run that the choice needs or, once
these are finished, per test run. See docs/measure.md.
"""

import argparse
import ast
from collections.abc import Callable, Sequence

from vit_jax import console
from vit_jax.commands import flags, hosts, run_flags

_FLAGS = {
  '--workdir': dict(help='folder of all runs, or gs://...'),
  '--values': dict(
    action='append',
    metavar='KEY=VALUE,VALUE,...',
    help="values to try: 'config.base_lr=.003,.01'; repeat for a grid",
  ),
  '--held_out': dict(
    help="training data to choose on: '10%%' or '200' (examples) from the end of "
    "config.pp.train, or a split such as 'validation' (default: the rest of the "
    'split of config.pp.train)',
  ),
  '--metric': dict(
    help="metric to choose by: 'accuracy', 'loss' (default: config.best_metric)",
  ),
  '--seeds': dict(
    type=int,
    default=3,
    help='number of test runs, with seeds config.seed, config.seed + 1, ... (3)',
  ),
  '--refit': dict(
    choices=('all', 'part'),
    default='all',
    help='data to train the best value on: all training data, as in the paper, or the '
    "part used for the choice, as in the original's configs (all)",
  ),
  '--checkpoints': dict(
    choices=('all', 'newest', 'none'),
    default='newest',
    help='checkpoints to keep of a finished run (newest)',
  ),
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('sweep', __doc__)
  parser.add_config()
  parser.add(_FLAGS)
  run_flags.add_flags(parser, 'the sweep')
  hosts.add_flags(parser)
  return parser


def parse_values(texts: Sequence[str]) -> dict[str, list]:
  """Parses 'config.base_lr=.001,.01' to {'base_lr': [0.001, 0.01]}.

  Values are Python literals, or strings without quotes. Raises ValueError if a
  string has another form, or a key occurs twice.
  """
  values: dict[str, list] = {}
  for text in texts:
    key, equals, literals = text.partition('=')
    key = key.strip().lstrip('-').removeprefix('config.')
    if not equals or not key or not literals.strip():
      raise ValueError(
        f"values='{text}' must be KEY=VALUE,VALUE,... as in "
        "'config.base_lr=.003,.01,.03' (--values)"
      )
    if key in values:
      raise ValueError(
        f"'{key}' is given twice: list all its values at once (--values)"
      )
    try:
      values[key] = list(ast.literal_eval(f'[{literals}]'))
    except (ValueError, SyntaxError):
      from vit_jax.configs import schema  # Late, for a fast --help.

      values[key] = [schema.literal(text.strip()) for text in literals.split(',')]
  return values


def parse(
  argv: Sequence[str],
  check_config: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
  """Parses the flags, see flags.Parser.parse_args; `tried` has the values of keys."""
  args = make_parser().parse_args(argv, check_config=check_config)
  flags.require(args, config='FILE', workdir='FOLDER')
  args.tried = parse_values(args.values) if args.values else None
  return args


def _check_config(args: argparse.Namespace) -> None:
  from vit_jax.commands import start_checks  # Late, for a fast --help.

  start_checks.check_run(args)


def main(argv: Sequence[str]) -> int:
  """Trains the runs of a sweep, or prints their commands; returns the exit status."""
  args = parse(argv, _check_config)

  def work() -> None:
    from vit_jax.studies import sweep

    options = dict(
      values=args.tried,
      held_out=args.held_out,
      seeds=args.seeds,
      refit=args.refit,
      metric=args.metric,
    )
    if args.print:
      runs = sweep.next_runs(sweep.make(args.config, **options), args.workdir)
      run_flags.print_commands('sweep', argv, runs, args.workdir)
      return
    console.log(f'Config: {args.config_file}')
    sweep.sweep(
      args.config,
      args.workdir,
      checkpoints=args.checkpoints,
      only=args.run,
      **options,
    )

  return hosts.run(args, work)
