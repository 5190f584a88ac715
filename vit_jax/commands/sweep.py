r"""Chooses a learning rate, or other values, and tests the best one.

  vit_jax sweep --config=configs/vit.py:b16,cifar10 \
    --values='config.base_lr=.001,.003,.01,.03' --workdir=/tmp/sweep

The protocol of the paper (table 4, B.1.1): each value is trained on a part of
the training data and compared on the rest, which is held out. The best value is
trained on all of the training data with several seeds, and tested. Prints the
mean and the standard deviation, and writes choice.csv, test.csv (and the same as
.json) and sweep.png to the workdir.

--values can be given several times: all combinations are tried. Without it, the
learning rates are those of the paper for the data sets of its table.

What is held out is the part that config.pp.train leaves: 'train[98%:]' for
'train[:98%]'. Of a folder or any other data hold out a part with
--held_out=10%, or name a split with --held_out=validation.

All runs lie side by side in the workdir, each as if `vit_jax train` had trained
it. The same command goes on after an interruption; runs that are done are not
trained again, so that values and seeds can be added later. Any number of
machines that see the workdir, a folder or gs://, can share it: start the same
command on each. If a machine is lost, another one goes on with its run.

For a scheduler (SLURM array, Kubernetes job), --print prints one command for each
run of the choice, or once these are done, for each run of the test. The command
without --print shows the tables.
"""

import argparse
import ast
from collections.abc import Sequence

from vit_jax import console
from vit_jax.commands import flags, hosts, run_flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('sweep', __doc__)
  parser.add_config()
  parser.add_argument('--workdir', help='folder for all runs; or gs://...')
  parser.add_argument(
    '--values',
    action='append',
    metavar='KEY=VALUE,VALUE,...',
    help="values to try: 'config.base_lr=.003,.01'; several times for a grid",
  )
  parser.add_argument(
    '--held_out',
    help="training data to choose on: '10%%' or '200' (examples) of the end of "
    "config.pp.train, or a split, 'validation' (what config.pp.train leaves of "
    'its split)',
  )
  parser.add_argument(
    '--metric',
    help="metric to choose by: 'accuracy', 'loss' (that of config.best_metric)",
  )
  parser.add_argument(
    '--seeds',
    type=int,
    default=3,
    help='runs of the test, with the seeds config.seed, config.seed + 1, ... (3)',
  )
  parser.add_argument(
    '--refit',
    default='all',
    help="data that the winner is trained on: 'all' of the training data, as in "
    "the paper, or the same 'part' as for the choice, as in the original's "
    'configs (all)',
  )
  parser.add_argument(
    '--checkpoints',
    default='newest',
    help="checkpoints to keep of a run that is done: 'all', the 'newest' or "
    "'none' (newest)",
  )
  run_flags.add_flags(parser, 'the sweep')
  hosts.add_flags(parser)
  return parser


def parse_values(texts: Sequence[str]) -> dict[str, list]:
  """Parses 'config.base_lr=.001,.01' to {'base_lr': [0.001, 0.01]}.

  Values are Python's, or words without quotes.

  Raises:
    ValueError: if a text has another form, or a key occurs twice.
  """
  found = {}
  for text in texts:
    key, equals, listed = text.partition('=')
    key = key.strip().lstrip('-').removeprefix('config.')
    if not equals or not key or not listed.strip():
      raise ValueError(
        f"values='{text}' must be KEY=VALUE,VALUE,... as in "
        "'config.base_lr=.003,.01,.03' (--values)"
      )
    if key in found:
      raise ValueError(f"'{key}' is given twice: give all its values at once")
    try:
      found[key] = list(ast.literal_eval(f'[{listed}]'))
    except (ValueError, SyntaxError):
      from vit_jax.configs import schema  # Late, for a fast --help.

      words = listed.split(',')
      found[key] = [schema.literal(word.strip()) for word in words]
  return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
  args = make_parser().parse_args(argv)
  flags.require(args, config='FILE', workdir='FOLDER')
  args.tried = parse_values(args.values) if args.values else None
  return args


def main(argv: Sequence[str]) -> int:
  args = parse(argv)
  # Imported late, so that --help and errors in flags are fast.
  from vit_jax.run import config as run_config

  # Others are refused later.
  if args.config.get('trainer', 'train') == 'train':
    run_config.check_values(args.config)

  def work():
    from vit_jax.studies import sweep

    names = ('held_out', 'seeds', 'refit', 'metric')
    given = {'values': args.tried, **{x: getattr(args, x) for x in names}}
    if args.print:
      found = sweep.next_runs(sweep.make(args.config, **given), args.workdir)
      run_flags.print_commands('sweep', argv, found, args.workdir)
      return
    console.say(f'Config: {args.config_file}')
    given.update(checkpoints=args.checkpoints, only=args.run)
    sweep.sweep(args.config, args.workdir, **given)

  return hosts.run(args, work)
