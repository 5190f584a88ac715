"""Times what users wait for before a run: imports, the first step, weights."""

import argparse
from collections.abc import Callable
import functools
import subprocess
import sys
import tempfile
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import timing
from vit_jax import checkpoint, models
from vit_jax.configs import models as model_configs

WEIGHTS_MODEL = 'ViT-B_16'


def random_params(name: str, image_size: int) -> tuple[ml_collections.ConfigDict, Any]:
  """Returns the config of a model, and parameters of random numbers."""
  config = model_configs.get_config(name)
  model = models.make_model(config, num_classes=1000)
  init = functools.partial(model.init, train=False)
  images = np.zeros((1, image_size, image_size, 3))
  shapes = jax.eval_shape(init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  return config, jax.tree.map(lambda x: rng.random(x.shape, np.float32), shapes)


def import_rows(args: argparse.Namespace) -> list[dict]:
  """Times `import vit_jax.models`, and the two packages that it imports."""

  def run(statement: str) -> Callable[[], Any]:
    return lambda: subprocess.run([sys.executable, '-c', statement], check=True)

  names = 'import vit_jax.models', 'import flax.linen, optax'
  package_times, framework_times = timing.measure(
    *map(run, names), repeats=args.repeats
  )
  return timing.compared(names[0], package_times, names[1], framework_times, 's')


def start_rows(args: argparse.Namespace) -> list[dict]:
  """Times the digits run from the start of the process to its first step."""

  def run() -> float:
    command = '-m vit_jax.main --config=configs/digits.py --workdir'.split()
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, *command, f'{folder}/run']
      process = subprocess.Popen(command, **how)
      printed = []
      for line in process.stdout:
        printed.append(line)
        if line.startswith('Compiled in'):
          process.kill()
      if process.wait() >= 0:
        raise RuntimeError('the digits did not start:\n' + ''.join(printed))

  [times] = timing.measure(run, repeats=args.repeats)
  return [timing.row('digits: start to first step', times, 's')]


def weights_rows(args: argparse.Namespace) -> list[dict]:
  """Times loading an .npz into the parameters of a model, with all checks."""
  config, params = random_params(WEIGHTS_MODEL, 224)

  def read() -> list[np.ndarray]:
    with np.load(path) as arrays:
      return [arrays[name] for name in arrays.files]

  def load() -> Any:
    return checkpoint.load_pretrained(
      pretrained_path=path, init_params=params, model_config=config
    )

  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/weights.npz'
    checkpoint.save(params, path)
    ours, plain = timing.measure(load, read, repeats=args.repeats)
  name = f'load_pretrained, {WEIGHTS_MODEL}.npz'
  return timing.compared(name, ours, 'np.load of all its arrays', plain, 's')
