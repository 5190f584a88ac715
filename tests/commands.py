"""Parses the commands and flags of README.md and docs/ as the programs do."""

import copy
import importlib

from absl import flags
import ml_collections
from ml_collections import config_flags

from vit_jax import cli
from vit_jax import main
from vit_jax import plan
from vit_jax import sweep
from vit_jax.jobs import study
from vit_jax.run import config as run_config
from vit_jax.run import keys

# Commands that read their flags by argparse, each with arguments that are right.
MINIMAL = {
  'vit_jax.predict': ['--workdir=/tmp/run', 'a.png'],
  'vit_jax.convert': ['a.npz', 'b.npz'],
  'vit_jax.manifest': ['/tmp/folder'],
  'vit_jax.benchmark': [],
  'vit_jax.datasets.convert': ['imagenet2012'],
  'vit_jax.compute': [],
  'vit_jax.visualize': ['--out=/tmp/out'],
  'vit_jax.probe': ['--workdir=/tmp/run'],
}
# Configs that a flag on its own may be meant for.
BASES = (
  'configs/igpt.py:s,cifar10,32',
  'configs/pretrain.py:s16,cifar10',
  'configs/vit.py:s16,cifar10',
  'configs/masked_patches.py:s16,cifar10',
  'configs/digits_transfer.py',
  'configs/vtab.py:s16',
  'configs/data_scaling.py',
  'configs/noisy_student.py:s16,cifar10,cifar100',
  'configs/detr.py:r50,coco/2017',
)


def main_flags():
  """Returns the flags of vit_jax.main, none of them set."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=values)
  by_module = flags.FLAGS.flags_by_module_dict()
  for flag in by_module[main.__name__] + by_module[cli.__name__]:
    if flag.name.partition('.')[0] != 'config':
      values[flag.name] = copy.deepcopy(flag)
  return values


def runs_in(config):
  """Yields the configs of the runs that a config's program trains."""
  if config.get('trainer', 'train') == 'train':
    yield config
    return
  if config.trainer == 'study':
    yield from (run.config for run in study.make_runs(config))
    return
  for part in config.values():
    if isinstance(part, ml_collections.ConfigDict) and 'trainer' in part:
      part.pp.train = part.pp.train.format(seed=0)
      yield from runs_in(part)


def check_config(config):
  """Checks every value of a config, and of each run that it describes."""
  for run in runs_in(config):
    run_config.check_values(run)
    run_config.check(run_config.complete(run))


def parse(module, args):
  """Parses a command as it does itself; raises ValueError on a wrong one."""
  if module == 'vit_jax.sweep':
    values = sweep.parse([module, *args])
    check_config(values.config)
    return values
  if module in ('vit_jax.main', 'vit_jax.plan'):
    is_main = module == 'vit_jax.main'
    values = main_flags() if is_main else plan._define_flags()
    if args == ['--help']:
      return values
    if cli.parse_flags([module, *args], values)[1:]:
      raise ValueError(f'{args} has words that are no flags')
    if values.config is not None:
      check_config(values.config)
    if is_main and not values.workdir:
      raise ValueError('--workdir is missing')
    return values
  try:
    return importlib.import_module(module).make_parser().parse_args(args)
  except SystemExit as e:
    raise ValueError(f'python -m {module} {args}') from e


def known_names():
  """Returns the names of all flags, with their dashes."""
  absl = [*main_flags(), *plan._define_flags(), *sweep.define_flags()]
  absl += [f'config.{name}' for name in keys.KEYS]
  return {f'--{name}' for name in absl}.union(
    *(
      importlib.import_module(module).make_parser()._option_string_actions
      for module in MINIMAL
    )
  )


def accepted(given):
  """Tells whether a command takes flags that stand alone on a page."""
  if len(given) == 1 and '=' not in given[0]:  # A flag that is named, not set.
    return given[0] in known_names()
  candidates = [(module, [*given, *least]) for module, least in MINIMAL.items()]
  for base in BASES:
    config = [] if given[0].startswith('--config=') else [f'--config={base}']
    candidates += [
      ('vit_jax.main', [*config, '--workdir=/tmp/run', *given]),
      ('vit_jax.plan', [*config, *given]),
      ('vit_jax.sweep', [*config, '--workdir=/tmp/run', *given]),
    ]
  for module, args in candidates:
    try:
      parse(module, args)
      return True
    except ValueError:
      pass
  return False
