"""Writes a model's weights as npz, for timm, for Hugging Face, or as a workdir.

Every writer returns notes for the user: what the other library computes
differently, or what its files cannot hold.
"""

from collections.abc import Callable, Mapping
import functools
import json
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import flax.traverse_util
import jax
import ml_collections
import numpy as np

from vit_jax import console
from vit_jax.configs import common
from vit_jax.distributed import files
from vit_jax.weights import (
  arrays,
  descriptions,
  identify,
  peft,
  preparation as preparation_lib,
  published,
  reading,
)
from vit_jax.weights.families import families


class Model(NamedTuple):
  """A model with its weights and everything that a writer needs.

  Attributes that vit_jax.weights.reading.Weights does not have:
    config: fields of the model without `num_classes`.
    num_classes: width of the head; 0 without a head.
    source: format that the model was read from.
  """

  params: dict
  config: ml_collections.ConfigDict
  class_names: tuple[str, ...] | None
  num_classes: int
  image_size: tuple[int, int] | None
  extra: dict = {}  # noqa: RUF012
  metadata: dict = {}  # noqa: RUF012
  source: str = ''
  preparation: preparation_lib.Preparation = preparation_lib.Preparation()
  adapters: tuple | None = None
  omitted: tuple[str, ...] = ()


def check(model: Model, to: str) -> list[str]:
  """Returns notes; ValueError if a format cannot hold this model."""
  family = families.from_config(model.config)
  formats = family.formats_of(model.config)
  is_dino = (model.config.get('transformer') or {}).get('layer_scale') is not None
  if model.adapters and family.modules and 'hf' in formats and not is_dino:
    formats = (*formats, 'peft')
  if to not in formats:
    missing = family.missing(model.config, to) if to in family.formats else []
    reason = f', which cannot hold {", ".join(missing)}' if missing else ''
    raise ValueError(
      f'{identify.describe(model.params)} cannot be written as {to}{reason}: pass '
      f'--to={"|".join(formats)}'
    )
  notes = family.notes(model, to)
  if model.omitted:
    notes.append(
      f'not written, since only a run of this task has them: {", ".join(model.omitted)}'
    )
  return notes


def save(params: Mapping[str, Any], dst: str) -> None:
  """Writes parameters, a nested dict of arrays, under the published names.

  Arrays keep their types, except that bfloat16 becomes float32, since .npz cannot
  hold bfloat16. The file appears only when it is complete. ValueError if two arrays
  would get the same name in the file.
  """
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep='/')
  paths: dict[str, str] = {}  # By name in the file.
  named_arrays = {}
  for path, name in published.file_names(flat).items():
    if name in paths:
      raise ValueError(
        f"'{paths[name]}' and '{dst}' would both be named '{name}' in '{dst}', "
        'which uses the published names: rename the module (name=)'
      )
    paths[name] = path
    dtype = np.float32 if flat[path].dtype.name == 'bfloat16' else None
    named_arrays[name] = np.asarray(flat[path], dtype)
  head = 'resnet/head/conv2d/kernel'
  if head in named_arrays:  # Published BiT files hold it as a 1x1 convolution.
    named_arrays[head] = named_arrays[head][None, None]
  target = epath.Path(files.expanded(dst))
  target.parent.mkdir(parents=True, exist_ok=True)
  with files.replacing(target) as f:
    np.savez(f, **named_arrays)


def _write_npz(model: Model, dst: epath.Path) -> list[str]:
  model = scaled(model)
  family = families.from_config(model.config)
  stored: dict[str, Any] = {}
  if model.class_names:
    stored['class_names'] = list(model.class_names)
  default_config = identify.model_config(model.params)
  notes = family.difference_notes(
    'readers of .npz compute', model.config, default_config
  )
  fields = {}
  for key, value, _ in family.differences(model.config, default_config):
    fields[key] = value
  if fields:
    stored['model'] = flax.traverse_util.unflatten_dict(fields, sep='.')
  if prepared := preparation_lib.to_notes(model.preparation):
    stored['preparation'] = prepared
  for ending, content in family.npz_siblings(model).items():
    files.write(dst.with_suffix(ending), content)
  if stored:
    file = descriptions.notes_file(dst)
    files.write(file, json.dumps(stored, indent=1))
    notes.append(
      f'an .npz cannot hold {" and ".join(stored)}: they are in {file}, where this '
      'package finds them'
    )
  save(model.params, dst)
  return notes


