"""Tests of published weights: names, resizing, and files that do not fit."""

import copy

import flax.traverse_util
import jax
import numpy as np
import pytest
from scipy import ndimage
import tensorflow as tf

from tests import models_test, tiny_models, torch_models, trees
from vit_jax import checkpoint, models, train
from vit_jax.configs import models as model_configs
from vit_jax.weights import fitting, identify


def make_config(**kwargs):
  config = tiny_models.config()
  config.patches.size = (4, 4)
  with config.ignore_type():
    config.update(kwargs)
  return config


def load(path, init, config, **fields):
  return checkpoint.load_pretrained(
    pretrained_path=str(path), init_params=init, model_config=config, **fields
  )


def random_params(config, size=16, num_classes=3, seed=0):
  """Returns parameters of a model, all random."""
  model = models.make_model(config, num_classes=num_classes)
  return tiny_models.numbers(model, size, seed)


@pytest.fixture
def weights(tmp_path):
  """A file of weights, its parameters and its config."""
  config = make_config()
  params = random_params(config)
  path = tmp_path / 'testing.npz'
  checkpoint.save(params, str(path))
  return str(path), params, config


def test_files_use_the_published_names(weights):
  path, params, _ = weights
  with np.load(path) as arrays:
    names = set(arrays.files)
  block = 'Transformer/encoderblock_0'
  assert {
    'cls', 'embedding/kernel', 'Transformer/posembed_input/pos_embedding',
    f'{block}/LayerNorm_0/scale', f'{block}/LayerNorm_2/bias',
    f'{block}/MultiHeadDotProductAttention_1/query/kernel',
    f'{block}/MlpBlock_3/Dense_0/kernel', 'Transformer/encoder_norm/scale',
    'head/bias',
  } <= names  # fmt: skip
  assert not [n for n in names if 'LayerNorm_1' in n or 'MlpBlock_0' in n]
  trees.assert_same(checkpoint.load(path), params)


def test_name_collisions_are_rejected(tmp_path):
  """The second norm of a block becomes LayerNorm_2, which another array may have."""
  norms = {f'LayerNorm_{i}': {'bias': np.full(3, i)} for i in range(3)}
  params = {'Transformer': {'encoderblock_0': norms}}
  with pytest.raises(ValueError, match="LayerNorm_1/bias' and .*LayerNorm_2/bias'"):
    checkpoint.save(params, str(tmp_path / 'a.npz'))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('prefix, linen', [('params/', True), ('opt/target/', False)])
def test_reads_both_namings_and_all_prefixes(weights, tmp_path, prefix, linen):
  path, params, _ = weights
  with np.load(path) as arrays:
    flat = {prefix + key: arrays[key] for key in arrays.files}
  if linen:
    for old, new in (
      ('LayerNorm_2', 'LayerNorm_1'),
      ('MlpBlock_3', 'MlpBlock_0'),
      ('Attention_1', 'Attention_0'),
    ):
      flat = {key.replace(old, new): value for key, value in flat.items()}
  np.savez(tmp_path / 'other.npz', **flat)
  trees.assert_same(checkpoint.load(str(tmp_path / 'other.npz')), params)


def test_old_files_with_4d_group_norms(tmp_path):
  old = {'gn_root': {'scale': np.ones((1, 1, 1, 8))}, 'head': {'bias': np.ones(3)}}
  np.savez(tmp_path / 'old.npz', **flat_of(old))
  # Forks read the file themselves and call this function.
  for params in (checkpoint.load(tmp_path / 'old.npz'), checkpoint._fix_groupnorm(old)):
    assert params['gn_root']['scale'].shape == (8,)
    assert params['head']['bias'].shape == (3,)


@pytest.mark.parametrize(
  'grid, new_grid, has_class_token',
  [((24, 24), (7, 7), True), ((4, 36), (12, 9), True), ((3, 5), (1, 8), False)],
)
def test_position_embeddings_are_resized_like_scipy(grid, new_grid, has_class_token):
  extra = int(has_class_token)
  posemb = np.random.RandomState(0).randn(1, extra + np.prod(grid), 5)
  posemb = posemb.astype(np.float32)
  got = checkpoint.interpolate_posembed(
    posemb, extra + np.prod(new_grid), has_class_token, grid, new_grid
  )
  table = posemb[0, extra:].reshape(*grid, 5)
  zoom = (new_grid[0] / grid[0], new_grid[1] / grid[1], 1)
  want = ndimage.zoom(table, zoom, order=1).reshape(1, -1, 5)
  np.testing.assert_array_equal(got[:, :extra], posemb[:, :extra])
  np.testing.assert_allclose(got[:, extra:], want, atol=1e-6)
  # Both compute in double precision; a few values round differently.
  assert np.mean(got[:, extra:] == want) > 0.95


