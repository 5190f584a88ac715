"""Tests of reading every kind of weights, and of rejecting other files."""

import gc
import json
import pickle
import sys
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests import broken_weights, tiny_models, torch_models
from vit_jax import checkpoint, models
from vit_jax.configs import common
from vit_jax.weights import convert, reading
from vit_jax.weights.families import vit_files

# Imported through torch_models, which sets up its environment.
timm = torch_models.timm


def test_warns_about_an_unsupported_pixel_range(tmp_path, caplog):
  torch_models.hf_model().save_pretrained(tmp_path / 'hf')
  file = tmp_path / 'hf' / 'preprocessor_config.json'
  means, half = {'image_mean': [0.485, 0.456, 0.406]}, {'image_std': [0.5] * 3}
  for fields, warns in (
    ({'image_mean': [0.5] * 3, **half}, False),
    ({**means, **half}, False),  # The patch embedding absorbs it.
    ({'image_mean': [0.2], 'image_std': [0.1]}, True),  # One channel.
  ):
    file.write_text(json.dumps(fields))
    found = reading.read(str(tmp_path / 'hf'))
    assert ('scaled by mean=(0.2,) and std=(0.1,)' in caplog.text) == warns
    want = 0.5 if warns else tuple(fields['image_mean'])
    np.testing.assert_allclose(found.preparation.mean, want)
  file.write_text(json.dumps({**means, 'image_std': [0.2, 0.0, 0.2]}))
  with pytest.raises(ValueError, match='preprocessor_config.json.*image_std is'):
    reading.read(str(tmp_path / 'hf'))


def test_the_choice_among_variants_of_a_file_is_logged(tmp_path, caplog):
  torch_models.hf_model().save_pretrained(tmp_path)
  file = tmp_path / 'model.safetensors'
  (tmp_path / 'model.fp16.safetensors').write_bytes(file.read_bytes())
  file.rename(tmp_path / 'model.bf16.safetensors')
  assert reading.read(str(tmp_path)).kind == 'hf'
  assert "reading 'model.bf16.safetensors', not 'model.fp16.saf" in caplog.text


@pytest.fixture
def timm_folder(tmp_path):
  """A tiny ViT in timm's format; a function that changes its config.json."""
  params = tiny_models.numbers(tiny_models.tiny(), 8)
  checkpoint.save(params, str(tmp_path / 'a.npz'))
  convert.convert(str(tmp_path / 'a.npz'), str(tmp_path / 'timm'), 'timm')
  file = tmp_path / 'timm' / 'config.json'
  fields = json.loads(file.read_text())

  def change(args=None, **changes):
    args = fields['model_args'] if args is None else args
    file.write_text(json.dumps({**fields, 'model_args': args, **changes}))
    return str(tmp_path / 'timm')

  return change


def test_rejects_unsupported_pooling(timm_folder):
  message = "global_pool is 'max', but must be one of .*'token'"
  for change in {'args': {'global_pool': 'max'}}, {'args': {}, 'global_pool': 'max'}:
    with pytest.raises(ValueError, match=message):
      reading.read(timm_folder(**change))


def test_fields_missing_in_the_config_must_be_passed(timm_folder):
  folder = timm_folder({}, architecture='vit_unknown')
  for fields, missing in (({'gelu': 'erf'}, 'heads'), ({'num_heads': 2}, 'GELU')):
    with pytest.raises(ValueError, match=f'{missing}.*--(num_heads|gelu)'):
      convert.read(folder, **fields)
  found = convert.read(folder, num_heads=2, gelu='erf').config.transformer
  assert (found.num_heads, found.gelu) == (2, 'erf')


@pytest.mark.filterwarnings('ignore:Mapping deprecated model name')  # By timm.
@pytest.mark.parametrize(
  'name, heads',
  [
    ('vit_base_patch16_224_in21k', 12),
    ('vit_small_r26_s32_224', 6),
    ('vit_tiny_r_s16_p8_224', 3),
    ('beitv2_large_patch16_224.in1k_ft_in1k', 16),
    ('beit3_giant_patch14_224', 16),
    ('vit_base_patch16_gap_224', 16),
    ('vit_base_patch32_plus_256', 14),
    ('vit_large_patch14_reg1_tipsv2', 16),
    ('vit_small_patch16_36x1_224', 6),
    ('test_vit2', 2),
  ],
)
def test_heads_and_gelu_follow_from_timm_names(name, heads):
  with torch.device('meta'):
    theirs = timm.create_model(name.partition('.')[0], depth=1)
  found = vit_files.from_timm({'architecture': name}, 'token')
  block = theirs.blocks[0]
  assert found.num_heads == heads == block.attn.num_heads
  assert found.model['transformer']['gelu'] == 'erf'
  assert found.model['transformer']['norm_eps'] == block.norm1.eps
  assert (block.mlp.act.__class__, block.mlp.act.approximate) == (
    torch.nn.GELU, 'none',
  )  # fmt: skip


def test_num_heads_must_match_the_config(timm_folder):
  args = {'num_heads': 4, 'act_layer': 'gelu'}
  folder = timm_folder(args, architecture='vit_base_patch16_224')
  with pytest.raises(ValueError, match='num_heads=2, .* 4.*--num_heads'):
    convert.read(folder, num_heads=2)


def test_gelu_must_match_the_config(timm_folder):
  with pytest.raises(ValueError, match="gelu='tanh'.*erf.*--gelu"):
    convert.read(timm_folder({'num_heads': 2, 'act_layer': 'gelu'}), gelu='tanh')


