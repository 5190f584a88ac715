"""Checks and completes configs, and computes their numbers of steps.

Importing this module does not import JAX, so that errors in a config are fast.
"""

from collections.abc import Mapping
import copy
import functools
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import ml_collections

from vit_jax import console, user_code
from vit_jax.configs import common, models as model_configs, schema, task_options
from vit_jax.distributed import files
from vit_jax.layers import position_kinds
from vit_jax.learning import named_functions

# Name -> module of the tasks of this package. A config can also name any other
# module, by its dotted name.
TASKS = {
  'classify': 'vit_jax.tasks.classify',
  'detect': 'vit_jax.tasks.detection.detect',
  'image_text': 'vit_jax.tasks.image_text.image_text',
  'masked_patches': 'vit_jax.tasks.masked_patches',
  'pixels': 'vit_jax.tasks.pixels.pixels',
  'pixels_finetune': 'vit_jax.tasks.pixels.finetune',
  'regress': 'vit_jax.tasks.regression.regress',
  'segment': 'vit_jax.tasks.detection.segment',
  'segment_semantic': 'vit_jax.tasks.segmentation.segment_semantic',
}

_DEFAULT_EVALUATION = 'test'  # Name of the evaluation on `pp.test`.

# Keys of the original without an effect: the fields of a model imply its type, and
# data are shuffled without a buffer.
_OBSOLETE = ('model_type', 'shuffle_buffer')

# Keys, at any depth, whose values are or may contain paths.
_PATHS = (
  'classes',
  'dataset',
  'evals',
  'palette',
  'pretrained',
  'pretrained_dir',
  'real_labels',
  'teacher_workdir',
  'templates',
  'tfds_data_dir',
  'tfds_manual_dir',
  'vocab_path',
)

# Key of a Transformer -> another key, and the values of that key that read the first.
_READ_BY = {
  'attention_window': ('attention_pattern', ('local',)),
  'rope_temperature': ('position_embedding', position_kinds.ROPES),
  'rope_grid': ('position_embedding', position_kinds.ROPES[1:]),
  'position_grid': ('position_embedding', position_kinds.TABLES),
  'position_layers': (
    'position_embedding',
    (*position_kinds.TABLES, *position_kinds.RELATIVE),
  ),
}


_TASK_REMEDY = (
  f'use one of {sorted(TASKS)}, or a module with a class Task that Python finds from '
  "the current folder or PYTHONPATH, such as 'my_package.my_task' (config.task)"
)
_EVALUATOR_REMEDY = (
  "use 'MODULE:CLASS' of a module that Python finds from the current folder or "
  "PYTHONPATH, such as 'my_module:Calibration'"
)


def get_task(name: str) -> type[Any]:
  """Returns the class of a task, by its name in config.task.

  ValueError if the task is unknown or cannot be imported.
  """
  return user_code.import_class(
    TASKS.get(name, name), 'Task', f"task='{name}'", _TASK_REMEDY
  )


def check_stored_task(name: str) -> None:
  """Raises ForeignModuleError if a stored config would import code of a stranger."""
  if isinstance(name, str) and name not in TASKS:
    user_code.check_trusted(name, 'its task')


def replace_stored_functions(config: ml_collections.ConfigDict) -> None:
  """Replaces optimiser and decay of a stored config unless they are optax's.

  Other modules may be code of a stranger, also those that are imported already: a config
  could name `subprocess:run` with arguments. Prediction needs neither of them.
  """
  for key, arguments, replacement in (
    ('optimizer', 'optimizer_args', 'adam'),
    ('decay_type', 'decay_args', 'cosine'),
  ):
    module, colon, _ = config[key].partition(':')
    if colon and module not in ('optax', 'optax.contrib'):
      config[key] = replacement
      config[arguments] = {}


