"""Tests of a detector on meshes, and with micro-batches."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from tests import trees
from vit_jax import predict, train
from vit_jax.configs import common
from vit_jax.distributed import sharding
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  workdir as workdir_lib,
)

NAMES = {'class_names': ['ant', 'bee', 'cow']}
MESH = {'data': 2, 'fsdp': 2, 'model': 2}
COUNTS = [0, 4, 1, 0, 0, 2, 3, 0]


def make_config(**fields):
  """A detector config that compiles fast and has a large first update."""
  config = common.get_config()
  config.task = 'detect'
  config.dataset = 'scenes'
  config.pretrained_dir = None
  config.pp.update(
    sides=(32,), eval_side=32, longest_side=32, canvases=1, canvas_multiple=32,
    crop_sides=(),
  )  # fmt: skip
  config.model = ml_collections.ConfigDict(
    dict(
      kind='detr', units=(1,), backbone_width=8, norm='group', hidden_size=16,
      num_queries=6, num_encoder_layers=0, num_decoder_layers=1, num_heads=2,
      mlp_dim=16, dropout_rate=0.0, attention_dropout_rate=0.0,
    )
  )  # fmt: skip
  config.task_options.max_objects = 4
  config.update(
    batch=8, batch_eval=8, total_steps=5, warmup_steps=0, base_lr=0.1,
    optimizer='sgd', optim_dtype='float32', decay_type='constant',
    **fields,
  )  # fmt: skip
  return run_config.complete(config)


def make_batch():
  """Images of several shapes on canvases."""
  rng = np.random.RandomState(0)
  real = np.zeros((8, 32, 32), bool)
  for i in range(8):
    real[i, : 32 - 2 * i, : 18 + 2 * i] = True
  image = rng.uniform(-1, 1, (8, 32, 32, 3)).astype(np.float32)
  return {
    'image': image * real[..., None],
    'real': real,
    'box': rng.uniform(0.2, 0.5, (8, 4, 4)).astype(np.float32),
    'class': rng.randint(0, 3, (8, 4)).astype(np.int32),
    'count': np.array(COUNTS, np.int32),
  }


class Compiled(NamedTuple):
  """A program on a mesh, and its compiled update."""

  program: train.Program
  update: jax.stages.Compiled
  mesh: jax.sharding.Mesh

  def place(self, state):
    return jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), state, self.program.abstract
    )

  def __call__(self, state):
    batch = jax.device_put(make_batch(), sharding.batch_sharding(self.mesh))
    return self.update(state, batch)


def compile_update(axes, devices, **fields):
  mesh = sharding.make_mesh(axes, jax.devices()[:devices])
  program = train.make_program(make_config(**fields), NAMES, mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding.batch_sharding(mesh)
    ),
    program.task.batch_spec(8),
  )
  with jax.set_mesh(mesh):
    update = program.jit_update().lower(program.abstract, batch).compile()
    return Compiled(program, update, mesh)


@pytest.fixture(scope='module')
def single():
  """The update of the whole batch on one device."""
  return compile_update({'data': 1}, 1)


@pytest.fixture(scope='module')
def first(single):
  """A state of random parameters, made without compiling."""
  rng = np.random.RandomState(1)
  abstract = single.program.abstract
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), abstract.params
  )
  return state.replace(params=params)


def test_mesh_and_micro_batches_match_one_device(single, first, monkeypatch):
  """Images have up to four objects; half of them have none."""
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 64)
  split = compile_update({'data': 1, 'fsdp': 2, 'model': 2}, 4, accum_steps=2)
  kinds = {row['spec'] for row in sharding.report(split.program.abstract.params)}
  assert {'fsdp', 'fsdp+model'} <= kinds
  assert not sharding.not_split(split.program.abstract.params, split.mesh)
  want, wanted = jax.device_get(single(single.place(first)))
  got, found = jax.device_get(split(split.place(first)))
  for name, value in wanted.items():
    assert found[name] == pytest.approx(value, rel=1e-5), name
  moved = jax.tree.map(lambda a, b: abs(a - b).max(), want.params, first.params)
  assert max(jax.tree.leaves(moved)) > 0.01
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got.params, want.params
  )


def test_heads_and_hidden_layers_are_split():
  config = make_config()
  config.model.update(num_encoder_layers=1, num_decoder_layers=1)
  mesh = sharding.make_mesh({'data': 4, 'model': 2})
  program = train.make_program(config, NAMES, mesh)
  found = jax.tree.map(lambda x: x.sharding, program.abstract.params)
  layer, model = found['decoder_layer_0'], 'model'
  for name in ('self_attention', 'cross_attention'):
    assert layer[name]['query']['kernel'].spec == jax.P(None, model, None)
    assert layer[name]['out']['kernel'].spec == jax.P(model, None, None)
  for mlp in (layer, found['encoder_layer_0'], found['box_head']):
    assert mlp['Dense_0']['kernel'].spec == jax.P(None, model)
    assert mlp['Dense_0']['bias'].spec == jax.P(model)
    assert mlp['Dense_1']['kernel'].spec == jax.P(model, None)
  assert found['backbone']['conv_root']['kernel'].is_fully_replicated


def test_resumes_exactly_and_predicts_on_a_mesh(single, first, tmp_path):
  config = single.program.task.config
  begun, _ = single(single.place(first))
  workdir_lib.create(tmp_path, config, NAMES, data={})
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(1, begun)
  checkpoints.close()
  restored, step = checkpoints_lib.Checkpoints(tmp_path).restore(
    single.program.abstract
  )
  assert step == 1
  images = [np.full((40, 30, 3), value, np.uint8) for value in (50, 200)]
  want = predict.load(str(tmp_path)).detect(images, 0.0)
  mesh = sharding.make_mesh(MESH)
  model = predict.load(str(tmp_path), mesh=mesh)
  kernel = model.params['decoder_layer_0']['Dense_0']['kernel']
  assert kernel.sharding.spec == jax.P(None, 'model')
  for ours, theirs in zip(model.detect(images, 0.0), want, strict=True):
    assert len(ours) == 6
    for (name, score, box), (*named, corners) in zip(ours, theirs, strict=True):
      assert [name, pytest.approx(score, abs=1e-4)] == named
      assert box == pytest.approx(corners, abs=1e-2)
  trees.assert_same(
    jax.device_get(single(restored)[0]), jax.device_get(single(begun)[0])
  )


def test_half_precision_keeps_float32_outputs():
  config = make_config()
  config.model.dtype = 'bfloat16'
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  task = train.make_program(config, NAMES, mesh).task
  state = jax.eval_shape(task.init, jax.random.key(0))
  jaxpr = jax.make_jaxpr(task.outputs)(*state, task.batch_spec(2))
  assert {x.dtype for x in jaxpr.out_avals} == {jnp.dtype('float32')}
  convolved = re.findall(r'(\w+)\[[\d,]+\] = conv_general_dilated', str(jaxpr))
  assert set(convolved) == {'bf16'}