def test_run_warns_about_a_different_gelu(tmp_path, caplog):
  torch_models.hf_model().save_pretrained(tmp_path / 'hf')
  config = convert.read(str(tmp_path / 'hf')).config
  config.transformer.gelu = 'tanh'
  model = models.make_model(config, num_classes=5)
  checkpoint.load_pretrained(
    pretrained_path=str(tmp_path / 'hf'),
    init_params=tiny_models.numbers(model, (16, 12)),
    model_config=config,
    new_grid=(4, 3),
  )
  assert 'gelu=erf, this model computes with tanh' in caplog.text
  assert 'norm_eps' not in caplog.text
  caplog.clear()
  checkpoint.load(str(tmp_path / 'hf'))
  assert 'gelu=erf, this model computes with tanh' in caplog.text


def test_half_precision_is_kept(good, params, tmp_path):
  state = safetensors.torch.load_file(good / 'hf' / 'model.safetensors')
  path = tmp_path / 'half.safetensors'
  safetensors.torch.save_file({k: x.bfloat16() for k, x in state.items()}, path)
  got = reading.read(str(path), num_heads=2).params['cls']
  assert got.dtype.name == 'bfloat16'
  np.testing.assert_array_equal(got, params['cls'].astype(got.dtype))


def test_rejects_pickles_unknown_names_and_empty_folders(tmp_path):
  bomb = broken_weights.Bomb(tmp_path / 'boom')
  (tmp_path / 'bomb.bin').write_bytes(pickle.dumps({'a': bomb}, protocol=2))
  torch.save({'a': bomb}, tmp_path / 'bomb.pth')
  for name in ('bomb.bin', 'bomb.pth'):
    with pytest.raises(
      ValueError, match=r'pickled objects \(getattr\), which are never'
    ):
      reading.read(str(tmp_path / name))
  assert not (tmp_path / 'boom').exists()
  safetensors.numpy.save_file({'a': np.ones(3)}, tmp_path / 'other.safetensors')
  with pytest.raises(ValueError, match='other.safetensors.*names.*a'):
    reading.read(str(tmp_path / 'other.safetensors'))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ValueError, match='empty.*checkpoints'):
    reading.read(str(tmp_path / 'empty'))


@pytest.mark.parametrize(
  'name', ['model.onnx', 'model.stablehlo', 'saved_model.pb', '1/saved_model.pb']
)
def test_exported_models_are_not_weights(tmp_path, name):
  file = tmp_path / name
  file.parent.mkdir(exist_ok=True)
  file.touch()
  for path in tmp_path, file:
    with pytest.raises(ValueError, match=f"'{path}' is an exported model.*the run or"):
      reading.read(str(path))


def test_an_archive_must_be_unpacked(tmp_path):
  (tmp_path / 'a.zip').touch()
  with pytest.raises(ValueError, match="a.zip' is an archive: unpack it"):
    reading.read(str(tmp_path / 'a.zip'))


@pytest.mark.parametrize(
  'name, fields, message',
  [
    ('vit_base_patch16_rpn_224', {}, "architecture is 'vit_base_patch16_rpn_224'"),
    ('vit_small_patch16_rope_mixed_224', {}, 'rope.freqs.*frequencies of rotary'),
    ('vit_base_patch16_sapiens2', {'num_kv_heads': 2}, 'LayerScale of attention'),
    ('vit_pe_spatial_tiny_patch16_512', {}, 'no norm after its layers'),
    ('vit_base_patch16_radio_v3', {}, 'no norm after its layers'),
    ('vit_intern300m_patch14_448', {}, 'no norm after its layers'),
    ('test_vit3', {}, 'pooling reads registers too'),
    ('aimv2_large_patch14_224', {}, 'a norm of the patches'),
    ('vit_dwee_patch16_reg1_gap_256', {}, 'differential attention'),
    ('vit_relpos_small_patch16_224', {}, 'relative positions of'),
  ],
)
def test_errors_name_the_unsupported_feature(tmp_path, name, fields, message):
  """The config next to the weights provides everything else."""
  args = dict(depth=1, embed_dim=32, num_heads=2, img_size=8, patch_size=4, **fields)
  timm.models.save_for_hf(timm.create_model(name, **args), tmp_path, model_args=args)
  with pytest.raises(ValueError, match=message):
    convert.read(str(tmp_path))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
  name = 'a.bin'
  (tmp_path / name).write_bytes(b'')
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[torch\]'"):
    reading.read(str(tmp_path / name))
  # Before a run opens its data.
  config = common.get_config()
  for place in (tmp_path / name, f'https://x.y/{name}?download=true'):
    config.pretrained = str(place)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[torch\]'"):
      checkpoint.check_exists(config)


def test_weights_are_held_in_memory_once(tmp_path):
  """Except for the array being converted; tracemalloc sees NumPy's arrays."""
  layers = dict(num_layers=3, mlp_dim=512, num_heads=3)
  params = tiny_models.numbers(tiny_models.tiny(hidden_size=192, transformer=layers), 8)
  gc.collect()
  checkpoint.save(params, str(tmp_path / 'a.npz'))
  for kind in ('timm', 'hf'):
    convert.convert(str(tmp_path / 'a.npz'), str(tmp_path / kind), kind)
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  for name, dtype in (
    ('a.npz', None), ('a.npz', 'bfloat16'), ('timm', 'bfloat16'), ('hf', None)
  ):  # fmt: skip
    tracemalloc.start()
    try:
      found = reading.read(str(tmp_path / name), 3, dtype).params
      peak = tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()
    leaves = jax.tree.leaves(found)
    assert {x.dtype.name for x in leaves} == {dtype or 'float32'}
    # timm's queries, keys and values are one array.
    assert peak < sum(x.nbytes for x in leaves) + 4 * max(sizes) + 2e5, name