@pytest.mark.parametrize('old, new', [((4, 3), (9, 4)), ((6, 4), (5, 2))])
def test_patches_are_resized_like_timm(old, new):
  kernel = np.random.RandomState(0).randn(*old, 2, 5).astype(np.float32)
  got = fitting.resize_patches(kernel, new)
  want = torch_models.timm.layers.patch_embed.resample_patch_embed(
    torch_models.torch.tensor(kernel.transpose(3, 2, 0, 1)), new, 'bilinear', False
  )
  np.testing.assert_allclose(got, want.numpy().transpose(2, 3, 1, 0), atol=1e-5)
  patches = np.random.RandomState(1).randn(7, *old, 2).astype(np.float32)
  if new > old:  # Enlarging loses nothing, so the tokens are the same.
    tokens = np.tensordot(tf.image.resize(patches, new), got, axes=3)
    np.testing.assert_allclose(tokens, np.tensordot(patches, kernel, axes=3), atol=1e-4)


def test_loads_into_a_model_with_another_patch_size(weights, caplog):
  path, params, _ = weights
  size = (8, 4)
  new = make_config(patches={'size': size})
  init = random_params(new, size=tuple(4 * side for side in size), seed=1)
  got = load(path, init, new)
  kernel = fitting.resize_patches(params['embedding']['kernel'], size)
  trees.assert_same(got['embedding'], {**params['embedding'], 'kernel': kernel})
  trees.assert_same(got['Transformer'], params['Transformer'])  # The grid is the same.
  named = f'patches of 4 x 4 pixels: resized embedding/kernel to {size[0]} x {size[1]}'
  assert named in caplog.text


def test_patches_that_cannot_be_resized_are_named(tmp_path):
  resnet = {'num_layers': (), 'width_factor': 1}
  configs = [
    make_config(resnet=resnet, patches={'size': (side, side)}) for side in (1, 2)
  ]
  params = random_params(configs[0])
  checkpoint.save(params, str(tmp_path / 'a.npz'))
  with pytest.raises(ValueError, match="a ResNet's features .*1 x 1 .*patches.size"):
    load(tmp_path / 'a.npz', random_params(configs[1]), configs[1])


def test_wrong_grids_are_named():
  posemb = np.zeros((1, 1 + 4 * 36, 8))
  with pytest.raises(ValueError, match='145 position embeddings'):
    checkpoint.interpolate_posembed(posemb, 1 + 144, False)
  with pytest.raises(ValueError, match='5 x 36'):
    checkpoint.interpolate_posembed(posemb, 145, True, grid=(5, 36))


def test_loads_at_a_higher_resolution_with_a_new_head(weights):
  path, params, config = weights
  init = random_params(config, size=24, num_classes=7, seed=1)
  got = load(path, init, config)
  trees.assert_same(got['head'], init['head'])
  trees.assert_same(got['embedding'], params['embedding'])
  table = got['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 37, 16)
  old = params['Transformer']['posembed_input']['pos_embedding']
  for new, before in ((0, 0), (1, 1), (6, 4), (31, 13), (36, 16)):  # Corners.
    np.testing.assert_allclose(table[0, new], old[0, before], atol=1e-6)


def test_pre_logits_are_dropped_kept_or_new(tmp_path):
  with_rep = make_config(representation_size=6)
  params = random_params(with_rep)
  checkpoint.save(params, str(tmp_path / 'rep.npz'))
  plain = random_params(make_config(), seed=1)
  checkpoint.save(plain, str(tmp_path / 'plain.npz'))

  assert 'pre_logits' not in load(tmp_path / 'rep.npz', plain, make_config())
  kept = load(tmp_path / 'rep.npz', random_params(with_rep, seed=2), with_rep)
  trees.assert_same(kept['pre_logits'], params['pre_logits'])
  init = random_params(with_rep, seed=3)
  new = load(tmp_path / 'plain.npz', init, with_rep)
  trees.assert_same(new['pre_logits'], init['pre_logits'])


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'hidden_size': 20}, r'cls: \(1, 1, 16\) in the weights, \(1, 1, 20\) in'),
    (
      {'transformer': {'mlp_dim': 24}},
      r'Dense_0/kernel: \(16, 16\) in the weights, \(16, 24\) in',
    ),
    ({'classifier': 'gap'}, 'cls: not in the model'),
    ({'transformer': {'num_layers': 2}}, 'encoderblock_1.*: missing in the weights'),
  ],
)
def test_weights_of_another_model_are_named_leaf_by_leaf(weights, fields, message):
  path, _, _ = weights
  config = make_config(**fields)
  with pytest.raises(ValueError, match=message):
    load(path, random_params(config), config)


