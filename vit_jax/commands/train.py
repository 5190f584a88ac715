r"""Trains a Vision Transformer, or runs another program of a config file.

Train on scikit-learn's handwritten digits (no download, minutes on a laptop):

  vit_jax train --config=configs/digits.py --workdir=/tmp/digits

on your own images, in /data/pets/train/<class>/* and /data/pets/test/<class>/*:

  vit_jax train --config=configs/pretrain.py:ti16,/data/pets --workdir=/tmp/pets

fine-tune published weights, on a TFDS data set or a folder:

  vit_jax train --config=configs/vit.py:b16,cifar10 \
    --config.pretrained=ViT-B_16.npz --workdir=/tmp/cifar10

pre-train without labels, by masked patch prediction:

  vit_jax train --config=configs/masked_patches.py:b16,/data/photos \
    --workdir=/tmp/masked

learn from images without labels too (Noisy Student):

  vit_jax train --config=configs/noisy_student_digits.py \
    --workdir=/tmp/noisy_student

Stop a run at any time, with Ctrl-C or otherwise: the same command resumes it.
Every key of a config can be set, for example --config.base_lr=0.01;
configs/common.py describes the keys. config.task selects the objective, a task.
Its options are listed in its file, for example vit_jax/tasks/classify.py, and
set like --config.task_options.mixup=0.2. config.task can also name a module
with a task of your own (vit_jax/tasks/base.py). configs/NAME.py is a file of
yours, or else the one that is installed with the package.

`python -m vit_jax.main` is the same command, by the name of the original.
--evaluate does what `vit_jax evaluate` does.

A study or VTAB trains many runs. Any number of machines that see the workdir can
work on it: start the same command on each, and each takes the next run that is
free. For a scheduler, --print prints one command for each run.

On several hosts: start the same command on each host. On TPU pods and under
SLURM the hosts find each other; elsewhere add --coordinator=HOST:PORT
--num_processes=N --process_id=I. The settings of JAX are variables of the
environment, for example JAX_PLATFORMS=cpu.
"""

import argparse
from collections.abc import Sequence
import importlib

from vit_jax import console
from vit_jax.commands import evaluate, flags, hosts, run_flags

# config.trainer -> 'module:function' of (config, workdir).
TRAINERS = {
  'train': 'vit_jax.train:train_and_evaluate',
  'inference_time': 'vit_jax.inference_time:inference_time',
  'noisy_student': 'vit_jax.studies.noisy_student:noisy_student',
  'study': 'vit_jax.studies.study:study',
  'transfer': 'vit_jax.studies.transfer:transfer',
  'vtab': 'vit_jax.studies.vtab:vtab',
}
# Those that train many runs, none of which needs another one.
STUDIES = ('study', 'vtab')


def make_parser() -> flags.Parser:
  parser = flags.Parser('train', __doc__)
  parser.add_config('config file')
  parser.add_argument(
    '--workdir', help='folder for checkpoints, metrics and config; or gs://...'
  )
  evaluate.add_flags(parser, '--evaluate')
  run_flags.add_flags(parser, 'a study')
  hosts.add_flags(parser)
  return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
  args = make_parser().parse_args(argv)
  flags.require(args, workdir='FOLDER')
  if args.evaluate is None and args.config is None:
    raise ValueError(
      '--config=FILE is needed to train, --evaluate=SPLIT to evaluate a run (see '
      '--help)'
    )
  if args.evaluate is not None and (args.print or args.run):
    raise ValueError(
      '--print and --run are for training: leave them out, or --evaluate'
    )
  for name in ('dataset', 'real', 'option'):
    if args.evaluate is None and getattr(args, name) is not None:
      raise ValueError(
        f'--{name}={getattr(args, name)} is for evaluation: add '
        '--evaluate=validation, or leave it out'
      )
  return args


def main(argv: Sequence[str]) -> int:
  args = parse(argv)
  if args.evaluate is not None:
    return evaluate.run(args)
  config = args.config
  trainer = config.get('trainer', 'train')
  if trainer not in TRAINERS:
    raise ValueError(
      f"trainer='{trainer}' is unknown: use one of {', '.join(TRAINERS)} "
      '(config.trainer)'
    )
  if (args.print or args.run) and trainer not in STUDIES:
    raise ValueError(
      f"trainer='{trainer}' has no runs to choose from: --print and --run are for "
      f'{" and ".join(STUDIES)} (config.trainer), and for `vit_jax sweep`'
    )
  if trainer == 'train':
    # Before anything that loads slowly.
    from vit_jax.run import config as run_config

    run_config.check_values(config)

  def work():
    name, function = TRAINERS[trainer].split(':')
    module = importlib.import_module(name)
    if args.print:
      found = module.make_runs(config)
      run_flags.print_commands('train', argv, found, args.workdir)
      return
    console.say(f'Config: {args.config_file}')
    if args.run:
      from vit_jax.studies import runs as runs_lib

      one = runs_lib.named(module.make_runs(config), args.run)
      kept = config.get('checkpoints', 'newest')
      runs_lib.train_all(one, args.workdir, kept).finish()
      return
    getattr(module, function)(config, args.workdir)

  return hosts.run(args, work)
