"""Tests of files of weights that are broken, or made to do harm."""

import itertools
import json
import os
import random
import resource
import shutil

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests import broken_weights as files
from tests.weights import conftest
from vit_jax import checkpoint
from vit_jax.weights import convert, reading


@pytest.mark.parametrize(
  'value, message',
  [
    (np.array(['a', 'b']), "'cls' is of type str"),
    (np.array(['2020-01-01'], 'M8[D]'), "'cls' is of type datetime64"),
    (np.ones(3, np.complex64), "'cls' is of type complex64.*save it as float32"),
    (np.ones(3, bool), "'cls' is of type bool"),
    (np.ones(3, np.int8), "'cls' is of type int8"),
    (np.ones(3, [('a', 'f4')]), "'cls' is of type void"),
    (np.array([{}], object), 'Object arrays cannot be loaded'),
    (np.ones((0, 3), np.float32), r"'cls' of shape \(0, 3\) has no elements"),
  ],
)  # fmt: skip
def test_what_is_no_float_is_refused(tmp_path, value, message):
  path = tmp_path / 'a.npz'
  np.savez(path, cls=value)
  with pytest.raises(ValueError, match=f"a.npz' is not .*{message}"):
    checkpoint.load(str(path))


@pytest.mark.parametrize(
  'members, message',
  [
    ([('cls.npy', files.claim((10**12,)))], 'damaged'),
    ([('cls.npy', files.claim((10**30,)))], ''),
    ([('cls.npy', files.npy("{'descr': '<f4', 'shape': (3,"))], ''),
    ([('cls.npy', files.npy('(' * 5000))], ''),
    ([('readme.txt', b'hello, this is no array')], "'readme.txt' in it is no"),
    ([('a/' * 1000 + 'b.npy', np.ones(1))], 'has more than 32 parts'),
    ([('a.npy', np.ones(1)), ('a/b.npy', np.ones(1))], "'a' is both an array and"),
    ([('a.npy', np.ones(1)), ('a.npy', np.zeros(1))], "arrays named 'a'"),
    (
      [('params/cls.npy', np.ones(1)), ('cls.npy', np.zeros(1))],
      "several arrays named 'cls'",
    ),
  ],
)  # fmt: skip
@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_archives_that_are_no_tree_of_arrays(tmp_path, members, message):
  path = files.write_npz(tmp_path / 'a.npz', members)
  with pytest.raises(ValueError, match=f"a.npz' is not .*{message}"):
    checkpoint.load(path)


def test_values_that_are_not_finite_are_named(tmp_path, caplog):
  large = np.full(4, 3e38, np.float32)  # Its sum overflows.
  np.savez(
    tmp_path / 'a.npz', nan=np.array([1, np.nan]), good=np.ones(3), large=large,
    inf=np.array([np.inf, -np.inf], np.float16),
  )  # fmt: skip
  checkpoint.load(str(tmp_path / 'a.npz'))
  assert "a.npz' holds values that are NaN or infinite" in caplog.text
  assert caplog.text.rstrip().endswith(': nan, inf')


@pytest.mark.parametrize(
  'name, value, message',
  [
    (3, torch.ones(2), 'arrays by name: 3 is a Tensor'),
    ('a', [1.0], "arrays by name: 'a' is a list"),
    ('a', torch.ones(2, device='meta'), "'a' is on the device meta"),
    ('a', torch.eye(2).to_sparse(), "'a' is of the layout .*sparse_coo.*to_dense"),
    (
      'a',
      lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
      r"'a' is quantised: save it with .dequantize\(\)",
    ),
    ('a', torch.ones(2).to(torch.float8_e4m3fn), "'a' is of type float8_e4m3fn"),
    ('a', torch.ones(2).int(), "'a' is of type int32"),
  ],
)  # fmt: skip
@pytest.mark.filterwarnings('ignore')  # PyTorch warns of quantised tensors.
def test_tensors_that_are_refused(tmp_path, name, value, message):
  path = tmp_path / 'a.bin'
  torch.save({name: value() if callable(value) else value}, path)
  with pytest.raises(ValueError, match=f"a.bin' is not .*{message}"):
    reading.read(str(path))


def test_float8_in_safetensors_is_named(tmp_path):
  data = {'a': torch.ones(2).to(torch.float8_e4m3fn)}
  path = tmp_path / 'a.safetensors'
  safetensors.torch.save_file(data, path)
  with pytest.raises(
    ValueError,
    match="a.safetensors' .*'a' is of type F8_E4M3.*save it as float32",
  ):
    reading.read(str(path))


