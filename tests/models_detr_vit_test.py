"""Tests of DETR with a Vision Transformer as the backbone."""

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, trees
from vit_jax import checkpoint, models, models_detr, models_vit
from vit_jax.configs import detr as detr_config
from vit_jax.run import config as run_config
from vit_jax.weights import fitting

VIT = dict(
  patches={'size': (4, 4)},
  hidden_size=16,
  transformer=dict(
    num_layers=2, mlp_dim=32, num_heads=2, dropout_rate=0.0, attention_dropout_rate=0.0
  ),
)


def vit(**transformer):
  return {**VIT, 'transformer': {**VIT['transformer'], **transformer}}


def detr(**fields):
  small = dict(
    kind='detr', backbone='vit', hidden_size=16, num_queries=5, mlp_dim=32,
    num_encoder_layers=1, num_decoder_layers=2, num_heads=2, vit=VIT,
  )  # fmt: skip
  return models.make_model({**small, **fields}, num_classes=3)


def test_feature_map_resizes_embeddings_like_loading():
  images = tiny_models.images((2, 24, 40, 3))
  ours = models_detr.VitBackbone(num_classes=None, **vit(position_grid=(4, 4)))
  params = tiny_models.randomised(ours, images)
  got = jax.jit(lambda x: ours.apply({'params': params}, x, train=False))(images)
  assert got.shape == (2, 6, 10, 16)

  table = params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 1 + 4 * 4, 16)
  resized = fitting.interpolate_posembed(table, 1 + 6 * 10, True, None, (6, 10))
  params['Transformer']['posembed_input']['pos_embedding'] = resized
  plain = models_vit.VisionTransformer(num_classes=None, **VIT)

  def tokens(model, x):
    return model.encode(model.embed(x), train=False)

  want = jax.jit(lambda x: plain.apply({'params': params}, x, method=tokens))(images)
  np.testing.assert_allclose(got.reshape(2, -1, 16), want[:, 1:], atol=1e-5)


def test_two_tables_are_resized_along_their_axes():
  fields = vit(position_embedding='learned_2d', position_grid=(2, 3))
  model = models.VisionTransformer(num_classes=5, **fields)
  shapes = tiny_models.shapes(model, (16, 20))
  tables = {k.rpartition('/')[2]: v.shape for k, v in shapes.items()}
  assert (tables['y_embedding'], tables['x_embedding']) == ((2, 8), (3, 8))


def test_padding_has_no_influence():
  """Compares a padded image with the same image alone, without learned positions."""
  model = detr(vit=vit(position_embedding='none'))
  images = tiny_models.images((1, 16, 24, 3))
  params = tiny_models.randomised(model, images)
  apply = jax.jit(lambda x, m: model.apply({'params': params}, x, m, train=False))
  padded = jnp.full((1, 24, 32, 3), 0.7).at[:, :16, :24].set(images)
  mask = np.zeros((1, 24, 32), bool)
  mask[:, :16, :24] = True
  got, want = apply(padded, mask), apply(images, np.ones((1, 16, 24), bool))
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, atol=1e-5)


def test_backbone_starts_from_classifier_weights(tmp_path):
  """The classifier has 4 x 4 patches and a head, which is left out."""
  config = detr_config.get_config('vit_testing,coco/2017')
  config.model.vit.classifier = 'token'
  config.model.update(num_encoder_layers=1, num_decoder_layers=1)
  config.pretrained_dir = str(tmp_path)
  classifier = models.get_model('testing', num_classes=7)
  params = tiny_models.numbers(classifier, 64)
  checkpoint.save(params, str(tmp_path / 'testing.npz'))
  config.total_steps, config.total_epochs = 10, None
  config = run_config.complete(config)
  task = run_config.get_task('detect')(config, {'class_names': ['a', 'b']})
  shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
  got = checkpoint.pretrained_weights(config, task, shapes)
  want = flax.traverse_util.flatten_dict(params, sep='/')
  want = {
    f'backbone/{path}': value
    for path, value in want.items()
    if not path.startswith('head/')
  }
  table = 'backbone/Transformer/posembed_input/pos_embedding'
  want[table] = fitting.interpolate_posembed(want[table], 1 + 50 * 50, True)
  trees.assert_same(got, want)
  shapes = flax.traverse_util.flatten_dict(shapes['backbone'], sep='/')
  assert {path.removeprefix('backbone/') for path in got} == set(shapes)
  with config.ignore_type():
    config.pretrained = {'backbone': str(tmp_path / 'testing.npz')}
  run_config.check_values(config)
  checkpoint.check_exists(config)
  shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
  trees.assert_same(checkpoint.pretrained_weights(config, task, shapes), want)
  config.pretrained = {'backbone': str(tmp_path / 'none.npz')}
  with pytest.raises(FileNotFoundError, match=r'none\.npz'):
    checkpoint.check_exists(config)


def test_configs_with_vision_transformers():
  config = detr_config.get_config('vit_h14,coco/2017')
  run_config.check_values(config)
  assert config.lr_multipliers == (('^backbone/', 0.1),)
  assert config.pp.canvas_multiple % 14 == 0
  with pytest.raises(ValueError, match="'mixer_b16' is not a Vision Transformer"):
    detr_config.get_config('vit_mixer_b16,coco/2017')


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'backbone': 'vgg'}, r"backbone='vgg' must be one of"),
    ({'vit': {**VIT, 'width': 3}}, r"unexpected keyword argument 'width'"),
  ],
)
def test_wrong_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    tiny_models.shapes(detr(**fields), 16)
