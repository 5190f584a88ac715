"""Tests of tokens split over the mesh axis `sequence`, on eight simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax.configs import common, models as model_configs
from vit_jax.distributed import sharding
from vit_jax.run import config as run_config

# 16 patches, and with a class token 17 tokens, which no axis divides.
SIZE = (4, 16, 16, 3)
FIELDS = {
  'num_layers': 2, 'mlp_dim': 32, 'num_heads': 2, 'dropout_rate': 0.1,
  'attention_dropout_rate': 0.0, 'attention_window': 3,
}  # fmt: skip


def loss_and_gradients(model, axes=None):
  """Returns loss, gradients and the compiled program, on one device or a mesh."""
  x = tiny_models.images(SIZE)
  params = tiny_models.randomised(model, x)

  def loss(params, x):
    rngs = {'dropout': jax.random.key(0)}
    return jnp.mean(model.apply({'params': params}, x, train=True, rngs=rngs) ** 2)

  function = jax.jit(jax.value_and_grad(loss))
  if axes is None:
    return *jax.device_get(function(params, x)), ''
  mesh = sharding.make_mesh(axes)
  params = jax.device_put(params, sharding.tree_shardings(params, (), mesh))
  x = jax.device_put(x, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    compiled = function.lower(params, x).compile()
    return *jax.device_get(compiled(params, x)), compiled.as_text()


@pytest.mark.parametrize(
  'axes, classifier, fields',
  [
    ({'data': 2, 'fsdp': 2, 'sequence': 2}, 'token', {}),
    (
      {'data': 1, 'model': 2, 'sequence': 4}, 'gap',
      {'scan': True, 'remat': 'dots', 'attention': 'xla', 'causal': True},
    ),
    (
      {'data': 1, 'sequence': 8}, 'map',
      {'num_layers': 1, 'attention_dropout_rate': 0.1, 'attention_pattern': 'local'},
    ),
  ],
)  # fmt: skip
def test_split_tokens_compute_the_same(axes, classifier, fields, monkeypatch):
  """Loss and gradients, with dropout, equal those on one device."""
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
  model = tiny_models.tiny(classifier=classifier, transformer={**FIELDS, **fields})
  want, want_gradients, _ = loss_and_gradients(model)
  got, gradients, text = loss_and_gradients(model, axes)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    gradients,
    want_gradients,
  )
  # Each device has logits of its own queries only: [images, heads, queries, keys].
  images = 4 // (axes['data'] * axes.get('fsdp', 1))
  heads = 2 // axes.get('model', 1)
  tokens = 16 + (classifier == 'token')
  queries = -(-tokens // axes['sequence'])
  assert f'f32[{images},{heads},{queries},{tokens}]' in text
  assert f'f32[{images},{heads},{tokens},{tokens}]' not in text


def test_sequence_axis_does_not_split_the_batch():
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'sequence': -1})
  assert sharding.batch_axes(mesh) == ('data', 'fsdp')
  assert sharding.batch_shards(mesh) == 4
  assert sharding.sequence_shards(mesh) == 2
  assert sharding.sequence_shards() == 1  # No mesh is set.
  np.testing.assert_array_equal(sharding.local_rows(mesh, 4), np.arange(4))


@pytest.mark.parametrize(
  'name, fields, message',
  [
    ('mixer_b16', {}, "sequence=2 .*kind='mixer'"),
    ('b16', {'attention': 'cudnn'}, "attention='cudnn'.*config.model.transformer.att"),
    ('b16', {'attention': 'flash', 'causal': True}, "causal attention='flash'"),
    ('b16', {'attention': 'flash'}, None),
  ],
)
def test_rejects_models_that_cannot_split_tokens(name, fields, message):
  config = common.get_config()
  config.model = model_configs.with_options(model_configs.get_config(name))
  config.model.get('transformer', {}).update(fields)
  run_config.check_sequence(config, 1)
  if message is None:
    return run_config.check_sequence(config, 2)
  with pytest.raises(ValueError, match=message):
    run_config.check_sequence(config, 2)


def test_rejects_more_shards_than_tokens():
  config = common.get_config()
  config.model = model_configs.get_config('b16')
  config.pp.crop = (32, 16)
  run_config.check_sequence(config, 2)
  with pytest.raises(ValueError, match='sequence=4 .*2 tokens.*--config.mesh.seq'):
    run_config.check_sequence(config, 4)
