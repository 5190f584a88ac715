"""Times what users wait for before a run: imports, the first step, weights."""

import functools
import subprocess
import sys
import tempfile

import jax
import numpy as np

from vit_jax import checkpoint
from vit_jax import models
from vit_jax.benchmarks import timing
from vit_jax.configs import models as model_configs

WEIGHTS_MODEL = 'ViT-B_16'


def import_rows(args) -> list[dict]:
  """Times `import vit_jax.models`, and the two packages that it needs."""

  def run(statement):
    return lambda: subprocess.run([sys.executable, '-c', statement], check=True)

  ours, theirs = timing.measure(
    run('import vit_jax.models'),
    run('import flax.linen, optax'),
    repeats=args.repeats,
  )
  return timing.compared(
    'import vit_jax.models', ours, 'import flax.linen, optax', theirs, 's'
  )


def start_rows(args) -> list[dict]:
  """Times the digits run from the start of the process to its first step."""

  def run():
    with tempfile.TemporaryDirectory() as workdir:
      process = subprocess.Popen(
        [
          sys.executable, '-m', 'vit_jax.main', '--config=configs/digits.py',
          f'--workdir={workdir}/run',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )  # fmt: skip
      printed = []
      for line in process.stdout:
        printed.append(line)
        if line.startswith('Compiled in'):
          break
      process.kill()
      process.communicate()
      if not printed or not printed[-1].startswith('Compiled in'):
        raise RuntimeError('the digits did not start:\n' + ''.join(printed))

  [times] = timing.measure(run, repeats=args.repeats)
  return [timing.row('digits: start to first step', times, 's')]


def weights_rows(args) -> list[dict]:
  """Times loading an .npz into the parameters of a model, with all checks."""
  config = model_configs.get_config(WEIGHTS_MODEL)
  model = models.make_model(config, num_classes=1000)
  init = functools.partial(model.init, train=False)
  images = np.zeros((1, 224, 224, 3))
  shapes = jax.eval_shape(init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.random(x.shape, np.float32), shapes)

  def read():
    with np.load(path) as arrays:
      return [arrays[name] for name in arrays.files]

  def load():
    return checkpoint.load_pretrained(
      pretrained_path=path, init_params=params, model_config=config
    )

  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/weights.npz'
    checkpoint.save(params, path)
    ours, plain = timing.measure(load, read, repeats=args.repeats)
  name = f'load_pretrained, {WEIGHTS_MODEL}.npz'
  other = 'np.load of all its arrays beside it'
  return timing.compared(name, ours, other, plain, 's')
