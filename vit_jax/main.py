r"""Trains a Vision Transformer, or evaluates one.

Train on scikit-learn's handwritten digits (no download, minutes on a laptop):

  python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits

on your own images, in /data/pets/train/<class>/* and /data/pets/test/<class>/*:

  python -m vit_jax.main --config=configs/pretrain.py:ti16,/data/pets \
    --workdir=/tmp/pets

fine-tune published weights, on a TFDS data set or a folder:

  python -m vit_jax.main --config=configs/vit.py:b16,cifar10 \
    --config.pretrained=ViT-B_16.npz --workdir=/tmp/cifar10

pre-train without labels, by masked patch prediction:

  python -m vit_jax.main --config=configs/masked_patches.py:b16,/data/photos \
    --workdir=/tmp/masked

learn from images without labels too (Noisy Student):

  python -m vit_jax.main --config=configs/noisy_student_digits.py \
    --workdir=/tmp/noisy_student

Stop a run at any time, with Ctrl-C or otherwise: the same command resumes it.
Every key of a config can be set, for example --config.base_lr=0.01;
configs/common.py describes the keys. config.task selects the objective, a task.
Its options are listed in its file, for example vit_jax/tasks/classify.py, and
set like --config.task_options.mixup=0.2. config.task can also name a module
with a task of your own (vit_jax/tasks/base.py).

Evaluate a run on any split, without training:

  python -m vit_jax.main --workdir=/tmp/digits --evaluate=test

and on ImageNet's validation images by ReaL labels too:

  python -m vit_jax.main --workdir=/tmp/run --evaluate=validation --real=real.json

On several hosts: start the same command on each host. On TPU pods and under
SLURM the hosts find each other; elsewhere add --coordinator=HOST:PORT
--num_processes=N --process_id=I.
"""

import importlib
import sys

from absl import app
from absl import flags
from ml_collections import config_flags

from vit_jax import cli

# config.trainer -> 'module:function' of (config, workdir).
TRAINERS = {
  'train': 'vit_jax.train:train_and_evaluate',
  'inference_time': 'vit_jax.inference_time:inference_time',
  'noisy_student': 'vit_jax.self_training.noisy_student:noisy_student',
  'study': 'vit_jax.jobs.study:study',
  'transfer': 'vit_jax.jobs.transfer:transfer',
  'vtab': 'vit_jax.jobs.vtab:vtab',
}

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file, with its argument after a colon.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder for checkpoints, metrics and config; or gs://...'
)
_EVALUATE = flags.DEFINE_string(
  'evaluate',
  None,
  "Evaluate the run in --workdir on this split, without training: 'test', "
  "'train[:10%]', ...",
)
_DATASET = flags.DEFINE_string(
  'dataset', None, 'With --evaluate: another data set with the same classes.'
)
_REAL = flags.DEFINE_string(
  'real',
  None,
  'With --evaluate: file of ImageNet ReaL labels, real.json of '
  'github.com/google-research/reassessed-imagenet; adds accuracy_real.',
)
cli.define_process_flags(flags.FLAGS)


def main(argv):
  """Runs the command line; returns the exit status."""
  if not flags.FLAGS['verbosity'].present:
    cli.quiet()
  if len(argv) > 1:
    raise ValueError(f'unknown arguments {argv[1:]}: flags begin with --')
  if not _WORKDIR.value:
    raise ValueError('--workdir=FOLDER is needed (see --help)')
  if _EVALUATE.value is None and _CONFIG.value is None:
    raise ValueError(
      '--config=FILE is needed to train, --evaluate=SPLIT to evaluate a run (see '
      '--help)'
    )
  if _EVALUATE.value is None and _REAL.value is not None:
    raise ValueError(
      f'--real={_REAL.value} is for evaluation: add --evaluate=validation, or '
      'leave it out'
    )
  cli.avoid_libtpu()
  # Imported late, so that --help and errors in flags are fast.
  if (
    _EVALUATE.value is None and _CONFIG.value.get('trainer', 'train') == 'train'
  ):
    from vit_jax.run import config as run_config

    run_config.check_values(_CONFIG.value)
  from vit_jax.scale import processes

  with processes.connected(**cli.process_flags(flags.FLAGS)):
    return _run()


def _run() -> int:
  """Trains or evaluates; returns the exit status."""
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.jobs import evaluate

  if _EVALUATE.value is not None:
    evaluate.evaluate(
      _WORKDIR.value,
      _EVALUATE.value,
      _DATASET.value,
      real_labels=_REAL.value,
    )
    return 0
  run = _program(_CONFIG.value.get('trainer', 'train'))
  try:
    run(_CONFIG.value, _WORKDIR.value)
  except train.Interrupted as e:
    cli.say(str(e))
    return 128 + e.signal
  return 0


def _program(trainer: str):
  """Returns the function (config, workdir) of a program.

  Raises:
    ValueError: if `config.trainer` is no key of TRAINERS.
  """
  if trainer not in TRAINERS:
    raise ValueError(
      f"trainer='{trainer}' is unknown: use one of {', '.join(TRAINERS)} "
      '(config.trainer)'
    )
  module, name = TRAINERS[trainer].split(':')
  return getattr(importlib.import_module(module), name)


def parse_flags(argv):
  """Parses the flags, including those of JAX such as --jax_platforms."""
  if any(arg.lstrip('-').startswith(('jax_', 'nojax_')) for arg in argv):
    import jax

    jax.config.config_with_absl()
  try:
    return cli.parse_flags(argv, flags.FLAGS)
  except SystemExit:
    sys.exit(0)  # After --help, where absl exits with 1.


if __name__ == '__main__':
  cli.run(lambda: app.run(main, flags_parser=parse_flags))