def _write_folder(model: Model, dst: epath.Path, to: str) -> list[str]:
  """Writes model.safetensors, and the JSON files of a format."""
  family = families.from_config(model.config)
  naming = family.naming_of(model.config, to)
  state = family.dump(reading.leaves_of(model), naming) | family.buffers(model)
  contents, notes = family.files(model, to)
  if model.preparation.value_range is not None:
    notes.append(
      f'{to} has no place for the range of the values of images: '
      f'{model.preparation.value_range} become -1 to 1, or are standardised '
      '(config.pp.range, mean, std)'
    )
  dst.mkdir(parents=True, exist_ok=True)
  arrays.write_safetensors(dst / 'model.safetensors', state)
  for name, content in contents.items():
    (dst / name).write_text(json.dumps(content, indent=1))
  return notes


def _write_pth(model: Model, dst: epath.Path) -> list[str]:
  """Writes a detector under the names of the files released with DETR."""
  state = families.from_config(model.config).dump(reading.leaves_of(model), 'pth')
  if dst.suffix == '.safetensors':
    arrays.write_safetensors(dst, state)
    return []
  torch = console.require('torch', 'torch', f"writing '{dst}'")
  with files.replacing(dst) as file:
    torch.save({'model': jax.tree.map(torch.tensor, state)}, file)
  return []


def scaled(model: Model) -> Model:
  """Returns a model that reads pixels from -1 to 1, as runs have them."""
  return families.from_config(model.config).scaled(model)


def as_run(model: Model) -> tuple[ml_collections.ConfigDict, dict]:
  """Returns config and metadata of a finished run of one step, for a model."""
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model = model.config
  with config.ignore_type():
    config.pp.update(model.preparation.fields(model.image_size))
  config.update(total_steps=1, warmup_steps=0, batch=1, batch_eval=32)
  family = families.from_config(model.config)
  config.update(family.run(model))
  if config.pp.channels not in (1, 3) and config.pp.range is None:
    logging.warning(
      f'The weights are for images of {config.pp.channels} channels and do not say the '
      'range of their values: 0 to 255 become -1 to 1 (config.pp.range)'
    )
    config.pp.range = (0, 255)
  # Unnamed classes are named by their numbers.
  names = model.class_names or [str(i) for i in range(model.num_classes)]
  metadata = {'class_names': list(names), **family.metadata(model), **model.metadata}
  metadata_names = run_config.get_task(config.task).METADATA
  if missing := sorted(set(metadata_names) - set(metadata)):
    raise ValueError(
      f"a run of the task '{config.task}' needs {missing}, which these weights lack: "
      "put the model's preprocessor_config.json next to them"
    )
  return run_config.complete(config), {name: metadata[name] for name in metadata_names}


def _write_workdir(model: Model, dst: epath.Path) -> list[str]:
  # Imported late, since these modules import Orbax.
  from vit_jax.learning import optim, state as state_lib
  from vit_jax.run import checkpoints as checkpoints_lib, workdir as workdir_lib

  model = scaled(model)
  config, metadata = as_run(model)
  tx = optim.get_optimizer(config, lambda _: 0.0)
  params, extra = jax.tree.map(np.asarray, (model.params, model.extra))
  state = state_lib.TrainState(np.int32(1), params, jax.jit(tx.init)(params), extra)
  workdir_lib.create(dst, config, metadata, data={})
  checkpoints = checkpoints_lib.Checkpoints(dst)
  checkpoints.save(1, state)
  checkpoints.close()
  if model.num_classes and not model.class_names:
    return ['class names are unknown: pass --class_names=FILE']
  return []


WRITERS: dict[str, Callable[[Model, epath.Path], list[str]]] = {
  'npz': _write_npz,
  'timm': functools.partial(_write_folder, to='timm'),
  'hf': functools.partial(_write_folder, to='hf'),
  'peft': peft.write,
  'pth': _write_pth,
  'workdir': _write_workdir,
}
# Formats that are a single file -> how its name may end.
FILES = {'npz': ('.npz',), 'pth': ('.pth', '.safetensors')}
