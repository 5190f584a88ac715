"""Flags of commands that train several runs: to train one, or print all."""

from collections.abc import Sequence
import shlex
from typing import Any

from etils import epath

from vit_jax import console
from vit_jax.commands import flags


def add_flags(parser: flags.Parser, study: str) -> None:
  """Adds --print and --run, for the runs of `study`, such as 'the sweep'."""
  parser.add_argument(
    '--print',
    action='store_true',
    help=f'print a command for each unfinished run of {study}, one per line, for a '
    'scheduler; train nothing',
  )
  parser.add_argument(
    '--run', metavar='NAME', help=f'train only the run of {study} with this name'
  )


def print_commands(
  command: str, argv: Sequence[str], runs: Sequence[Any], workdir: epath.PathLike
) -> None:
  """Prints a command for each unfinished run in `workdir`.

  `command` and `argv` are the name and the arguments of the command that trains
  all `runs`.
  """
  from vit_jax.studies import runs as runs_lib

  runs_lib.check(runs, workdir)
  done = runs_lib.collect(runs, workdir).done
  arguments = [argument for argument in argv if argument != '--print']
  for run in runs:
    if run.name not in done:
      console.log(shlex.join(['vit_jax', command, *arguments, f'--run={run.name}']))