@pytest.mark.parametrize('name', ['new.bin', 'old.bin'])
def test_parameters_of_pytorch_are_read(good, params, name):
  found = reading.read(str(good / 'hf' / name), num_heads=2).params
  np.testing.assert_array_equal(found['cls'], params['cls'])


@pytest.mark.parametrize(
  'text',
  [
    'null', '[]', '5', '"a"', 'true', '[1, {}]', 'nan', '{', '[' * 10**5,
    '{"a": NaN}',
  ],
)  # fmt: skip
def test_json_of_another_type(tmp_path, good, text):
  (tmp_path / 'a.npz').write_bytes((good / 'a.npz').read_bytes())
  (tmp_path / 'a.npz.json').write_text(text)
  with pytest.raises(ValueError, match="a.npz.json' cannot be used: it "):
    reading.read(str(tmp_path / 'a.npz'))


def test_a_number_that_is_not_finite_is_refused(tmp_path, good):
  """JSON has no infinity, but Python reads 1e400 as one."""
  (tmp_path / 'a.npz').write_bytes((good / 'a.npz').read_bytes())
  (tmp_path / 'a.npz.json').write_text(
    '{"model": {"transformer": {"norm_eps": 1e400}}}'
  )
  with pytest.raises(ValueError, match="npz.json' .*1e400"):
    reading.read(str(tmp_path / 'a.npz'))


def test_a_tensor_in_two_shards_is_refused(tmp_path, good):
  folder = tmp_path / 'a'
  _, one, other, _ = conftest.write_shards(good, folder)
  state = safetensors.numpy.load_file(folder / one)
  name = next(iter(state))
  more = safetensors.numpy.load_file(folder / other)
  safetensors.numpy.save_file({**more, name: state[name]}, folder / other)
  with pytest.raises(ValueError, match=rf"{other}' .*{name}"):
    reading.read(str(folder))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'model': []}, r'model is \[\], but must be an object'),
    ({'class_names': [1, 2]}, r'class_names is \[1, 2\], but must be a list'),
  ],
)  # fmt: skip
def test_notes_of_another_type(tmp_path, good, fields, message):
  (tmp_path / 'a.npz').write_bytes((good / 'a.npz').read_bytes())
  (tmp_path / 'a.npz.json').write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=f"npz.json' cannot be used: {message}"):
    reading.read(str(tmp_path / 'a.npz'))


def test_a_pipe_is_not_waited_for(tmp_path):
  os.mkfifo(tmp_path / 'a.npz')
  with pytest.raises(ValueError, match="a.npz' is a pipe or a device"):
    reading.read(str(tmp_path / 'a.npz'))


@pytest.mark.parametrize('name', ['shard', 'index', 'config', 'bin'])
@pytest.mark.parametrize('kind', ['pipe', 'device'])
def test_pipes_and_devices_in_a_folder_are_not_read(tmp_path, good, name, kind):
  """None of them ends; a link to /dev/zero exists and has no end either."""
  folder = tmp_path / 'a'
  config, _, shard, index = conftest.write_shards(good, folder)
  if name == 'bin':
    (folder / index).unlink()
  path = folder / dict(
    shard=shard, index=index, config=config, bin='pytorch_model.bin'
  ).get(name)  # fmt: skip
  path.unlink(missing_ok=True)
  if kind == 'pipe':
    os.mkfifo(path)
  else:
    path.symlink_to('/dev/zero')
  with pytest.raises(ValueError, match=f"{path.name}' .*pipe or a device"):
    reading.read(str(folder))


