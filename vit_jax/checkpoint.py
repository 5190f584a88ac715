"""Reads weights into a model's parameters, and writes parameters as .npz.

All formats of vit_jax.weights.reading can be read. Parameters are written as
.npz under the published names, which the original's readers and timm's
`load_npz` read.
"""

from collections.abc import Mapping, Sequence
import contextlib
from typing import Any

from absl import logging
import flax.core
import flax.traverse_util
import ml_collections

from vit_jax import console, models, preprocess
from vit_jax.configs import common, models as model_configs, schema
from vit_jax.distributed import files
from vit_jax.weights import (
  descriptions,
  fetch,
  fitting,
  identify,
  paths,
  preparation,
  published,
  reading,
  writing,
)
from vit_jax.weights.families import families, text, vit

_PP = common.Preprocessing()  # The defaults.

copy = fetch.copy
save = writing.save
interpolate_posembed = fitting.interpolate_posembed
transferable = fitting.transferable
augreg_filename = paths.augreg_filename


def recover_tree(keys: Sequence[str], values: Sequence[Any]) -> dict:
  """Makes a nested dict from '/'-joined keys and their values."""
  return flax.traverse_util.unflatten_dict(dict(zip(keys, values)), sep='/')


def load(path: str) -> dict:
  """Loads parameters as a nested dict of numpy arrays, with Linen's names.

  Args:
    path: a published .npz, a .safetensors or .bin of timm or Hugging Face (or a
      folder with such a file and its config.json), or the workdir of a run;
      local, https://, gs://, or hf://OWNER/NAME, see vit_jax/weights/hub.py.

  Raises what vit_jax.weights.reading.read does.
  """
  weights = reading.read(path)
  if weights.kind != 'workdir':
    fitting.note_differences(weights, identify.model_config(weights.params) or {})
  return weights.params


def inspect_params(
  *,
  params: dict,
  expected: dict,
  fail_if_extra: bool = True,
  fail_if_missing: bool = True,
) -> dict:
  """Returns `params` if its leaves have the names of `expected`.

  Both are nested dicts; shapes are not compared. ValueError lists the leaves that
  are extra or missing, if these flags make them errors.
  """
  names = flax.traverse_util.flatten_dict(params, sep='/').keys()
  expected_names = flax.traverse_util.flatten_dict(expected, sep='/').keys()
  missing = sorted(expected_names - names)
  extra = sorted(names - expected_names)
  if missing:
    logging.info('The weights lack: %s', missing)
  if extra:
    logging.info('The model lacks these leaves of the weights: %s', extra)
  fitting.fail_for(
    (), missing if fail_if_missing else [], extra if fail_if_extra else []
  )
  return params


