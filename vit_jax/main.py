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

Stop a run at any time, with Ctrl-C or otherwise: the same command resumes it.
Every key of a config can be set, for example --config.base_lr=0.01;
configs/common.py describes the keys. config.task selects the objective, a task.
Its options are listed in its file, for example vit_jax/tasks/classify.py, and
set like --config.task_options.mixup=0.2. config.task can also name a module
with a task of your own (vit_jax/tasks/base.py).

Evaluate a run on any split, without training:

  python -m vit_jax.main --workdir=/tmp/digits --evaluate=test

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
  'transfer': 'vit_jax.jobs.transfer:transfer',
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
_DISTRIBUTED = flags.DEFINE_boolean(
  'distributed',
  True,
  'Find the other hosts of a TPU pod or a SLURM job; --nodistributed runs on '
  'this host only.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'HOST:PORT of process 0, for a run of several processes.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'With --coordinator: number of processes.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'With --coordinator: number of this process, from 0.'
)


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
  cli.avoid_libtpu()
  # Imported late, so that --help and errors in flags are fast.
  if (
    _EVALUATE.value is None and _CONFIG.value.get('trainer', 'train') == 'train'
  ):
    from vit_jax.run import config as run_config

    run_config.check_values(_CONFIG.value)
  from vit_jax.scale import liveness

  try:
    _initialize_distributed()
    return _run()
  except Exception as e:
    liveness.end_with(e)
    raise


def _run() -> int:
  """Trains or evaluates; returns the exit status."""
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.jobs import evaluate

  if _EVALUATE.value is not None:
    evaluate.evaluate(_WORKDIR.value, _EVALUATE.value, _DATASET.value)
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


def _initialize_distributed():
  """Connects the processes of a run, if there are several."""
  from vit_jax.scale import processes

  given = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if any(value is not None for value in given):
    if None in given:
      raise ValueError(
        '--coordinator, --num_processes and --process_id must be given together'
      )
    processes.initialize(*given)
    return
  if not _DISTRIBUTED.value:
    return
  try:
    processes.initialize()
  except ValueError as e:
    # JAX raises this error if it finds no cluster: the run has one process. Any
    # other error is due to a cluster, whose hosts must not train separately.
    if 'coordinator_address' not in str(e):
      raise


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