def test_weights_of_another_model_are_recognised(tmp_path):
  params, expected = (
    flax.traverse_util.unflatten_dict(models_test.published_shapes(name), sep='/')
    for name in ('ViT-Ti_16', 'ViT-B_16')
  )
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
  checkpoint.save(params, str(tmp_path / 'weights.npz'))
  message = (
    "weights.npz' looks like ViT-Ti_16, the model of this config like "
    r'ViT-B_16: .*\n.*encoder_norm/bias: \(192,\) in the weights, \(768,\)'
  )
  with pytest.raises(ValueError, match=message):
    load(tmp_path / 'weights.npz', expected, model_configs.get_b16_config())


def flat_of(params):
  return flax.traverse_util.flatten_dict(params, sep='/')


def test_inspect_params_as_called_by_forks(weights):
  """A fork for test-time training calls this before its own check of shapes."""
  path, params, config = weights
  other = random_params(config, size=24, num_classes=7)
  other['adapter'] = {'kernel': np.ones((2, 2))}
  restored_params = checkpoint.inspect_params(
    params=checkpoint.load(path),
    expected=other,
    fail_if_extra=False,
    fail_if_missing=False,
  )
  trees.assert_same(restored_params, params)
  checkpoint.inspect_params(params=params, expected=other, fail_if_missing=False)
  with pytest.raises(ValueError, match='adapter/kernel: missing in the weights'):
    checkpoint.inspect_params(params=params, expected=other)
  with pytest.raises(ValueError, match='adapter/kernel: not in the model'):
    checkpoint.inspect_params(params=other, expected=params)


def test_loaded_params_can_be_unfrozen(weights):
  """The original returns a FrozenDict, which its second notebook unfreezes."""
  path, params, config = weights
  loaded = load(path, params, config)
  params_with_pre_logits = loaded.unfreeze()
  params_with_pre_logits['pre_logits'] = {}
  trees.assert_same(loaded, params)
  rest, head = loaded.pop('head')
  assert 'head' not in rest
  trees.assert_same(head, params['head'])


def test_adapters_keep_their_initial_values(weights, caplog):
  path, params, config = weights
  own = {
    'Transformer/encoderblock_0/adapter/kernel': np.full((16, 4), 2.0),
    'Transformer/encoderblock_0/MlpBlock_1/Dense_0/kernel': np.ones((16, 4)),
    'prompt': np.full((1, 5, 16), 3.0),
  }
  init = checkpoint.recover_tree(*zip(*{**flat_of(params), **own}.items()))
  got = load(path, init, config)
  trees.assert_same(got, init)
  assert "testing.npz' lacks, which keep their initial values: " in caplog.text
  assert caplog.text.count('adapter/kernel') == 1
  # A file with these parameters loads, but not into other shapes.
  checkpoint.save(init, path)
  init['prompt'] = np.zeros((1, 6, 16))
  with pytest.raises(ValueError, match=r'prompt: \(1, 5, 16\) in the weights'):
    load(path, init, config)


def test_shallower_model_takes_the_first_layers_of_a_file(tmp_path, caplog):
  deep = make_config()
  deep.transformer.num_layers = 3
  params = random_params(deep)
  checkpoint.save(params, str(tmp_path / 'deep.npz'))
  config = make_config()
  got = load(tmp_path / 'deep.npz', random_params(config, seed=1), config)
  blocks = [key for key in got['Transformer'] if key.startswith('encoderblock')]
  assert blocks == ['encoderblock_0']
  trees.assert_same(
    got['Transformer']['encoderblock_0'], params['Transformer']['encoderblock_0']
  )
  assert "deep.npz' has but the model lacks" in caplog.text
  # A run raises an error, since its config gives the depth.
  with pytest.raises(ValueError, match='encoderblock_1/.*: not in the model'):
    checkpoint.transferable(str(tmp_path / 'deep.npz'), random_params(config), config)


