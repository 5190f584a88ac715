"""Tests of broken and malicious weight files."""

import itertools
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests import broken_weights as files
from vit_jax import checkpoint
from vit_jax.weights import convert, reading


@pytest.mark.parametrize(
  'value, words',
  [
    (np.ones(3, np.int8), "'cls'.*int8.*float32"),
    (np.array([{}], object), 'Object arrays'),
  ],
)
def test_only_floats_are_read(tmp_path, value, words):
  path = tmp_path / 'a.npz'
  np.savez(path, cls=value)
  with pytest.raises(ValueError, match=f"a.npz'.*{words}"):
    checkpoint.load(str(path))


@pytest.mark.parametrize(
  'members',
  [
    [('cls.npy', files.claim((10**12,)))],
    [('a.npy', np.ones(1)), ('a/b.npy', np.ones(1))],
  ],
)
def test_rejects_damaged_archives(tmp_path, members):
  path = files.write_npz(tmp_path / 'a.npz', members)
  with pytest.raises(ValueError, match="a.npz'"):
    checkpoint.load(path)


@pytest.mark.parametrize(
  'source, name',
  [
    ('.', 'a.npz'),
    ('.', 'a.npz.json'),
    ('hf', 'model.safetensors'),
    ('hf', 'config.json'),
    ('hf', 'preprocessor_config.json'),
    ('hf', 'new.bin'),
    ('timm', 'config.json'),
  ],
)
def test_named_pipes_are_not_read(tmp_path, good, source, name):
  """Opening one would wait for a writer."""
  folder = shutil.copytree(good / source, tmp_path / 'files')
  (folder / name).unlink()
  os.mkfifo(folder / name)
  weights = folder / name.replace('.npz.json', '.npz')
  path = folder / 'model.safetensors' if name.endswith('config.json') else weights
  with pytest.raises(ValueError, match=f"{name}' is a named pipe, not a regular"):
    reading.read(str(path), num_heads=2)


def test_warns_about_non_finite_values(tmp_path, caplog):
  large = np.full(4, 3e38, np.float32)  # Its sum overflows.
  np.savez(
    tmp_path / 'a.npz', nan=np.array([1, np.nan]), good=np.ones(3), large=large,
    inf=np.array([np.inf, -np.inf], np.float16),
  )  # fmt: skip
  checkpoint.load(str(tmp_path / 'a.npz'))
  assert "a.npz' has NaN or infinite values in nan, inf:" in caplog.text


@pytest.mark.parametrize('name', ['/'.join(3001 * 'a'), 2000 * 'a'])
def test_rejects_deep_and_long_names(tmp_path, name):
  """Libraries that build trees call themselves once for each level."""
  arrays = {name: np.ones(2, np.float32)}
  np.savez(tmp_path / 'a.npz', **arrays)
  safetensors.numpy.save_file(arrays, tmp_path / 'a.safetensors')
  torch.save({name: torch.ones(2)}, tmp_path / 'a.pth')
  for ending in ('npz', 'safetensors', 'pth'):
    with pytest.raises(ValueError, match=rf"a\.{ending}' .* characters and .* levels"):
      reading.read(str(tmp_path / f'a.{ending}'))


@pytest.mark.parametrize(
  'state, words',
  [
    ({'a': [1.0]}, "'a'.*list"),
    ({'a': torch.ones(2).int()}, "'a'.*int32"),
    ([torch.ones(2)], 'not a state dict'),
  ],
)
def test_only_dense_float_tensors_are_read(tmp_path, state, words):
  torch.save(state, tmp_path / 'a.bin')
  with pytest.raises(ValueError, match=f"a.bin'.*{words}"):
    reading.read(str(tmp_path / 'a.bin'))


def test_rejects_float8_in_safetensors(tmp_path):
  data = {'a': torch.ones(2).to(torch.float8_e4m3fn)}
  safetensors.torch.save_file(data, tmp_path / 'a.safetensors')
  with pytest.raises(ValueError, match="a.safetensors'.*(?i:f(loat)?8_e4m3)"):
    reading.read(str(tmp_path / 'a.safetensors'))


@pytest.mark.parametrize('name', ['new.bin', 'old.bin'])
def test_pytorch_parameters_are_read(good, params, name):
  found = reading.read(str(good / 'hf' / name), num_heads=2).params
  np.testing.assert_array_equal(found['cls'], params['cls'])


@pytest.mark.parametrize('text', ['[]', '{'])
def test_rejects_json_that_is_not_an_object(tmp_path, good, text):
  (tmp_path / 'a.npz').write_bytes((good / 'a.npz').read_bytes())
  (tmp_path / 'a.npz.json').write_text(text)
  with pytest.raises(ValueError, match="a.npz.json'"):
    reading.read(str(tmp_path / 'a.npz'))


