"""Flags of commands that run on several hosts, and the start of such a run."""

import argparse
from collections.abc import Callable

from vit_jax import console
from vit_jax.commands import flags

_FLAGS = {
  '--nodistributed': dict(
    dest='distributed',
    action='store_false',
    help='run on this host only, without the others of a TPU pod or SLURM job',
  ),
  '--coordinator': dict(metavar='HOST:PORT', help='address of process 0'),
  '--num_processes': dict(type=int, help='with --coordinator: number of processes'),
  '--process_id': dict(type=int, help='with --coordinator: process number, from 0'),
}


def add_flags(parser: flags.Parser) -> None:
  """Adds the flags of a run with several processes."""
  parser.add(_FLAGS, 'several hosts')


def run(args: argparse.Namespace, work: Callable[[], None]) -> int:
  """Connects the processes and calls `work` on each; returns the exit status.

  When SIGTERM or Ctrl-C stops a training run, the status is 128 + signal number.
  """
  from vit_jax.distributed import processes

  names = ('distributed', 'coordinator', 'num_processes', 'process_id')
  with processes.connected(**{name: getattr(args, name) for name in names}):
    console.load_tensorflow()
    from vit_jax.run import stopping

    try:
      work()
    except stopping.Interrupted as e:
      console.log(str(e))
      return 128 + e.signal
  return 0
