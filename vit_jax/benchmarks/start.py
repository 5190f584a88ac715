"""Times what users wait for before a run: imports, the first step, weights."""

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
  ratios = [a / b for a, b in zip(ours, theirs)]
  return [
    timing.row('import vit_jax.models', ours, 's'),
    timing.row('import flax.linen, optax', theirs, 's'),
    timing.row('ratio', ratios, 'x'),
  ]


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
  shapes = jax.eval_shape(
    lambda: model.init(
      jax.random.key(0), np.zeros((1, 224, 224, 3)), train=False
    )
  )['params']
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
  ratios = [a / b for a, b in zip(ours, plain)]
  return [
    timing.row(f'load_pretrained, {WEIGHTS_MODEL}.npz', ours, 's'),
    timing.row('np.load of all its arrays beside it', plain, 's'),
    timing.row('ratio', ratios, 'x'),
  ]