def load_pretrained(
  *,
  pretrained_path: str,
  init_params: dict,
  model_config: ml_collections.ConfigDict,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> flax.core.FrozenDict:
  """Loads weights for fine-tuning (appendix B.1.1).

  The head keeps the values of `init_params` (zeros in a new model), and so does
  a pre-logits layer that the file lacks. A pre-logits layer that the model
  lacks is dropped. Position embeddings are resized, and patch embeddings to another
  patch size (vit_jax.weights.fitting.resize_patches), with a warning. Parameters that
  published models lack, such as adapters, keep their initial values if the file lacks
  them, with a warning. Layers of the file that the model lacks are ignored, with a
  warning.

  Args:
    pretrained_path: see `load`.
    init_params: initial parameters of the model.
    model_config: config of the model; reads `representation_size` and
      `transformer`.
    grid: (height, width) in patches of the weights; None: as in the file, or else
      a square.
    new_grid: (height, width) in patches of the model; None: a square.

  Returns:
    Parameters with the shapes of `init_params`, frozen as in the original:
    `.unfreeze()` converts them to a nested dict.

  Raises:
    FileNotFoundError, OSError, ImportError: see vit_jax.weights.reading.read.
    ValueError: if the file is damaged, or the weights do not fit; names the leaves,
      both shapes, and the model that the weights look like.
  """
  loaded = fitting.transferable(
    pretrained_path, init_params, model_config, grid, new_grid, partly=True
  )
  init = flax.traverse_util.flatten_dict(init_params, sep='/')
  params = flax.traverse_util.unflatten_dict({**init, **loaded}, sep='/')
  return flax.core.freeze(params)


# Fields of a model that are free for any weights.
_FREE = {
  'attention',
  'attention_dropout_rate',
  'attention_pattern',
  'attention_window',
  'classifier',
  'dropout_rate',
  'dtype',
  'head_bias_init',
  'head_init',
  'kind',
  'layer_scale',
  'model_name',
  'param_dtype',
  'patches.size',
  'pool_norm',
  'position_grid',
  'remat',
  'representation_size',
  'scan',
  'stochastic_depth',
}


def with_model(
  config: ml_collections.ConfigDict, stored: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
  """Returns a config with the model of its weights, if it asks for that.

  A model of the kind 'pretrained' becomes the one in `config.pretrained`, of an
  image-text model the image tower, without pre-logits, with the fields that the config
  sets, such as dropout. So does a model of a kind that extends Vision Transformers, which
  keeps its kind, if the config does not set its sizes. The model in `stored`, the stored
  config of the run, replaces the weights. For errors see vit_jax.weights.reading.read;
  ValueError also for a field that contradicts the weights, and for weights of other
  models.
  """
  if not config.get('model') or not model_configs.is_of_weights(config.model):
    return config
  config = config.copy_and_resolve_references()
  overrides = config.model.to_dict()
  if overrides['kind'] == model_configs.PRETRAINED:
    del overrides['kind']
  stored_model = (stored or {}).get('model')
  model = ml_collections.ConfigDict(
    stored_model or _pretrained_model(config, overrides)
  )
  if not stored_model:
    _check_overrides(config, model, overrides)
  with config.unlocked(), model.ignore_type():
    model.update(overrides)
    config.model = model
  return config


def _check_overrides(
  config: ml_collections.ConfigDict,
  model: ml_collections.ConfigDict,
  overrides: Mapping[str, Any],
) -> None:
  """Raises ValueError if fields of the config contradict the model of its weights."""
  fields = flax.traverse_util.flatten_dict(
    model_configs.with_options(model).to_dict(), sep='.'
  )
  # Such as the number of queries of an EoMT.
  kind = model_configs.FIELDS.get(overrides.get('kind', ''), model_configs.Vit)
  extending_fields = (
    schema.fields(kind).keys() - schema.fields(model_configs.Vit).keys()
  )
  for key, value in flax.traverse_util.flatten_dict(overrides, sep='.').items():
    is_free = {key, key.rpartition('.')[2]} & (_FREE | extending_fields)
    if not is_free and value != fields.get(key):
      raise ValueError(
        f"model.{key}={value}, but the weights in pretrained='{config.pretrained}' are "
        f'of a model with {fields.get(key)}: leave out --config.model.{key}'
      )


def with_preparation(
  config: ml_collections.ConfigDict, stored: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
  """Returns a config that prepares images as its weights say, if it asks for that.

  With `config.pp.match_pretrained`, keys of `config.pp` that have their defaults become
  what the files next to the weights of the model, or of its image tower, say. `stored`
  is the stored config of the run, which replaces the weights. For errors see
  vit_jax.weights.reading.read.
  """
  if not config.pp.get('match_pretrained'):
    return config
  config = config.copy_and_resolve_references()
  if stored:
    fields = stored['pp']
  else:
    weights_by_part = paths.from_config(config)
    path = weights_by_part.get('', weights_by_part.get('img'))
    if path is None:
      return config
    is_whole = '' in weights_by_part
    model = config.model if is_whole else model_configs.vit_of(config.model)
    with paths.with_remedy(config):
      stated = reading.read_preparation(
        path, fitting.heads(model), config.get('pretrained_entry')
      )
    if not stated.source or stated.longest_side is not None:
      return config
    if config.pp.crop != _PP.crop or stated.crop is None:
      stated = stated.at_size(preprocess.crop_size(config.pp))
    fields = stated.fields(stated.crop)
  with config.unlocked(), config.pp.ignore_type():
    for key in preparation.KEYS:
      if key in fields and config.pp[key] == getattr(_PP, key):
        config.pp[key] = descriptions.as_tuple(fields[key])
  if not stored:
    console.notify(
      f"Preparing images as the weights' {stated.source} says: "
      f'{preparation.from_pp(config.pp)} (--config.pp.match_pretrained=False: as config.pp '
      'says)'
    )
  return config


def _pretrained_model(
  config: ml_collections.ConfigDict, overrides: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields of the model in `config.pretrained`, a classifier."""
  path = config.get('pretrained')
  if not isinstance(path, str):
    raise ValueError(
      f'pretrained={path}, but the config takes the model from weights: '
      'name them (--config.pretrained=PATH)'
    )
  encoder = overrides.get('transformer') or {}
  weights = reading.read(
    path, encoder.get('num_heads'), entry=config.get('pretrained_entry')
  )
  family = families.from_tree(reading.leaves_of(weights))
  weights = family.part(weights, 'img') or weights
  if not isinstance(families.from_tree(reading.leaves_of(weights)), vit.Classifiers):
    raise ValueError(
      f"pretrained='{path}' holds {family.noun}, not {vit.Classifiers.noun}: name a "
      'model in the config instead (--config)'
    )
  model = identify.model_config(weights.params, weights.model)
  if model is None:
    raise ValueError(f"pretrained='{path}' does not specify the sizes of its model")
  fields = flax.traverse_util.flatten_dict(dict(weights.model))
  for key, value in fields.items():
    if key[-1] == 'gelu' and value is None:
      fields[key] = encoder.get('gelu')
      if fields[key] is None:
        raise ValueError(
          f"pretrained='{path}' does not specify its GELU: set "
          '--config.model.transformer.gelu=erf, tanh or quick'
        )
  with model.ignore_type():
    model.update(flax.traverse_util.unflatten_dict(fields))
    model.representation_size = None
  return model.to_dict()


def check_exists(config: ml_collections.ConfigDict) -> None:
  """Checks that the weights of a config can be read, without reading them.

  Raises:
    FileNotFoundError: if they are local and do not exist; names the path.
    ImportError: if a package is missing; names the extra to install.
  """
  paths.check_exist(config)
  for path in paths.from_config(config).values():
    reading.check_packages(path)


def pretrained_weights(
  config: ml_collections.ConfigDict, task: Any, params: Any, extra: Any = None
) -> dict:
  """Loads the weights of a config, arrays by '/'-joined path; {} if it names none.

  `config` gives `pretrained`, `pretrained_dir`, `model` and `pp.crop`; the task its
  `new_params`, which keep their initial values. `params` are shapes, and so is the
  extra state, if any. Weights include its collections in
  vit_jax.weights.reading.EXTRA; `pretrained` may name others, such as the parameters
  of a teacher of the same model, {'teacher': PATH}.
  """
  extra = extra or {}
  published_extra = {k: v for k, v in extra.items() if k in reading.EXTRA}
  weights: dict[str, Any] = {}
  for part, path in paths.from_config(config).items():
    collections = sorted({*params, *extra})
    if part and part not in collections:
      raise ValueError(
        f"pretrained={{'{part}': '{path}'}}: the model has no parameters "
        f"'{part}/', but {collections}; name one of these (config.pretrained)"
      )
    with paths.with_remedy(config):
      if part in extra:
        loaded = _transferable(config, path, extra[part], part, new=())
      else:
        loaded = _part_weights(config, part, path, task, params, published_extra)
    repeated = {name.split('/')[0] for name in loaded.keys() & weights.keys()}
    repeated_parts = sorted(repeated & params.keys())
    if repeated_parts:
      raise ValueError(
        f'pretrained={paths.from_config(config)} names two weights for '
        f"'{repeated_parts[0]}/': leave out one of them (config.pretrained)"
      )
    weights |= loaded
  return weights


def _part_weights(
  config: ml_collections.ConfigDict,
  part: str,
  path: str,
  task: Any,
  params: Any,
  extra: Any,
) -> dict:
  """Returns the weights of a part of a model from a file; '': of the whole.

  1. A part that is itself a model (in `models_by_part`), such as an image tower, starts from
     weights of such a model.
  2. A whole model starts from the weights of such a part, if the file has those: a
     detector with a Vision Transformer starts from a classifier.
  3. Otherwise, the file has weights of the whole model, of which `part` is taken.
  """
  models_by_part = model_configs.parts_of(config.model)  # {'img': 'image'}
  if part == 'txt' and model_configs.kind_of(config.model) == 'lit':
    models_by_part = {'txt': 'text'}
  new = ('head', 'pre_logits/')
  if part in models_by_part:
    key = models_by_part[part]
    return _transferable(config, path, params[part], part, key, new=new, part=part)
  if not part:
    for name, key in models_by_part.items():
      with contextlib.suppress(fitting.OtherModelError):
        return _transferable(config, path, params[name], name, key, new=new)
  loaded = _transferable(
    config,
    path,
    {**params, **extra},
    new=task.new_params,
    adapt=task.adapt_weights,
  )
  if not part:
    return loaded
  prefixes = tuple(f'{name}/' for name in (part, *extra))
  return {name: x for name, x in loaded.items() if name.startswith(prefixes)}


def _transferable(
  config: ml_collections.ConfigDict,
  path: str,
  expected: Any,
  name: str = '',
  key: str | None = None,
  **kwargs: Any,
) -> dict:
  """Calls `transferable` for a run's model, or for `config.model[key]`.

  `name` is the prefix of its parameters in the run's; '' for the whole model.
  """
  model = config.model
  place = 'model'
  if key not in (None, 'text'):
    model = config.model[key]
    place = f'model.{key}'
  image = model_configs.vit_of(model)
  encoder = image.get('transformer') or {}
  new_grid = encoder.get('position_grid')
  if not new_grid:
    new_grid = models.patch_grid(image, preprocess.crop_size(config.pp))
  prepared: preparation.Preparation | None = preparation.from_pp(config.pp)
  if key == 'text':
    model, place = text.tower_config(model)
    prepared = None
  loaded = transferable(
    path,
    expected,
    model,
    config.pretrained_grid,
    new_grid,
    place=place,
    prepared=prepared,
    entry=config.pretrained_entry,
    **kwargs,
  )
  if not name:
    return loaded
  return {f'{name}/{leaf}': x for leaf, x in loaded.items()}


def _fix_groupnorm(params: Any) -> dict[str, Any]:
  """Reshapes GroupNorms of old files to vectors; users of the original call it."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  flat = {path: published.without_ones(path, leaf) for path, leaf in flat.items()}
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def get_augreg_df(directory: str = 'gs://vit_models/augreg') -> Any:
  """Reads the index of the AugReg checkpoints (arXiv 2106.10270).

  Returns a pandas.DataFrame with one row per fine-tuned checkpoint. Columns: `name`
  of the model; `ds`, `lr`, `aug`, `wd`, `do`, `sd` of pre-training and its accuracy
  `best_val`, `final_val`, `final_test`; `adapt_ds`, `adapt_lr`, `adapt_steps`,
  `adapt_resolution` of fine-tuning and its accuracy `adapt_final_val`,
  `adapt_final_test`; `params`; `infer_samples_per_sec`; `filename` and
  `adapt_filename` of the checkpoints before and after fine-tuning, without .npz.
  `directory` has the index.csv; OSError if it cannot be read.
  """
  pd = console.require('pandas', 'colab', 'get_augreg_df')
  with files.open_input(paths.augreg_index(directory)) as file:
    return pd.read_csv(file)