@pytest.mark.parametrize(
  'kind, fields, words',
  [
    ('npz', {'model': []}, 'model is .* must be'),
    ('npz', {'model': {'transformer': 3}}, "no key 'transformer'"),
    ('npz', {'model': {'transformer': {'num_layers': 9**9}}}, 'no key .*num_layers'),
    ('npz', {'model': {'transformer': {'norm_eps': 1e400}}}, 'norm_eps is inf'),
    ('npz', {'model': {'transformer': {'norm_eps': math.nan}}}, 'norm_eps is nan'),
    ('npz', {'model': {'transformer': {'norm_eps': True}}}, 'norm_eps is True'),
    ('npz', {'model': {'transformer': {'norm_eps': -1e-6}}}, 'norm_eps is -1e-06'),
    ('npz', {'model': {'transformer': {'norm_eps': 1e-99}}}, 'range of float32'),
    ('npz', {'model': {'transformer': {'rope_grid': [2**40, 1]}}}, 'range of .*int32'),
    ('npz', {'class_names': ['a']}, 'names is 1, but the head has 5'),
    ('npz', {'class_names': []}, 'names is 0, but the head has 5'),
    ('hf', {'id2label': {'a': 'b'}}, 'id2label.*object'),
    ('hf', {'id2label': {'00': 'b'}}, 'id2label.*object'),
    ('hf', {'num_attention_heads': 10**30}, 'num_attention_heads.*range of'),
    ('hf', {'layer_norm_eps': 1e400}, 'layer_norm_eps is inf'),
    ('hf', {'hidden_act': 'relu'}, "hidden_act.*'relu'"),
    ('hf', {'model_type': 'vitpose'}, "model_type is 'vitpose'"),
    ('timm', {'pretrained_cfg': {'input_size': 3}}, 'input_size.*3'),
  ],
)
def test_rejects_fields_of_the_wrong_type(tmp_path, good, kind, fields, words):
  weights, notes = 'model.safetensors', 'config.json'
  if kind == 'npz':
    weights, notes = 'a.npz', 'a.npz.json'
  source = good if kind == 'npz' else good / kind
  (tmp_path / weights).write_bytes((source / weights).read_bytes())
  config = json.loads((source / notes).read_text()) | {'model_args': {}}
  (tmp_path / notes).write_text(json.dumps(config | fields))
  with pytest.raises(ValueError, match=f"{notes}'.*{words}"):
    reading.read(str(tmp_path / weights))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'id2label': {'0': 'a'}}, 'names is 1, but the head has 5'),
    ({'num_hidden_layers': True}, 'num_hidden_layers is True'),
    ({'num_hidden_layers': 1e400}, 'num_hidden_layers is inf'),
  ],
)
def test_rejects_descriptions_that_do_not_fit(tmp_path, good, fields, message):
  shutil.copytree(good / 'hf', tmp_path / 'hf')
  config = json.loads((good / 'hf' / 'config.json').read_text())
  (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config | fields))
  with pytest.raises(ValueError, match=f"model.safetensors'.*{message}"):
    reading.read(str(tmp_path / 'hf'))


@pytest.mark.parametrize(
  'path, shape, message',
  [
    ('embedding/kernel', (4, 16), 'does not hold the parameters of a ViT'),
    ('head/kernel', (5,), r'head/kernel: \(5,\) in the weights, \(16, 5\) in'),
    ('Transformer/encoderblock_0/LayerNorm_1/bias', None, 'LayerNorm_1/bias: mis'),
    ('Transformer/encoderblock_999999999/LayerNorm_0/bias', (1,), 'not hold the'),
  ],
)  # fmt: skip
def test_rejects_parameters_with_wrong_names_or_shapes(
  tmp_path, params, path, shape, message
):
  changed = {k: v for k, v in params.items() if k != path}
  if shape is not None:
    changed[path] = np.ones(shape, np.float32)
  np.savez(tmp_path / 'a.npz', **changed)
  with pytest.raises(ValueError, match=message):
    convert.read(str(tmp_path / 'a.npz'))


@pytest.mark.parametrize(
  'kind, name, shape, message',
  [
    ('hf', 'vit.embeddings.patch_embeddings.projection.weight', (4,), '4 dimens'),
    ('timm', 'blocks.0.attn.qkv.weight', (16, 16), 'equal division'),
    ('timm', 'blocks.99999999.norm1.bias', (16,), 'numbered from 0 to 99999999'),
  ],
)  # fmt: skip
def test_rejects_tensors_with_wrong_names_or_shapes(
  tmp_path, good, kind, name, shape, message
):
  state = safetensors.numpy.load_file(good / kind / 'model.safetensors')
  state[name] = np.ones(shape, np.float32)
  safetensors.numpy.save_file(state, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match=f'model.safetensors.*{message}'):
    convert.read(str(tmp_path / 'model.safetensors'), num_heads=2, gelu='erf')


@pytest.mark.filterwarnings('ignore')
def test_broken_files_are_read_or_rejected(tmp_path, good):
  """No other errors occur, and no code in the files is executed."""
  rng = random.Random(0)
  marker = tmp_path / 'code_ran'
  folder = tmp_path / 'files'
  shutil.copytree(good, folder)
  rejected = 0
  for i, (name, data) in enumerate(
    itertools.islice(files.broken_files(rng, good, marker), 120)
  ):
    (folder / name).write_bytes(data)
    # A config is read with the weights next to it.
    path = folder / name.replace('config.json', 'model.safetensors')
    path = path.with_name(path.name.removesuffix('.json'))
    message = ''
    try:
      # Identifying the whole model is slower.
      (checkpoint.load if i % 20 else convert.read)(str(path))
    except ValueError as e:
      message = str(e)
    assert not message or str(folder) in message, (name, message)
    rejected += bool(message)
    (folder / name).write_bytes((good / name).read_bytes())
  assert 50 < rejected < 120
  assert not marker.exists()