@pytest.mark.parametrize(
  'kind, fields, message',
  [
    ('hf', {'num_attention_heads': 0}, 'num_attention_heads is 0, but must'),
    ('hf', {'num_attention_heads': []}, r'num_attention_heads is \[\], but'),
    ('hf', {'id2label': {'a': 'b'}}, 'id2label is .* but must be an object'),
    ('hf', {'id2label': ['a', 'b']}, 'id2label is'),
    ('hf', {'id2label': {'0': 7}}, "id2label is {'0': 7}"),
    ('hf', {'layer_norm_eps': -1}, 'layer_norm_eps is -1, but must be a'),
    ('hf', {'layer_norm_eps': 'x'}, "layer_norm_eps is 'x'"),
    ('hf', {'image_size': [8]}, r'image_size is \[8\]'),
    ('hf', {'hidden_act': 'relu'}, "hidden_act is 'relu', but must be one"),
    ('timm', {'model_args': 5}, 'model_args is 5, but must be an object'),
    ('timm', {'label_names': 'abc'}, "label_names is 'abc'"),
    ('timm', {'pretrained_cfg': {'input_size': 3}}, 'input_size is 3'),
  ],
)
def test_fields_of_another_type(tmp_path, good, kind, fields, message):
  folder = tmp_path / 'a'
  folder.mkdir()
  file = good / kind / 'model.safetensors'
  (folder / 'model.safetensors').write_bytes(file.read_bytes())
  config = json.loads((good / kind / 'config.json').read_text())
  if kind == 'timm':
    config['model_args'] = {}
  (folder / 'config.json').write_text(json.dumps({**config, **fields}))
  with pytest.raises(ValueError, match=f"config.json' cannot be used: {message}"):
    reading.read(str(folder))


@pytest.mark.parametrize(
  'path, shape, message',
  [
    ('embedding/kernel', (4, 16), 'does not hold the parameters of a ViT'),
    ('head/kernel', (5,), r'head/kernel: \(5,\) in the weights, \(16, 5\) in'),
    ('head/bias', (), r'head/bias: \(\) in the weights'),
    ('Transformer/encoder_norm/scale', (4, 4), r'encoder_norm/scale: \(4, 4\)'),
    ('Transformer/posembed_input/pos_embedding', (7,), 'not hold the parameters of a ViT'),
    ('Transformer/posembed_input/pos_embedding', (1, 1, 16), 'a.npz. cannot be used: '),
    ('Transformer/encoderblock_0/LayerNorm_0/bias', None, 'LayerNorm_0/bias: mis'),
    (
      'Transformer/encoderblock_999999999/LayerNorm_0/bias',
      (1,),
      'not hold the parameters of a ViT',
    ),
  ],
)  # fmt: skip
def test_parameters_of_other_ranks(tmp_path, params, path, shape, message):
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
    ('hf', 'vit.embeddings.patch_embeddings.projection.bias', (), r'width \d+ has'),
    ('hf', 'vit.layernorm.weight', (3, 3), 'cannot be used: it looks like'),
    ('timm', 'blocks.0.attn.qkv.weight', (16, 16), 'split into query, key and'),
    ('timm', 'blocks.99999999.norm1.bias', (16,), 'numbered from 0 to 99999999'),
    ('timm', 'blocks.0.attn.proj.weight', (16,), 'must have 2 dimensions'),
  ],
)  # fmt: skip
def test_tensors_of_other_ranks(tmp_path, good, kind, name, shape, message):
  state = safetensors.numpy.load_file(good / kind / 'model.safetensors')
  state[name] = np.ones(shape, np.float32)
  safetensors.numpy.save_file(state, tmp_path / 'model.safetensors')
  told = {} if 'width' in message else {'num_heads': 2, 'gelu': 'erf'}
  with pytest.raises(ValueError, match=f'model.safetensors.*{message}'):
    convert.read(str(tmp_path / 'model.safetensors'), **told)


@pytest.mark.filterwarnings('ignore')
def test_broken_files_are_read_or_refused_by_name(tmp_path, good):
  """Of 1,000 broken files each is read, or its name and ValueError come."""
  rng = random.Random(0)
  marker = tmp_path / 'code_ran'
  folder = tmp_path / 'files'
  shutil.copytree(good, folder)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  refused = 0
  for i, (name, data) in enumerate(
    itertools.islice(files.broken_files(rng, good, marker), 1000)
  ):
    (folder / name).write_bytes(data)
    # A description is read with the weights beside it.
    path = folder / name.replace('config.json', 'model.safetensors')
    path = path.with_name(path.name.removesuffix('.json'))
    message = ''
    try:
      # To make out the whole model takes longer.
      (checkpoint.load if i % 20 else convert.read)(str(path))
    except ValueError as e:
      message = str(e)
    assert not message or str(folder) in message, (name, message)
    refused += bool(message)
    (folder / name).write_bytes((good / name).read_bytes())
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert 500 < refused < 1000
  assert not marker.exists()
  assert after - before < 2**20  # KiB.
