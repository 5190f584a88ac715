"""Checks a config before anything is done, and works out its numbers of steps."""

import copy
import difflib
import importlib.util

from absl import logging
import ml_collections

from vit_jax import preprocess
from vit_jax.configs import common

# Keys below which anything may stand: they are checked where they are used.
_FREE = ('mesh', 'model')


def complete(config) -> ml_collections.ConfigDict:
  """Returns a copy that has every key of common.py.

  Configs of the original and of older runs lack some, and so does one whose `pp`
  was replaced as a whole. `accum_steps` 0 or None means 1, as it does there;
  `model_type` goes, since a model's own fields say what it is.
  """
  config = copy.deepcopy(config)
  with config.unlocked():
    if 'model_type' in config:
      del config['model_type']
    if config.get('accum_steps', 1) in (0, None):
      config.accum_steps = 1
    for defaults, given in (
      (common.get_config(), config),
      (common.get_config().pp, config.get('pp') or ml_collections.ConfigDict()),
    ):
      with given.unlocked():
        for key, value in defaults.items():
          if key not in given:
            given[key] = value
      if given is not config:
        config.pp = given
  return config


def check(config):
  """Checks that a config has the keys of common.py, and sensible values.

  Raises:
    ValueError: names the key, its value and the remedy.
  """
  _check_keys(config, common.get_config())
  if config.model is None:
    raise ValueError(
      'model is not set: take a config file that sets it, such as '
      'configs/pretrain.py:ti16,DATA (config.model)'
    )
  if config.trainer != 'train':
    raise ValueError(
      f"trainer='{config.trainer}' is unknown: use 'train' (config.trainer)"
    )
  if importlib.util.find_spec(f'vit_jax.tasks.{config.task}') is None:
    raise ValueError(
      f"task='{config.task}' is unknown: use 'classify' (config.task)"
    )
  preprocess.check(config.pp)
  for key in ('batch', 'batch_eval', 'accum_steps', 'keep_checkpoints'):
    if config[key] < 1:
      raise ValueError(f'{key}={config[key]} must be at least 1 (config.{key})')
  for key in (
    'eval_every',
    'progress_every',
    'checkpoint_every',
    'profile_steps',
    'prefetch',
    'seed',
  ):
    if config[key] < 0:
      raise ValueError(f'{key}={config[key]} must be at least 0 (config.{key})')


def _check_keys(config, known, prefix=''):
  for key, value in config.items():
    if key not in known:
      near = difflib.get_close_matches(key, list(known), n=1)
      hint = (
        f"did you mean '{prefix}{near[0]}'?"
        if near
        else (f'known are {", ".join(sorted(known))}')
      )
      raise ValueError(f"config has no key '{prefix}{key}': {hint}")
    nested = isinstance(value, ml_collections.ConfigDict)
    if nested and prefix + key not in _FREE:
      _check_keys(value, known[key], f'{prefix}{key}.')


def check_batch(config, shards: int):
  """Checks that devices and micro-batches divide the batches.

  Args:
    config: reads `batch`, `batch_eval`, `accum_steps`.
    shards: number of parts into which the mesh splits a batch.

  Raises:
    ValueError: says by what a batch must be divisible, and the nearest that is.
  """
  for key, parts, why in (
    ('batch', shards * config.accum_steps, ' x accum_steps'),
    ('batch_eval', shards, ''),
  ):
    batch = config[key]
    if batch % parts:
      raise ValueError(
        f'{key}={batch} is not a multiple of {parts} (devices that split the '
        f'batch{why} = {shards}{f" x {config.accum_steps}" if why else ""}): use '
        f'--config.{key}={max(1, round(batch / parts)) * parts}'
      )


def resolve_steps(config, num_examples: int) -> ml_collections.ConfigDict:
  """Returns a copy whose `total_steps` and `warmup_steps` are numbers.

  Args:
    config: gives steps, or passes over the data (`total_epochs`,
      `warmup_epochs`).
    num_examples: size of the training split.

  Raises:
    ValueError: if the length of the training is given twice or not at all.
  """
  config = copy.deepcopy(config)
  if config.total_steps is None and config.total_epochs is None:
    raise ValueError(
      'the length of the training is not given: use --config.total_steps=N or '
      '--config.total_epochs=N'
    )
  warmup_given = config.warmup_steps
  for name in ('total', 'warmup'):
    steps, epochs = config[f'{name}_steps'], config[f'{name}_epochs']
    if (steps is not None and steps < 0) or (epochs is not None and epochs < 0):
      raise ValueError(
        f'{name}_steps={steps}, {name}_epochs={epochs}: must be at least 0'
      )
    if steps is None:
      config[f'{name}_steps'] = round(
        (epochs or 0) * num_examples / config.batch
      )
    elif name == 'total' and not steps:
      raise ValueError('total_steps=0 must be at least 1 (config.total_steps)')
  if not config.total_steps:
    raise ValueError(
      f'total_epochs={config.total_epochs} of {num_examples} examples are less '
      f'than one batch of {config.batch}: raise it, or lower --config.batch'
    )
  if warmup_given is None and config.warmup_steps >= config.total_steps:
    config.warmup_steps = config.total_steps // 10
    logging.warning(
      'warmup_epochs=%s would be all of the %d steps: warming up for %d',
      config.warmup_epochs,
      config.total_steps,
      config.warmup_steps,
    )
  return config
