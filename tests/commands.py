"""Parses the commands and flags in README.md and docs/ as the programs do."""

import functools
import importlib

import ml_collections

from vit_jax import __main__ as program
from vit_jax.configs import common, schema
from vit_jax.learning import optim, schedules
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.studies import study

# `python -m MODULE` -> its command.
MODULES = {'vit_jax.main': 'train'}
# Command -> valid arguments, without a config.
MINIMAL = {
  'evaluate': ['--workdir=/tmp/run', '--split=test'],
  'predict': ['--workdir=/tmp/run', 'a.png'],
  'visualize': ['--workdir=/tmp/run', '--out=/tmp/out'],
  'probe': ['--workdir=/tmp/run'],
  'convert': ['a.npz', 'b.npz'],
  'demo': ['--workdir=/tmp/run'],
  'export': ['--workdir=/tmp/run', '--to=onnx', '--out=/tmp/out'],
  'index': ['/tmp/folder'],
}
# Configs to which a flag without a command may apply.
BASES = (
  'configs/pretrain.py:s16,cifar10',
  'configs/igpt.py:s,cifar10,32',
  'configs/vit.py:s16,cifar10',
  'configs/masked_patches.py:s16,cifar10',
  'configs/digits_transfer.py',
  'configs/vtab.py:s16',
  'configs/data_scaling.py',
  'configs/noisy_student.py:s16,cifar10,cifar100',
  'configs/detr.py:r50,coco/2017',
  'configs/lit_digits.py',
  'configs/regress_digits.py',
  'configs/segment_scenes.py',
)

_VALID: set[str] = set()  # Runs without errors, as JSON.


def runs_in(config):
  """Yields the config of each run that a config describes."""
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
    content = run.to_json_best_effort(sort_keys=True)
    if content in _VALID:
      continue  # Commands share configs, and the runs of a study values.
    run_config.check_values(run)
    completed = run_config.complete(run)
    run_evaluators.check(completed)
    schedules.check(completed)
    optim.check(completed)
    _VALID.add(content)


def module_of(command):
  """Returns the module of a command."""
  if command == 'benchmarks':  # `python -m benchmarks`, in a checkout.
    return importlib.import_module('benchmarks.__main__')
  return importlib.import_module(f'vit_jax.commands.{command}')


def parse(command, args):
  """Parses a command like the program itself; raises ValueError if it is wrong."""
  if command not in {*program.COMMANDS, 'benchmarks'}:
    raise ValueError(f'there is no command {command}')
  if args in ([], ['--help']):  # The name of a command, or its help.
    return None
  module = module_of(command)
  if hasattr(module, 'parse'):
    values = module.parse(args)
  else:
    values = module.make_parser().parse_args(args)
  if getattr(values, 'config', None) is not None:
    check_config(values.config)
  return values


@functools.cache
def known_names():
  """Returns the names of all flags, with dashes."""
  found = {f'--config.{name}' for name in schema.flat(common.Config)}
  return found.union(
    *(module_of(name).make_parser().flags() for name in program.COMMANDS)
  )


def accepted(given):
  """Returns whether some command accepts flags that a page mentions on their own."""
  if len(given) == 1 and '=' not in given[0]:  # Named without a value.
    return given[0] in known_names()
  if len(given) == 1 and given[0].startswith('--config='):
    # configs_test and the tests of studies check the values.
    return module_of('train').parse([*given, '--workdir=/tmp/run']) is not None
  keys = all(word.startswith('--config') for word in given)
  # The last of repeated flags wins.
  for name, least in () if keys else MINIMAL.items():
    try:
      module_of(name).make_parser().parse_args([*least, *given])
      return True
    except ValueError:
      pass
  for base in BASES if keys else BASES[:1]:  # All three have the same keys.
    least = [f'--config={base}', '--workdir=/tmp/run']
    candidates = {'train': least, 'sweep': least, 'plan': least[:1]}
    for command in ('train',) if keys else candidates:
      try:
        parse(command, [*candidates[command], *given])
        return True
      except ValueError:
        pass
  return False