def get_evaluator(key: str, name: str) -> type[Any]:
  """Returns the class of an evaluator, named 'MODULE:CLASS' at a key of the config.

  ValueError if it is unknown or cannot be imported.
  """
  module, _, class_name = name.partition(':')
  setting = f"{key}.type='{name}'"
  remedy = f'{_EVALUATOR_REMEDY} (config.{key}.type)'
  return user_code.import_class(module, class_name, setting, remedy)


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a copy with every key of common.py, of its model and of its task.

  Configs of the original lack some keys, as do configs whose `pp` was replaced.
  `accum_steps` 0 or None becomes 1, its meaning in the original. The keys of _OBSOLETE
  are removed.
  """
  config = with_keys(config)
  with config.unlocked():
    config.task_options = options_of_task(config)
    if config.best_metric is None:
      config.best_metric = _main_metric(config)
  return config


def _main_metric(config: ml_collections.ConfigDict) -> str:
  """Returns the name of the task's main metric in the first evaluation."""
  metric = getattr(_options_group(config), 'BEST_METRIC', 'loss')
  schema.check('evals', config.evals, tuple)
  evaluation = _DEFAULT_EVALUATION
  if config.evals:
    evaluation = _parse_evals(config)[0].name
  return f'{metric}_{evaluation}'


def complete_stored(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a complete, checked copy of a stored config."""
  completed = with_keys(config)
  check_types(completed)
  return complete(completed)


def with_keys(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a completed copy of a config, except for the options of its task."""
  config = copy.deepcopy(config)
  with config.unlocked():
    for key in _OBSOLETE:
      if key in config:
        del config[key]
    if config.get('accum_steps', 1) in (0, None):
      config.accum_steps = 1
    for group in ('pp', 'fewshot', 'lora', 'early_stopping'):
      if config.get(group, 0) is None:
        del config[group]
    schema.fill(config, common.Config)
    if isinstance(config.model, ml_collections.ConfigDict):
      config.model = model_configs.with_options(config.model)
  expand_paths(config)
  return config


def expand_paths(config: ml_collections.ConfigDict) -> None:
  """Replaces a leading '~' in the paths of a config, in place."""
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict) and key not in _PATHS:
      expand_paths(value)
    elif key in _PATHS:
      with config.unlocked():
        config[key] = _with_homes(value)


def _with_homes(value: Any) -> Any:
  """Expands each string of a value, which may be nested."""
  if isinstance(value, str):
    return files.expanded(value)
  if isinstance(value, tuple | list):
    return type(value)(map(_with_homes, value))
  if schema.is_mapping(value):
    return {part: _with_homes(path) for part, path in value.items()}
  return value


def check_types(config: ml_collections.ConfigDict, closed: bool = False) -> None:
  """Checks the type of each key; `closed` rejects unknown keys."""

  def check_model() -> None:
    if isinstance(config.model, ml_collections.ConfigDict):
      fields = model_configs.FIELDS.get(model_configs.kind_of(config.model))
      schema.check_group(config.model, fields, 'model.', closed=False)

  def check_keys() -> None:
    schema.check_group(config, common.Config, closed=closed)

  schema.run_checks([check_keys, check_model])