@pytest.mark.parametrize(
  'name, fields',
  [
    ('r_ti16', {'transformer': dict(num_layers=1, mlp_dim=8, num_heads=3)}),
    ('mixer_b32', {'num_blocks': 1}),
  ],
)
def test_published_names_are_known(name, fields):
  shapes = tiny_models.shapes(models.get_model(name, num_classes=3, **fields), 64)
  assert all(map(identify.is_published, shapes))
  assert not identify.is_published('Transformer/encoderblock_0/MlpBlock_1/bias')


def test_files_that_are_not_weights(weights, tmp_path):
  path, _, _ = weights
  with pytest.raises(FileNotFoundError, match="no weights file '/no.npz'") as e:
    checkpoint.load('/no.npz')
  assert 'huggingface' not in str(e.value)
  cut = tmp_path / 'cut.npz'
  with open(path, 'rb') as f:
    cut.write_bytes(f.read()[:500])
  pickled = tmp_path / 'pickled.npz'
  np.savez(pickled, a=np.array([{}], dtype=object))
  text = tmp_path / 'text.npz'
  text.write_text('weights')
  reasons = {cut: 'only part', pickled: 'Object arrays', text: 'not an .npz'}
  for file, reason in reasons.items():
    with pytest.raises(ValueError, match=f"{file.name}'.*{reason}"):
      checkpoint.load(str(file))


def test_all_zero_head_is_noticed(weights, tmp_path, caplog):
  _, params, config = weights
  params = copy.deepcopy(params)
  params['head']['kernel'] *= 0
  path = str(tmp_path / 'zeros.npz')
  checkpoint.save(params, path)
  load(path, params, config)
  assert 'is all zeros' in caplog.text


def test_run_starts_from_weights(tiny_config, tmp_path):
  config = tiny_config
  model = models.make_model(config.model, num_classes=1000)
  params = tiny_models.numbers(model, 16, seed=3, channels=1)
  path = tmp_path / 'testing.npz'
  checkpoint.save(params, str(path))
  config.update(total_steps=1, warmup_steps=0, base_lr=0.0)
  config.pretrained_dir = str(tmp_path)

  def start():
    prepared = train.prepare(config, run)
    return train.start(prepared, run, train.check_start(prepared, run))

  run = str(tmp_path / 'run')
  checkpoints, state, _ = start()
  trees.assert_same(jax.device_get(state.params)['embedding'], params['embedding'])
  assert state.params['head']['kernel'].shape == (16, 10)
  table = state.params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 5, 16)
  # Once there is a checkpoint, the weights are no longer needed.
  checkpoints.save(1, state.replace(step=state.step + 1))
  checkpoints.close()
  path.unlink()
  checkpoints, again, step = start()
  checkpoints.close()
  assert step == 1
  trees.assert_same(jax.device_get(again.params), jax.device_get(state.params))


def test_teacher_in_the_extra_state_is_loaded_from_weights(
  tiny_config, image_folder, tmp_path
):
  """An evaluator also opens a data set with other classes."""
  config = tiny_config
  config.task = 'tests.teacher_task'
  config.task_options = {'elsewhere': str(image_folder)}
  config.update(total_steps=2, warmup_steps=0, eval_every=2)
  config.pp.update(crop=8, channels=1)
  model = models.make_model(config.model, num_classes=10)
  teacher = tiny_models.numbers(model, (8, 8), channels=1)
  checkpoint.save(teacher, str(tmp_path / 'teacher.npz'))
  with config.ignore_type():
    config.pretrained = {'teacher': str(tmp_path / 'teacher.npz')}
  state, metrics = train.train_and_evaluate(config, str(tmp_path / 'run'))
  trees.assert_same(state.extra['teacher'], teacher)
  assert abs(state.params['embedding']['bias']).max() < 1  # A new student.
  assert metrics['num_elsewhere_test'] == 9
  config.pretrained = {'tutor': str(tmp_path / 'teacher.npz')}
  with pytest.raises(ValueError, match=r"no parameters 'tutor/', but .*'teacher'"):
    train.train_and_evaluate(config, str(tmp_path / 'other'))
  assert not (tmp_path / 'other').exists()
