"""Tests of feature extraction: each example once, from any layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny_models
from vit_jax.configs import models as model_configs
from vit_jax.data import records
from vit_jax.data.images import images as images_lib, index as index_lib
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.inference import engine
from vit_jax.run import config as run_config

COUNT = 21  # Not a multiple of the batch of 8 or of the devices.


def grey(values):
  """A source of labelled images of one grey value each."""
  encoded = [
    images_lib.encode_png(np.full((8, 8, 3), value, np.uint8)) for value in values
  ]
  labels = np.full((len(values), 2), -1)
  labels[:, 0] = np.arange(len(values)) % 3
  labels[4:5], labels[5:6] = -1, (0, 1)
  columns = {'image': encoded, 'label': labels}
  return records.MemorySource(columns, {'label': ('a', 'b', 'c')})


@pytest.fixture
def task(tiny_config):
  """A classifier of three classes; compiles nothing."""
  tiny_config.pp.channels = 3
  tiny_config.batch_eval = 8
  config = run_config.complete(tiny_config)
  cls = run_config.get_task('classify')
  return cls(config, {'class_names': ['a', 'b', 'c']})


PARAMS = {'cls': np.float32(2)}


def mean_grey(task, mesh):
  """An extractor of the mean colour times a parameter."""
  task.intermediates = lambda params, extra, batch, capture: {
    'grey': (params['cls'].mean() * batch['image'],)  # [B, H, W, C]
  }
  return features.Extractor(task, mesh, 'grey')


def test_every_example_appears_once_in_order(task):
  mesh = sharding.make_mesh({'data': 8})
  values, indices = np.arange(COUNT) * 12, [17, 2, 9]
  extractor, source = mean_grey(task, mesh), grey(values)
  found = extractor.run(source, PARAMS, {})
  assert found.values.dtype == np.float32
  want = np.repeat(2 * (values[:, None] / 127.5 - 1), 3, axis=1)
  np.testing.assert_allclose(found.values, want, atol=1e-5)
  assert found.labels[:8].tolist() == [0, 1, 2, 0, -1, -1, 0, 1]
  # A subset, in any order.
  found = extractor.run(source, PARAMS, {}, indices)
  np.testing.assert_allclose(found.values, want[indices], atol=1e-5)
  assert found.labels.tolist() == [2, 2, 0]
  columns = source.lookup(tf.range(COUNT))
  # No file is read: these do not exist.
  missing = index_lib.from_paths('/no', 'such', [f'/no/{i}.png' for i in range(COUNT)])
  columns['image'] = index_lib.Paths([(missing, missing.order)])
  labelled = records.FolderSource(columns, source.names, 10**9)
  labels = features.read_labels(task.config, mesh, labelled)
  assert labels.tolist() == [0, 1, 2, 0, -1, -1, *(i % 3 for i in range(6, 21))]
  with pytest.raises(engine.Stopped):
    extractor.run(source, PARAMS, {}, stop=lambda: True)


def test_layers_match_the_model(task):
  """For example, applying the head to the features gives the logits."""
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  x = jnp.ones((1, 8, 8, 3)) * 0.2
  params = tiny_models.numbers(task.model, 8)
  made = features.Extractor(task, mesh, ['features', 'Transformer/encoder_norm'])

  def compute(params):
    tokens = task.model.apply(
      {'params': params}, x, method=lambda m, x: m.encode(m.embed(x), train=False)
    )
    logits = task.model.apply({'params': params}, x, train=False)
    return tokens, logits, made.compute(params, {}, {'image': x})

  tokens, logits, found = jax.jit(compute)(params)
  inputs, norm = found[:, :16], found[:, 16:]
  head = params['head']
  np.testing.assert_allclose(inputs @ head['kernel'] + head['bias'], logits, atol=1e-4)
  np.testing.assert_allclose(norm, tokens.mean(axis=1), atol=1e-5)
  assert inputs.shape == norm.shape == (1, 16)
  assert not np.allclose(inputs, norm, atol=1e-2)


def test_an_unknown_layer_is_named(task):
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  with pytest.raises(ValueError, match="'encoderblock_9' is not a layer.*Transformer/encoderblock_0,"):  # fmt: skip
    features.Extractor(task, mesh, 'encoderblock_9')


@pytest.mark.parametrize(
  ('name', 'depth', 'width', 'layers'),
  [
    ('mixer_b32', {'num_blocks': 1}, 768, ['layer_0', 'layer_1']),
    ('r_ti16', {'transformer.num_layers': 1}, 192, ['stage_0', 'layer_0', 'layer_1']),
    ('bit_r50x1', {'num_layers': (1, 1)}, 512, ['layer_0', 'layer_1', 'layer_2']),
  ],
)
def test_every_kind_of_model_has_features(task, name, depth, width, layers):
  task.config.model = model_configs.get_config(name)
  task.config.model.update_from_flattened_dict(depth)
  task.config.pp.crop = 64
  made = type(task)(task.config, task.metadata)
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  assert features.Extractor(made, mesh).width == width
  assert list(features.layers(made)) == layers
  if name == 'r_ti16':  # Cells of 32 pixels.
    compute = features.patches(made)
    assert features.output_shapes(made, compute).shape == (1, 2, 2, width)
  else:
    with pytest.raises(ValueError, match="'patches' .* such as features"):
      features.patches(made)


def test_layers_are_means_of_block_inputs(task):
  """Layer 1 matches a one-block model that ends with the next block's first norm."""
  task.config.model.transformer.num_layers = 2
  task = type(task)(task.config, task.metadata)
  x = tiny_models.images()
  params = tiny_models.numbers(task.model, 8)
  names = list(features.layers(task))
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  made = features.Extractor(task, mesh, ['layer_1', 'pixels', 'layer_0'])
  values = jax.jit(made.compute)(params, {}, {'image': x})
  split = made.split(features.Features(values, None))
  got = {name: part.values for name, part in split.items()}
  assert names == ['layer_0', 'layer_1', 'layer_2']
  np.testing.assert_array_equal(got['pixels'], x.reshape(2, -1))

  fields, blocks = dict(task.model.transformer), params['Transformer']

  @jax.jit
  def by_hand():
    model = task.model.clone(transformer={**fields, 'num_layers': 1})
    norm = blocks['encoderblock_1']['LayerNorm_0']
    tree = {**params, 'Transformer': {**blocks, 'encoder_norm': norm}}
    encode = lambda m, x: m.encode(m.embed(x), train=False)
    return model.apply({'params': tree}, x, method=encode).mean(axis=1)

  np.testing.assert_allclose(got['layer_1'], by_hand(), atol=1e-5)


def test_masked_patches_have_the_features_of_whole_images(tiny_config):
  tiny_config.task = 'masked_patches'
  config = run_config.complete(tiny_config)
  task = run_config.get_task('masked_patches')(config, {})
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  assert features.Extractor(task, mesh).width == 16


def test_too_many_features_for_memory_are_rejected():
  with pytest.raises(ValueError, match='1,000,000,000,000 examples .*--train=.*config.fewshot.train'):  # fmt: skip
    features.check_memory(10**12, 16)


def test_examples_without_a_label_do_not_count():
  found = features.Features(np.eye(3), np.array([0, -1, 1], np.int32))
  assert found.accuracy(np.array([0, 1, 2])) == 0.5
  with pytest.raises(ValueError, match='no image .* class'):
    found._replace(labels=np.full(3, -1)).accuracy(np.arange(3))
