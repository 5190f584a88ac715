"""Runs Python in processes forked from one that has already imported everything.

Starting one takes a second instead of ten, so that a test can afford many.
"""

import atexit
import gc
import importlib
import multiprocessing
import os
import random
import resource
import runpy
import sys
import threading

_PRELOAD = [
  'tests.without_keras',  # First.
  'vit_jax.commands.evaluate', 'vit_jax.commands.plan', 'vit_jax.commands.predict',
  'vit_jax.commands.run_flags', 'vit_jax.commands.train', 'vit_jax.evaluators.evaluation',
  'vit_jax.inference_time', 'vit_jax.train', 'vit_jax.studies.study',
  'tensorflow_datasets', 'tests.forked',
  # Modules that runs and JAX import lazily.
  'clu.metric_writers', 'clu.periodic_actions', 'jaxlib.mlir.dialects.mhlo',
  'tensorboard.summary', 'tensorflow_datasets.core.features',
  'vit_jax.figures.results', 'vit_jax.tasks.classify',
]  # fmt: skip
# JAX reads these from the environment when it is imported, before the fork.
_JAX_SETTINGS = {
  'JAX_COMPILATION_CACHE_DIR': str,
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': float,
}


class Process:
  """A process with the subset of subprocess.Popen that tests use."""

  def __init__(self, process, stdout):
    self._process = process
    self.pid = process.pid
    self.stdout = stdout

  @property
  def returncode(self):
    return self._process.exitcode

  def poll(self):
    return self._process.exitcode

  def wait(self, timeout=1200):
    self._process.join(timeout)
    assert self.returncode is not None, f'still runs after {timeout} s'
    return self.returncode

  def communicate(self, timeout=1200):
    """Waits for the process; returns its output, and None for stderr."""
    # Timeout for a process that hangs.
    clock = threading.Timer(timeout, self._process.kill)
    clock.start()
    output = self.stdout.read()
    clock.cancel()
    self.wait(timeout)
    return output, None

  def send_signal(self, number):
    os.kill(self.pid, number)


def start(flags, env, kill=None, file_size=None):
  """Starts `python -m vit_jax.main`.

  Args:
    flags: arguments of `python -m vit_jax.main`.
    env: the environment.
    kill: (signal, module, name of a function or method in it, number of the call
      from 1, maximum delay in seconds, seed): the process gets the signal after a
      random delay from that call. None: never.
    file_size: maximum bytes per file, which simulates a full disk. None: no limit.

  Returns:
    A Process.
  """
  return _start(_run_main, (flags, kill, file_size), env)


def start_code(code, arguments, env):
  """Starts `python -c CODE ARGUMENTS`; returns a Process."""
  return _start(_run_code, (code, arguments), env)


def _start(target, args, env):
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(_PRELOAD)
  reader, writer = context.Pipe(duplex=False)
  process = context.Process(target=_run, args=(target, args, writer, env))
  process.start()
  writer.close()
  stdout = os.fdopen(os.dup(reader.fileno()), 'r')
  reader.close()
  return Process(process, stdout)


def _run(target, args, writer, env):
  """Does in the forked process what the interpreter does at start and exit."""
  os.dup2(writer.fileno(), 1)
  os.dup2(writer.fileno(), 2)
  writer.close()
  os.environ.clear()
  os.environ.update(env)
  gc.freeze()  # As in tests/conftest.py.
  gc.set_threshold(100_000, 20, 20)
  import jax

  # In a process forked by Python 3.13, JAX's exit handlers are lost.
  atexit.register(jax.distributed.shutdown)
  for name, kind in _JAX_SETTINGS.items():
    if name in env:
      jax.config.update(name.lower(), kind(env[name]))
  try:
    target(*args)
  except Exception:
    sys.excepthook(*sys.exc_info())
    sys.exit(1)
  finally:
    # Distributed processes disconnect here.
    atexit._run_exitfuncs()


def _run_main(flags, kill, file_size):
  if file_size:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
  if kill:
    _arm(*kill)
  sys.argv = ['vit_jax.main', *flags]
  runpy.run_module('vit_jax.main', run_name='__main__')


def _run_code(code, arguments):
  sys.argv = ['-c', *arguments]
  exec(code, {'__name__': '__main__'})


def _arm(signal_number, module, name, number, delay, seed):
  """Makes a function schedule a signal to this process."""
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
        lambda: os.kill(os.getpid(), signal_number),
      )
      clock.daemon = True
      clock.start()
    return original(*args, **kwargs)

  setattr(holder, name, watched)
