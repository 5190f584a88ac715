"""Weight files shared by several tests."""

import json

import flax.traverse_util
import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

from tests import tiny_models
from vit_jax import checkpoint
from vit_jax.weights import convert
from vit_jax.weights.families import base, families, lit

# Model fields that do not affect any shape.
_VALUES = {'gelu', 'norm_eps', 'eps', 'dropout_rate', 'attention_dropout_rate'}


def sizes(fields):
  """Returns nested fields without the ones in `_VALUES`."""
  if not isinstance(fields, dict):
    return fields
  return {k: sizes(x) for k, x in fields.items() if k not in _VALUES}


def cached(function):
  """Caches a family's `shapes`, so that models of equal sizes are traced once."""
  results = {}

  def shapes(self, config, params, num_classes, size):
    fields = sizes(json.loads(config.to_json_best_effort()))
    param_shapes = str(jax.tree.map(np.shape, params))
    key = json.dumps(fields, sort_keys=True), param_shapes, num_classes, size
    if key not in results:
      results[key] = function(self, config, params, num_classes, size)
    return dict(results[key])

  return shapes


@pytest.fixture(scope='session', autouse=True)
def _cache_shapes():
  """Reading weights spends most of its time on tracing models."""
  with pytest.MonkeyPatch.context() as patch:
    for family in (base.Family, lit.ImageTexts):
      patch.setattr(family, 'shapes', cached(family.shapes))
    yield


@pytest.fixture(scope='session')
def params():
  """Parameters of a tiny model for 8x8 images, by their Linen names."""
  nested = tiny_models.numbers(tiny_models.tiny(), 8)
  return flax.traverse_util.flatten_dict(nested, sep='/')


@pytest.fixture(scope='session')
def good(tmp_path_factory, params):
  """A folder of valid files, which other tests corrupt."""
  folder = tmp_path_factory.mktemp('good')
  nested = flax.traverse_util.unflatten_dict(params, sep='/')
  checkpoint.save(nested, str(folder / 'a.npz'))
  np.savez_compressed(folder / 'b.npz', **params)
  notes = {
    'class_names': list('abcde'),
    'model': {'transformer': {'gelu': 'erf', 'norm_eps': 1e-12}},
  }
  (folder / 'a.npz.json').write_text(json.dumps(notes))
  for name in ('timm', 'hf'):
    convert.convert(str(folder / 'a.npz'), str(folder / name), name)
  state = families.from_config({}).dump(params, 'hf')
  state = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in state.items()}
  torch.save(state, folder / 'hf' / 'new.bin')
  torch.save(state, folder / 'hf' / 'old.bin', _use_new_zipfile_serialization=False)
  return folder


def write_shards(good, folder):
  """Writes the weights of good/hf as two shards and an index."""
  state = safetensors.numpy.load_file(good / 'hf' / 'model.safetensors')
  names = sorted(state)
  folder.mkdir()
  table = {}
  for i, some in enumerate((names[::2], names[1::2])):
    file = f'model-{i + 1:05}-of-00002.safetensors'
    safetensors.numpy.save_file({k: state[k] for k in some}, folder / file)
    table |= dict.fromkeys(some, file)
  index = {'metadata': {'total_size': 1}, 'weight_map': table}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  config = (good / 'hf' / 'config.json').read_text()
  (folder / 'config.json').write_text(config)
  return sorted(path.name for path in folder.iterdir())


def merged(old, new):
  """Merges `new` into a nested dict; None removes a key."""
  both = {
    k: merged(old[k], x) if isinstance(x, dict) and k in old else x
    for k, x in dict(new).items()
  }
  return {k: x for k, x in {**old, **both}.items() if x is not None}


def changed(folder, there, arrays=(), **fields):
  """Writes a copy with changed arrays and JSON fields (by file stem)."""
  state = safetensors.numpy.load_file(folder / 'model.safetensors')
  there.mkdir(exist_ok=True)
  safetensors.numpy.save_file(merged(state, arrays), there / 'model.safetensors')
  for file in folder.glob('*config.json'):
    content = merged(json.loads(file.read_text()), fields.get(file.stem, {}))
    (there / file.name).write_text(json.dumps(content))
  return str(there)
