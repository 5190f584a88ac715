"""Flags of commands that run on several hosts, and the start of such a run."""

import argparse
from collections.abc import Callable

from vit_jax import console
from vit_jax.commands import flags

_FLAGS = ('distributed', 'coordinator', 'num_processes', 'process_id')


def add_flags(parser: flags.Parser):
  """Adds the flags of a run of several processes."""
  parser.add_argument(
    '--nodistributed',
    dest='distributed',
    action='store_false',
    help='runs on this host only: does not look for the other hosts of a TPU pod '
    'or a SLURM job',
  )
  parser.add_argument(
    '--coordinator',
    metavar='HOST:PORT',
    help='address of process 0, for a run of several processes',
  )
  parser.add_argument(
    '--num_processes',
    type=int,
    help='with --coordinator: number of processes',
  )
  parser.add_argument(
    '--process_id',
    type=int,
    help='with --coordinator: number of this process, from 0',
  )


def run(args: argparse.Namespace, work: Callable[[], None]) -> int:
  """Connects the processes, and works on each; returns the exit status.

  SIGTERM or Ctrl-C during a training is no error: the status is 128 and the
  signal's number.
  """
  from vit_jax.distributed import processes

  with processes.connected(**{name: getattr(args, name) for name in _FLAGS}):
    console.load_tensorflow()
    from vit_jax import train

    try:
      work()
    except train.Interrupted as e:
      console.say(str(e))
      return 128 + e.signal
  return 0
