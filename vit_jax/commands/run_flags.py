"""Flags of commands that train several runs: all, one of them, or none."""

from collections.abc import Sequence
import shlex

from vit_jax import console
from vit_jax.commands import flags


def add_flags(parser: flags.Parser, what: str):
  """Adds --print and --run, for the runs of `what`."""
  parser.add_argument(
    '--print',
    action='store_true',
    help=f'print the commands that train the runs of {what}, one a line, for a '
    'scheduler; without those that are done; train nothing',
  )
  parser.add_argument(
    '--run', metavar='NAME', help=f'train one run of {what}, of that name'
  )


def print_commands(command: str, argv: Sequence[str], runs, workdir):
  """Prints a command for each run in the folder `workdir` that is not done.

  `command` is the name of the command that trains all `runs`, with arguments
  `argv`.
  """
  from vit_jax.studies import runs as runs_lib

  runs_lib.check(runs, workdir)
  done = runs_lib.collect(runs, workdir).done
  words = ['vit_jax', command, *(word for word in argv if word != '--print')]
  for run in runs:
    if run.name not in done:
      console.say(shlex.join([*words, f'--run={run.name}']))
