"""Runs `vit_jax.main` in processes that are forked with all that is imported.

A start takes a second in place of ten, so that a test can afford many.
"""

import importlib
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading

_PRELOAD = [
  'vit_jax.evaluate', 'vit_jax.inference_time', 'vit_jax.train',
  'vit_jax.transfer', 'tensorflow_datasets', 'tests.forked',
]  # fmt: skip


def start(flags, output, kill=None):
  """Starts a run.

  Args:
    flags: the command line behind `python -m vit_jax.main`.
    output: file that takes what it prints.
    kill: (module, name of a function or method in it, number of the call from 1,
      longest delay in seconds, seed): from that call on the process lives so much
      longer at most. None: until its end.

  Returns:
    A multiprocessing.Process.
  """
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(_PRELOAD)
  process = context.Process(target=_run, args=(flags, str(output), kill))
  process.start()
  return process


def _run(flags, output, kill):
  descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(descriptor, 1)
  os.dup2(descriptor, 2)
  # Before JAX looks at them.
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=1'
  if kill:
    _arm(*kill)
  sys.argv = ['vit_jax.main', *flags]
  runpy.run_module('vit_jax.main', run_name='__main__')


def _arm(module, name, number, delay, seed):
  """Has a function start the clock that kills this process."""
  holder = importlib.import_module(module)
  *path, name = name.split('.')
  for part in path:
    holder = getattr(holder, part)
  original = getattr(holder, name)
  calls = []

  def watched(*args, **kwargs):
    calls.append(name)
    if len(calls) == number:
      clock = threading.Timer(
        random.Random(seed).random() * delay,
        lambda: os.kill(os.getpid(), signal.SIGKILL),
      )
      clock.daemon = True
      clock.start()
    return original(*args, **kwargs)

  setattr(holder, name, watched)
