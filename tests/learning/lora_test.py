"""Tests of low-rank adapters, against W + alpha / r * A B in NumPy."""

import copy
import json
import shutil

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

from tests import conftest, stored_runs, trees
from vit_jax import checkpoint, predict, train
from vit_jax.configs import models as model_configs
from vit_jax.run import checkpoints as checkpoints_lib
from vit_jax.weights import convert, peft

NAMES = [str(i) for i in range(10)]
ATTENTION = 'Transformer/encoderblock_0/MultiHeadDotProductAttention_0'


@pytest.fixture(scope='module')
def adapted(data_dir, tmp_path_factory):
  """A base and a run of 4 updates with adapters: config, folder, last state."""
  folder = tmp_path_factory.mktemp('adapted')
  config = conftest.make_tiny_config(data_dir)
  conftest.write_classifier(folder / 'base', config, NAMES)
  config.update(pretrained=str(folder / 'base'), checkpoint_every=2, eval_every=4)
  config.update(total_steps=4, weight_decay=0.1)
  config.lora.update(rank=2, alpha=6.0, on='(query|out|Dense_0)/')
  state, _ = train.train_and_evaluate(copy.deepcopy(config), str(folder / 'run'))
  return config, folder, jax.device_get(state)


def flat(tree):
  return {
    '/'.join(key.key for key in path): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_only_adapters_and_head_are_trained_and_stored(adapted):
  _, folder, state = adapted
  params, base = flat(state.params), flat(checkpoint.load(str(folder / 'base')))
  new = {f'{ATTENTION}/{x}/kernel_lora_{y}' for x in ('query', 'out') for y in 'ab'}
  dense = 'Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel'
  new |= {f'{dense}_lora_a', f'{dense}_lora_b'}
  assert params.keys() - base.keys() == new
  for path, x in base.items():
    assert (params[path] == x).all() != path.startswith('head/'), path
  width, rank, hidden = 16, 2, base[dense].shape[1]
  assert params[f'{ATTENTION}/out/kernel_lora_a'].shape == (2, width // 2, rank)
  assert all(params[path].any() for path in new)
  count = 4 * width * rank + (width + hidden) * rank + (width + 1) * len(NAMES)
  moments = optax.tree.get(state.opt_state, 'mu')
  assert sum(x.size for x in jax.tree.leaves(moments)) == count
  stored = flat(checkpoints_lib.load_weights(folder / 'run').params)
  assert stored.keys() == new | {'head/kernel', 'head/bias'}


def test_adapters_are_merged_into_the_model_everywhere(adapted):
  _, folder, state = adapted
  params = flat(state.params)
  want = {path: x for path, x in params.items() if '_lora_' not in path}
  for path in [path for path in want if f'{path}_lora_a' in params]:
    a, b = params[f'{path}_lora_a'], params[f'{path}_lora_b']
    want[path] = want[path] + 3.0 * np.einsum(
      '...r,rk->...k', a, b.reshape(2, -1)
    ).reshape(want[path].shape)
  model = predict.load(str(folder / 'run'))
  for got in (model.params, checkpoint.load(str(folder / 'run'))):
    got = flat(got)
    assert got.keys() == want.keys()
    for path, x in want.items():
      np.testing.assert_allclose(got[path], x, rtol=1e-6, atol=1e-6, err_msg=path)
  convert.convert(str(folder / 'run'), str(folder / 'merged.npz'))
  merged = convert.read(str(folder / 'merged.npz'))
  trees.assert_same(merged.params, checkpoint.load(str(folder / 'run')))


def test_peft_export_matches_the_merged_weights(adapted):
  """Names and layout are PEFT's: W + lora_alpha / r * lora_B lora_A, in PyTorch's W."""
  _, folder, _ = adapted
  for source, to in (('base', 'hf'), ('run', 'hf'), ('run', 'peft')):
    convert.convert(str(folder / source), str(folder / f'{source}_{to}'), to)
  load = safetensors.numpy.load_file
  base, merged = (load(folder / f'{x}_hf/model.safetensors') for x in ('base', 'run'))
  found = load(folder / 'run_peft' / 'adapter_model.safetensors')
  config = json.loads((folder / 'run_peft' / 'adapter_config.json').read_text())
  assert config['peft_type'] == 'LORA'
  assert config['base_model_name_or_path'] == str(folder / 'base')
  assert config['modules_to_save'] == ['classifier']
  scale = config['lora_alpha'] / config['r']
  here = 'base_model.model.'
  for module, name in (
    ('attention.q_proj', 'attention.attention.query'),
    ('attention.o_proj', 'attention.output.dense'),
    ('mlp.fc1', 'intermediate.dense'),
  ):
    assert f'vit.layers.0.{module}' in config['target_modules']
    a, b = (found.pop(f'{here}vit.layers.0.{module}.lora_{x}.weight') for x in 'AB')
    name = f'vit.encoder.layer.0.{name}.weight'
    np.testing.assert_allclose(merged[name], base[name] + scale * b @ a, rtol=1e-5)
  for name in ('classifier.weight', 'classifier.bias'):
    np.testing.assert_array_equal(merged[name], found.pop(here + name))
  assert not found
  model = convert.read(str(folder / 'run'))
  dense = 'Transformer/encoderblock_0/MlpBlock_0/Dense_0'
  scaled = copy.deepcopy(model.adapters[0])
  scaled.pretrained = str(folder / 'base_hf')
  processor = folder / 'base_hf' / 'preprocessor_config.json'
  fields = json.loads(processor.read_text())
  processor.write_text(json.dumps({**fields, 'image_mean': 0.4}))
  for path, config, message in (
    (f'{dense}/bias', model.adapters[0], "only a part of 'vit.layers.0.mlp.fc1'"),
    ('embedding/kernel', scaled, 'absorbed the pixel scaling'),
  ):
    stored = {**model.adapters[1], path: flat(model.params)[path]}
    other = model._replace(adapters=(config, stored))
    with pytest.raises(ValueError, match=message):
      peft.write(other, folder)
  with pytest.raises(ValueError, match='cannot be written as peft'):
    convert.convert(str(folder / 'base'), str(folder / 'none'), 'peft')


def test_run_resumes_bit_for_bit_only_on_the_same_base(adapted, tmp_path):
  config, folder, state = adapted
  shutil.copytree(folder / 'run', tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '4')
  again, _ = train.train_and_evaluate(copy.deepcopy(config), str(tmp_path / 'run'))
  trees.assert_same(again, state)
  base = flat(checkpoint.load(config.pretrained))
  kernel = base['embedding/kernel']
  kernel[0, 0, 0, 0] = np.nextafter(kernel[0, 0, 0, 0], 9)
  other = copy.deepcopy(config)
  other.pretrained = str(tmp_path / 'base.npz')
  checkpoint.save(checkpoint.recover_tree(base, base.values()), other.pretrained)
  stored_runs.change_config(tmp_path / 'run', pretrained=other.pretrained)
  for read in (
    lambda: predict.load(str(tmp_path / 'run')),
    lambda: checkpoint.load(str(tmp_path / 'run')),
    lambda: train.train_and_evaluate(other, str(tmp_path / 'run')),
  ):
    with pytest.raises(ValueError, match=r'adapters of weights other than.*base\.npz'):
      read()


@pytest.mark.parametrize('base', ['run', 'run/', 'link', 'other'])
def test_adapters_of_themselves_are_rejected(adapted, tmp_path, base):
  _, folder, _ = adapted
  for name, pretrained in ('run', base), ('other', 'run'):
    shutil.copytree(folder / 'run', tmp_path / name)
    stored_runs.change_config(tmp_path / name, pretrained=f'{tmp_path}/{pretrained}')
  (tmp_path / 'link').symlink_to('run')
  for load in checkpoint.load, predict.load:
    with pytest.raises(ValueError, match='adapters in .* start from themselves'):
      load(str(tmp_path / 'run'))


@pytest.mark.parametrize('change', [{'rank': 3}, {'on': 'query/'}])
def test_adapters_of_another_config_are_rejected(adapted, tmp_path, change):
  _, folder, _ = adapted
  shutil.copytree(folder / 'run', tmp_path / 'run')
  config = json.loads((folder / 'run' / 'config.json').read_text())
  stored_runs.change_config(tmp_path / 'run', lora=config['lora'] | change)
  with pytest.raises(ValueError, match='lora_a.* lora.rank=.*restore the config.json'):
    checkpoint.load(str(tmp_path / 'run'))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model': model_configs.get_config('bit_r50x1')}, 'query.* no kernel .*conv1'),
    ({'lora': {'rank': 1, 'on': 'bias'}}, "lora.on='bias' selects no kernel.*Dense_0"),
    (
      {'lr_multipliers': (('query', 0.0),)},
      "adapts '.*query/kernel'.*lr_multipliers freeze",
    ),
    ({'ema_decay': 0.9}, 'ema_decay=0.9 .* lora.rank=1'),
    ({'pretrained': None}, "lora.rank=1 freezes .*None, which lack .*'Transformer/"),
  ],
)
def test_rejects_adapters_that_cannot_be_trained(
  tiny_config, changes, message, tmp_path
):
  config = tiny_config
  config.lora.rank = 1
  with config.ignore_type():
    config.update(changes)
  if 'model' in changes:
    config.model.num_layers = (1,)
  with pytest.raises(ValueError, match=message):
    train.check_start(train.prepare(config, str(tmp_path)), str(tmp_path))