def options_of_task(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns the task's options, parsed, checked and completed with defaults.

  ValueError if an option is unknown or has a wrong type, or options contradict each
  other.
  """
  values = config.get('task_options') or {}
  schema.check('task_options', values, dict)
  group = _options_group(config)
  kinds = schema.fields(group)
  options = ml_collections.ConfigDict(convert_dict=False)
  for key, default in schema.defaults(group):
    options[key] = ml_collections.FieldReference(default, field_type=object)

  def set_option(key: str, value: Any) -> None:
    name = f'task_options.{key}'
    if key not in kinds:
      schema.raise_unknown(key, kinds, 'task_options.', f"task '{config.task}'")
    if isinstance(value, str):
      value = schema.parse(name, value, kinds[key])
    schema.check(name, value, kinds[key])
    options[key] = tuple(value) if isinstance(value, list) else value

  schema.run_checks(functools.partial(set_option, *item) for item in values.items())
  schema.run_checks(schema.rules(options, group))
  return options


def replace_options(
  config: ml_collections.ConfigDict, options: Mapping[str, Any]
) -> None:
  """Replaces values of `config.task_options`; they may be texts of a command line.

  ValueError as in `options_of_task`.
  """
  with config.unlocked(), config.ignore_type():
    config.task_options.update(options)
    config.task_options = options_of_task(config)


def marked_keys(config: ml_collections.ConfigDict, *marks: schema.Mark) -> list[str]:
  """Returns the dotted keys of a complete config that have one of the marks."""
  fields = model_configs.FIELDS.get(model_configs.kind_of(config.model))
  # A user's own model may have the fields of any kind.
  groups = [fields] if fields else [*model_configs.FIELDS.values()]
  marks_by_key = schema.marks(common.Config)
  for group in groups:
    marks_by_key |= schema.marks(group, 'model.')
  marks_by_key |= schema.marks(_options_group(config), 'task_options.')
  return [key for key, marks_of_key in marks_by_key.items() if {*marks} & marks_of_key]


def _options_group(config: ml_collections.ConfigDict) -> type:
  """Returns the dataclass of the options of a config's task."""
  return task_options.OPTIONS.get(config.task) or _options_of_class(config.task)


def _options_of_class(name: str) -> type:
  """Returns the options of a user's task; ValueError if they lack the base class's."""
  task_class = get_task(name)
  classes: list[Any] = [cls for cls in task_class.__mro__ if 'Options' in vars(cls)]
  if not classes:
    raise ValueError(
      f"task='{name}': its class Task must be a subclass of "
      'vit_jax.tasks.base.Task or of a task of this package (config.task)'
    )
  kinds = schema.fields(task_class.Options)
  for cls in classes:
    if missing := sorted(schema.fields(cls.Options).keys() - kinds.keys()):
      raise ValueError(
        f"task='{name}': its class Options lacks {missing}: derive it from "
        f'{cls.__module__}.{cls.__name__}.Options (config.task)'
      )
  return task_class.Options


class EvaluatedSplit(NamedTuple):
  """An evaluation of a run."""

  name: str  # Names of metrics end in it.
  split: str
  dataset: str | None = None  # None: the run's.


def evaluations(config: ml_collections.ConfigDict) -> list[EvaluatedSplit]:
  """Returns the evaluations of a run.

  Reads `evals`, or `pp.test` if that is empty. ValueError if an entry has another
  form, or two entries have the same name.
  """
  evals = _parse_evals(config)
  for evaluation in evals:
    schema.check('evals', evaluation.split, schema.Split)
  names = [evaluation.name for evaluation in evals]
  if len(set(names)) < len(names):
    raise ValueError(
      f'evals: the names {names} must differ, because the names of metrics end in '
      'them (config.evals)'
    )
  return evals


def _parse_evals(config: ml_collections.ConfigDict) -> list[EvaluatedSplit]:
  """Returns what `evaluations` does, with splits that may be templates."""
  evals = []
  entries = config.evals or ((_DEFAULT_EVALUATION, config.pp.test),)
  if all(isinstance(x, str) for x in entries) and len(entries) in (2, 3):
    entries = (entries,)  # A single entry, written without the trailing comma.
  for entry in entries:
    entry = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
    if len(entry) not in (2, 3) or not all(isinstance(x, str) for x in entry):
      raise ValueError(
        f'evals: {entry!r} must be (name, split) or (name, split, data set), as in '
        "(('val', 'train[90%:]'),) (config.evals)"
      )
    evals.append(EvaluatedSplit(*entry))
  return evals


def check_values(config: ml_collections.ConfigDict) -> None:
  """Checks a config, even if it is incomplete, without importing JAX or a task.

  ValueError names each wrong key, its value and the valid values.
  vit_jax.run.evaluators.check also checks the evaluators, the best metric and the options
  of a task of another package.
  """
  config = with_keys(config)
  check_types(config, closed=True)
  if config.model is None:
    raise ValueError(
      'model is not set: use a config file that sets it, such as '
      'configs/pretrain.py:ti16,DATA (config.model)'
    )
  checks = list(schema.rules(config, common.Config))
  for check_keys in (
    _check_task,
    _check_evaluators,
    _check_named_functions,
    _check_model_fields,
    evaluations,
  ):
    checks.append(functools.partial(check_keys, config))
  schema.run_checks(checks)


def check_preprocessing(pp: ml_collections.ConfigDict) -> None:
  """Checks the values of `config.pp`; raises ValueError as `check_values` does."""
  schema.check_group(pp, common.Preprocessing, 'pp.', closed=False)
  schema.run_checks(schema.rules(pp, common.Preprocessing))


def _check_task(config: ml_collections.ConfigDict) -> None:
  """Checks the name of the task, and the options of a task of this package."""
  module = TASKS.get(config.task, config.task)
  user_code.check_exists(module, f"task='{config.task}'", _TASK_REMEDY)
  if config.task in TASKS:
    options_of_task(config)


def _check_evaluators(config: ml_collections.ConfigDict) -> None:
  """Checks that the modules of the evaluators exist, without importing them."""

  def check_one(name: str, type_: str) -> None:
    user_code.check_exists(
      type_.partition(':')[0],
      f"evaluators.{name}.type='{type_}'",
      f'{_EVALUATOR_REMEDY} (config.evaluators.{name}.type)',
    )

  schema.run_checks(
    functools.partial(check_one, name, entry['type'])
    for name, entry in config.evaluators.items()
  )


def _check_named_functions(config: ml_collections.ConfigDict) -> None:
  """Checks that the modules of optimiser and decay exist, without importing them."""
  for key in ('optimizer', 'decay_type'):
    if common.is_named_function(config[key]):
      module = config[key].partition(':')[0]
      setting = f"{key}='{config[key]}'"
      user_code.check_exists(module, setting, f'{named_functions.HINT} (config.{key})')


def _check_model_fields(config: ml_collections.ConfigDict) -> None:
  _check_model(config.model)


def _check_model(model: ml_collections.ConfigDict, name: str = 'model') -> None:
  for part in model_configs.parts_of(model).values():
    _check_model(model[part], f'{name}.{part}')
  fields = model.get('transformer') or model
  width = model.get('hidden_size')
  heads = fields.get('num_heads')
  if isinstance(heads, int) and isinstance(width, int) and width % heads:
    key = name if fields is model else f'{name}.transformer'
    raise ValueError(
      f'{key}.num_heads={heads} does not divide {name}.hidden_size={width}: '
      f'choose a divisor (config.{key}.num_heads)'
    )
  defaults = dict(schema.defaults(model_configs.Transformer))
  for key, (reader, values) in _READ_BY.items():
    default = defaults[key]
    value = fields.get(reader, defaults[reader])
    if fields.get(key, default) != default and value not in values:
      raise ValueError(
        f"{name}.transformer.{key}={fields[key]} has no effect with {reader}='{value}', "
        f'only with {" or ".join(values)}: leave it out, or set '
        f'--config.{name}.transformer.{reader}={values[0]}'
      )
  kind = position_kinds.kind_of(fields)
  if isinstance(width, int):
    position_kinds.check_width(kind, width)


def check_batch(config: ml_collections.ConfigDict, shards: int) -> None:
  """Raises ValueError unless devices and micro-batches divide the batches.

  `shards` is the number of parts into which the mesh splits a batch.
  """
  for key, accum in (('batch', config.accum_steps), ('batch_eval', None)):
    batch = config[key]
    unit = shards * (accum or 1)
    if batch % unit:
      factors = f' x accum_steps = {shards} x {accum}' if accum else f' = {shards}'
      raise ValueError(
        f'{key}={batch} is not a multiple of {unit} (devices that split the '
        f'batch{factors}): use '
        f'--config.{key}={max(1, round(batch / unit)) * unit}'
      )


def check_sequence(config: ml_collections.ConfigDict, shards: int) -> None:
  """Raises ValueError unless the model can split its tokens into `shards`.

  `shards` is the size of the mesh axis `sequence`.
  """
  if shards == 1:
    return
  vit = model_configs.vit_of(config.model)
  layers = model_configs.layers_of(config.model)
  place = f'config.{model_configs.place_of_layers(config.model)}'
  name = layers.get('attention')
  problem = None
  if not vit.get('transformer'):
    kind = model_configs.kind_of(config.model)
    problem = (
      f"splits the tokens of Vision Transformers only, not of kind='{kind}': use "
      '--config.mesh.fsdp or --config.mesh.data'
    )
  elif name == 'cudnn':
    problem = f"cannot split attention='cudnn': use 'default' ({place}.attention)"
  elif name == 'flash' and layers.get('causal'):
    problem = (
      f"cannot split causal attention='flash': use 'default' ({place}.attention)"
    )
  elif not vit.get('resnet') and not config.pp.sides:
    crop, patch = config.pp.crop, vit.patches.size
    height, width = (crop, crop) if isinstance(crop, int) else crop
    tokens = (height // patch[0]) * (width // patch[1])
    if tokens < shards:
      problem = f'is more than the {tokens} tokens of an image: use at most {tokens}'
  if problem:
    raise ValueError(f'sequence={shards} {problem} (--config.mesh.sequence)')


def check_memory(config: ml_collections.ConfigDict, processes: int) -> None:
  """Raises ValueError if the batches of a process do not fit its memory.

  `processes` share a batch; the limit is the smallest machine of all.
  """
  crop = config.pp.longest_side if config.pp.sides else config.pp.crop
  height, width = (crop, crop) if isinstance(crop, int) else crop
  image = 4 * height * width * config.pp.channels  # float32
  from vit_jax.distributed import processes as processes_lib  # Imports JAX.

  memory = min(processes_lib.gather('comparing memory', console.machine_memory()))
  for key in ('batch', 'batch_eval'):
    # The prefetched batches, and the current one.
    needed = -(-config[key] // processes) * image * (1 + config.prefetch)
    if needed > memory:
      raise ValueError(
        f'{key}={config[key]} and prefetch={config.prefetch}: the batches that a '
        f'process holds, images of {height} x {width} pixels, take '
        f'{console.size(needed)}, and this machine has {console.size(memory)}; lower '
        f'--config.{key} or --config.prefetch'
      )


def _base_splits(split: str) -> set[str]:
  """Returns the names in a split: 'train' for 'train[:90%]'."""
  return {part.split('[')[0].strip() for part in split.split('+')}


def with_test_folder(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a complete config, with `evals` on test/ if it is one of the original.

  The original reads train/ and test/ of a folder, and uses `pp.train` and
  `pp.test` only for TFDS. Here both keys apply to folders too, with one exception:
  if `pp.test` is part of the training images, the folder has a split `test`, and
  `evals` is empty, the config is assumed to be an original one, which has no folds.
  """
  train = _base_splits(config.pp.train)
  test = _base_splits(config.pp.test)
  if config.evals or not isinstance(config.dataset, str) or not test <= train:
    return config
  if schema.FOLD.search(config.pp.test):
    return config
  root = epath.Path(config.dataset)
  if 'test' in train or not (
    (root / 'test').is_dir() or (root / 'test.jsonl').exists()
  ):
    return config
  logging.warning(
    "pp.test='%s' is part of the training images, and '%s' has a split 'test': "
    'evaluating on that split, as in the original; set '
    "--config.evals=\"(('test', '%s'),)\" to evaluate on pp.test",
    config.pp.test,
    config.dataset,
    config.pp.test,
  )
  config = copy.deepcopy(config)
  config.evals = (('test', 'test'),)
  return config


def resolve_steps(
  config: ml_collections.ConfigDict, num_examples: int
) -> ml_collections.ConfigDict:
  """Returns a copy whose `total_steps` and `warmup_steps` are numbers.

  Its epochs are None, so that it can be resolved again. The default warm-up is
  common.default_warmup. `num_examples` is the size of the training split. ValueError
  if the length of the training is missing or below one step, or if the warm-up is
  not shorter.
  """
  total, epochs = config.total_steps, config.total_epochs
  if total is None and epochs is None:
    raise ValueError(
      'total_steps and total_epochs are None: set --config.total_steps=N or '
      '--config.total_epochs=N'
    )
  if total is None:
    total = round(epochs * num_examples / config.batch)
    if not total:
      raise ValueError(
        f'total_epochs={epochs} of {console.pluralize(num_examples, "example")} is less '
        f'than one batch of {config.batch}: raise --config.total_epochs, or lower '
        '--config.batch'
      )
    schema.check('total_steps', total, common.Steps)
  warmup, epochs = config.warmup_steps, config.warmup_epochs
  if warmup is not None:
    common.check_warmup(warmup, total)
  if warmup is None and epochs is None:
    warmup = common.default_warmup(total)
  elif warmup is None:
    warmup = round(epochs * num_examples / config.batch)
    if warmup >= total:
      warmup = total // 10
      logging.warning(
        f'warmup_epochs={epochs} would take the whole run of '
        f'{console.pluralize(total, "step")}: warm-up is '
        f'{console.pluralize(warmup, "step")}'
      )
  config = copy.deepcopy(config)
  config.update(
    total_steps=total, warmup_steps=warmup, total_epochs=None, warmup_epochs=None
  )
  return config
