"""Checks a config before anything is done, and works out its numbers of steps."""

import ast
import copy
import difflib
import importlib

from absl import logging
import ml_collections

from vit_jax.configs import common

# The tasks that come with the package: name, module. Any other module, by its
# dotted name, can be one too.
TASKS = {
  'classify': 'vit_jax.tasks.classify',
  'masked_patches': 'vit_jax.tasks.masked_patches',
}

# Keys below which anything may stand: they are checked where they are used.
_FREE = ('mesh', 'model', 'task_options')


def get_task(name: str) -> type:
  """Returns the class of a task.

  Args:
    name: a key of TASKS, or the name of a module that has a class `Task`.

  Raises:
    ValueError: if there is no such task.
  """
  module = TASKS.get(name) or name
  remedy = (
    f'use one of {sorted(TASKS)}, or a module with a class Task that Python finds '
    "from the current folder or PYTHONPATH, 'my_package.my_task' say (config.task)"
  )
  if not all(part.isidentifier() for part in module.split('.')):
    raise ValueError(f"task='{name}' is unknown: {remedy}")
  try:
    found = importlib.import_module(module)
  except ModuleNotFoundError as e:
    if e.name is None or not f'{module}.'.startswith(f'{e.name}.'):
      raise  # Of what the module itself imports.
    raise ValueError(
      f"task='{name}' is unknown: there is no module '{e.name}'; {remedy}"
    ) from e
  if not hasattr(found, 'Task'):
    raise ValueError(
      f"task='{name}': the module has no class Task (config.task)"
    )
  return found.Task


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
    config.task_options = task_options(config)
  return config


def task_options(config):
  """Returns the task's options, with the defaults of those that are not given.

  Raises:
    ValueError: if the task has no such option, or it is of another type.
  """
  defaults = get_task(config.task).OPTIONS
  given = config.get('task_options') or {}
  options = ml_collections.ConfigDict(convert_dict=False)
  for key, default in defaults.items():
    options[key] = ml_collections.FieldReference(default, field_type=object)
  for key, value in given.items():
    if key not in defaults:
      _raise_unknown(key, defaults, 'task_options.', f"task '{config.task}'")
    options[key] = _typed(key, value, defaults[key])
  return options


def _typed(key, value, default):
  """Gives an option the type of its default; text, as flags are, is read."""
  if isinstance(value, str) and not isinstance(default, str | None):
    try:
      value = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      pass
  if isinstance(default, float) and type(value) is int:
    value = float(value)
  if isinstance(default, tuple) and isinstance(value, list):
    value = tuple(value)
  if default is not None and type(value) is not type(default):
    raise ValueError(
      f'task_options.{key}={value!r} must be {type(default).__name__}, as '
      f'{default!r} is (config.task_options.{key})'
    )
  return value


def evaluations(config) -> list[tuple[str, str, str | None]]:
  """Returns the evaluations of a run: (name, split, data set or None).

  Args:
    config: reads `evals` and, where it is empty, `pp.test`.

  Raises:
    ValueError: if an entry is none, or two have one name.
  """
  found = []
  entries = config.evals or (('test', config.pp.test),)
  if all(isinstance(x, str) for x in entries) and len(entries) in (2, 3):
    entries = (entries,)  # A single one, whose tuple has lost its comma.
  for entry in entries:
    entry = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
    if len(entry) not in (2, 3) or not all(isinstance(x, str) for x in entry):
      raise ValueError(
        f'evals: {entry!r} must be (name, split) or (name, split, data set); '
        "(('val', 'train[90%:]'),) for one (config.evals)"
      )
    found.append((*entry, None)[:3])
  names = [name for name, _, _ in found]
  if len(set(names)) < len(names):
    raise ValueError(
      f'evals: names must differ, not {names}: they end the names of the metrics '
      '(config.evals)'
    )
  return found


def check(config):
  """Checks that a config has the keys of common.py, and sensible values.

  Raises:
    ValueError: names the key, its value and the remedy.
  """
  from vit_jax import preprocess  # Late: brings TensorFlow.

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
  task = get_task(config.task)
  preprocess.check(config.pp)
  metrics = [
    f'{metric}_{name}'
    for name, _, _ in evaluations(config)
    for metric in task.METRICS
  ]
  if config.best_metric not in metrics:
    raise ValueError(
      f"best_metric='{config.best_metric}' is not among the metrics of this "
      f'run: use one of {metrics} (config.best_metric)'
    )
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
      _raise_unknown(key, known, prefix)
    nested = isinstance(value, ml_collections.ConfigDict)
    if nested and prefix + key not in _FREE:
      _check_keys(value, known[key], f'{prefix}{key}.')


def _raise_unknown(key, known, prefix='', of='config'):
  """Raises ValueError: there is no such key."""
  near = difflib.get_close_matches(key, list(known), n=1)
  hint = (
    f"did you mean '{prefix}{near[0]}'?"
    if near
    else f'known are {", ".join(sorted(known)) or "none"}'
  )
  raise ValueError(f"{of} has no key '{prefix}{key}': {hint}")


def is_low(config) -> bool:
  """Tells whether the best checkpoint is the one of the lowest best_metric."""
  return any(
    config.best_metric == f'{metric}_{name}'
    for metric in get_task(config.task).LOW
    for name, _, _ in evaluations(config)
  )


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
