"""Helpers that run `vit_jax.main` in separate processes."""

import json
import os
import pathlib
import re
import socket

import jax

from tests import forked
from vit_jax import predict

ROOT = pathlib.Path(__file__).parents[1]

# A config file for a run of sixty steps, which takes a second or two.
CONFIG = """
from vit_jax.configs import common
from tests import tiny_models

def get_config():
  config = common.set_dataset(common.get_config(), 'digits')
  config.pp.update(crop=8, channels=1)
  config.model = tiny_models.config()
  config.pretrained_dir = None
  config.model.patches.size = (4, 4)
  config.model.transformer.dropout_rate = 0.1
  config.update(
    batch=16, batch_eval=120, total_steps=60, warmup_steps=1, optimizer='adam',
    base_lr=1e-3, eval_every=20, checkpoint_every=1, progress_every=5,
    log_images=0,
  )
  return config
"""


def write_config(folder):
  """Writes CONFIG to a file in a folder; returns its path."""
  path = folder / 'tiny.py'
  path.write_text(CONFIG)
  return path


def _command(config, workdir, flags, data_dir):
  return [
    f'--config={config}', f'--workdir={workdir}',
    f'--config.tfds_data_dir={data_dir}', *flags,
  ]  # fmt: skip


def environment(devices):
  return {
    **os.environ,
    'XLA_FLAGS': re.sub(r'(?<=device_count=)8', str(devices), os.environ['XLA_FLAGS']),
    'PYTHONPATH': str(ROOT),
    # Runs share a compilation cache.
    'JAX_COMPILATION_CACHE_DIR': os.environ['VIT_JAX_TESTS_COMPILED'],
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }


def start(config, workdir, *flags, data_dir, devices=1, **options):
  """Starts `python -m vit_jax.main`; see forked.start for options."""
  command = _command(config, workdir, flags, data_dir)
  return forked.start(command, environment(devices), **options)


def finish(*args, **kwargs):
  """Runs to the end; returns the exit status and the output."""
  process = start(*args, **kwargs)
  output, _ = process.communicate()
  return process.returncode, output


def finish_code(code, *args, devices=1):
  """Runs code in a process; returns the exit status and the output."""
  process = forked.start_code(code, list(map(str, args)), environment(devices))
  output, _ = process.communicate()
  return process.returncode, output


def finish_module(module, *args, devices=1):
  """Runs `python -m MODULE ARGS`; returns the exit status and the output."""
  code = f"""
import runpy, warnings
# Imported before the fork.
warnings.filterwarnings('ignore', '.*found in sys.modules', RuntimeWarning)
runpy.run_module({module!r}, run_name='__main__')
"""
  return finish_code(code, *args, devices=devices)


def address():
  """Returns a free HOST:PORT for the coordinator."""
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return f'localhost:{s.getsockname()[1]}'


def run_code(code, *arguments):
  """Runs code in a process; returns the output."""
  status, output = finish_code(code, *arguments)
  assert status == 0, output
  return output


def run_two(code, *arguments, devices=1):
  """Runs code in two processes, which get an address and their index.

  Args:
    code: Python; its arguments are HOST:PORT, 0 or 1, and `arguments`.
    *arguments: further arguments.
    devices: CPU devices of each process.

  Returns:
    Exit statuses and outputs.
  """
  place = address()
  pair = [
    forked.start_code(code, [place, str(i), *map(str, arguments)], environment(devices))
    for i in range(2)
  ]
  outputs = [p.communicate()[0] for p in pair]
  return [p.returncode for p in pair], outputs


def said(outputs):
  """Returns the JSON that each of two processes printed after 'SAID '."""
  lines = [
    [x for x in output.splitlines() if x.startswith('SAID ')] for output in outputs
  ]
  assert all(lines), outputs
  return [json.loads(each[0].removeprefix('SAID ')) for each in lines]


def load_state(workdir):
  """Returns the parameters of the newest checkpoint, and its step."""
  model = predict.load(str(workdir))
  return jax.device_get(model.params), model.step
