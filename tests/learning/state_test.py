"""Tests of the update: sums, weights and the extra state of a task."""

import copy
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import conftest, stored_runs, toy_task, trees
from vit_jax import predict, train
from vit_jax.distributed import sharding
from vit_jax.evaluators import evaluation
from vit_jax.learning import state as state_lib
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  metrics as metrics_lib,
)

DECAY = 0.75
MODULE = 'tests.learning.state_test'


class Task(toy_task.Task):
  """Keeps a teacher, the average of the parameters, and a count of the rows."""

  def init(self, rng):
    params, _ = super().init(rng)
    teacher = jax.tree.map(jnp.copy, params)
    return params, {'teacher': teacher, 'rows': jnp.zeros(2)}

  def loss(self, params, extra, batch, rng):
    del rng
    rows = jnp.ones((len(batch['image']), 2)) * jnp.array([1.0, 2.0])
    errors = self._errors(params, extra, batch)
    # A vector is only for `update_extra`; a scalar is logged.
    metrics = {
      'rows': (rows.sum(axis=0), jnp.float32(1)),
      'error': (errors.sum(), jnp.float32(len(errors))),
    }
    return (errors.sum(), jnp.float32(len(errors))), metrics

  def update_extra(self, extra, params, metrics):
    return {
      'teacher': jax.tree.map(
        lambda old, new: DECAY * old + (1 - DECAY) * new, extra['teacher'], params
      ),
      'rows': extra['rows'] + metrics['rows'],
    }


@pytest.fixture(scope='module')
def config(data_dir):
  """A run of four steps with a teacher, split over devices."""
  config = conftest.make_tiny_config(data_dir)
  config.update(task=MODULE, best_metric='loss_test')
  config.update(total_steps=4, checkpoint_every=2, eval_every=4)
  config.mesh.update(data=2, fsdp=4)
  return config


@pytest.fixture(scope='module')
def finished(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('teacher')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
    state, _ = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  return workdir, state


def test_teacher_is_updated_and_vectors_are_not_logged(finished, config):
  workdir, state = finished
  np.testing.assert_allclose(state.extra['rows'], [4 * config.batch, 8 * config.batch])
  # The teacher lags behind the student.
  teacher = state.extra['teacher']['head']['kernel']
  student = state.params['head']['kernel']
  assert abs(teacher - student).max() > 0
  lines = [x for x in metrics_lib.read(workdir) if 'train_loss' in x]
  assert all(x['train_error'] == x['train_loss'] for x in lines)
  assert not any('train_rows' in x for x in lines)


def test_extra_is_sharded_like_the_parameters(finished):
  _, state = finished
  for tree in (state.params, state.extra['teacher']):
    kernel = tree['Transformer']['encoderblock_0']['MlpBlock_0']['Dense_0']
    assert kernel['kernel'].addressable_shards[0].data.shape == (4, 16)


def test_extra_is_saved_and_restored(finished, config):
  workdir, state = finished
  trees.assert_same(predict.load(str(workdir)).extra, state.extra)
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  config = run_config.complete(config)
  program = train.make_program(config, {}, mesh)
  checkpoints = checkpoints_lib.Checkpoints(workdir, read_only=True)
  restored, step = checkpoints.restore(program.abstract)
  assert step == 4
  trees.assert_same(restored, state)
  params = checkpoints_lib.load_weights(workdir).params
  trees.assert_same(params, state.params)


def test_evaluation_and_prediction_use_the_mesh_of_the_run(finished, monkeypatch):
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
  workdir, _ = finished
  model = predict.load(str(workdir))
  tree = model.extra['teacher']['Transformer']['encoderblock_0']['MlpBlock_0']
  kernel = tree['Dense_0']['kernel']
  assert kernel.addressable_shards[0].data.shape == (4, 16)
  assert len(kernel.sharding.device_set) == 4  # Not replicated over `data`.
  assert dict(evaluation.run_mesh(workdir).shape) == {
    'data': 2,
    'fsdp': 4,
    'model': 1,
    'sequence': 1,
  }
  lines = [x for x in metrics_lib.read(workdir) if 'loss_test' in x]
  again = evaluation.evaluate(predict.load(str(workdir)), 'test')
  assert again['loss'] == pytest.approx(lines[-1]['loss_test'], rel=1e-5)


def test_parameters_are_not_sharded_if_the_mesh_does_not_fit(finished, tmp_path):
  workdir = shutil.copytree(finished[0], tmp_path / 'run')
  stored_runs.change_config(workdir, mesh={'data': 1, 'fsdp': 16, 'model': 1})
  assert dict(evaluation.run_mesh(workdir).shape) == {'data': 8}
  model = predict.load(str(workdir))
  assert {len(x.devices()) for x in jax.tree.leaves(model.params)} == {1}


def test_run_resumes_with_its_extra(finished, config, tmp_path, monkeypatch):
  """From the checkpoint of step 2, as if the run had been killed after it."""
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
  workdir = shutil.copytree(finished[0], tmp_path / 'run')
  shutil.rmtree(workdir / 'checkpoints' / '4')
  again, _ = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  trees.assert_same(again, finished[1])


def test_mean_of_nothing_is_zero():
  assert state_lib.mean(jnp.float32(0), jnp.float32(0)) == 0
  assert state_lib.mean(jnp.float32(3), jnp.float32(2)) == 1.5


def test_rows_without_a_label_are_ignored(data_dir):
  """Six of sixteen rows have a label: only they affect loss and gradient."""
  config = conftest.make_tiny_config(data_dir)
  config.update(grad_norm_clip=0.0)
  config.model.transformer.num_layers = 1
  names = {'class_names': [str(i) for i in range(10)]}
  rng = np.random.RandomState(0)
  image = rng.uniform(-1, 1, (16, 8, 8, 1)).astype(np.float32)
  label = np.eye(10, dtype=np.float32)[rng.randint(10, size=16)]
  has_label = np.isin(np.arange(16), [0, 1, 2, 3, 9, 14])
  initial = []

  def losses(image, label, accum_steps, devices):
    config.accum_steps = accum_steps
    mesh = sharding.make_mesh({'data': devices}, jax.devices()[:devices])
    program = train.make_program(config, names, mesh)
    batch = jax.device_put(
      {'image': image, 'label': label}, sharding.batch_sharding(mesh)
    )
    with jax.set_mesh(mesh):
      if not initial:
        initial.append(jax.device_get(program.create_state({})))
      state, seen = jax.device_put(initial[0], sharding.replicated(mesh)), []
      update = program.jit_update()
      for _ in range(3):
        state, metrics = update(state, batch)
        seen.append([float(metrics[k]) for k in ('train_loss', 'grad_norm')])
    return seen

  want = losses(image[has_label], label[has_label], 1, 1)
  masked = label * has_label[:, None]
  for accum_steps, devices in ((4, 1), (1, 8)):
    got = losses(image, masked, accum_steps, devices)
    np.testing.assert_allclose(got, want, rtol=1e-5)


class SteppedTask:
  """Has a loss and an extra state that depend on the step."""

  def augment(self, batch, rng):
    del rng
    return batch

  def loss(self, params, extra, batch, rng, step):
    del extra, rng
    rows = jnp.float32(len(batch['x']))
    return (params * 10.0**step * rows, rows), {}

  def update_extra(self, extra, params, metrics, step):
    del params, metrics
    return extra.at[step].set(step + 1)


def test_loss_and_extra_state_receive_the_step():
  tx = optax.sgd(0.0)
  task, one = SteppedTask(), jnp.ones(())
  update = state_lib.make_update(task, tx, lambda _: 0.0, 0, 2)
  state = state_lib.TrainState(jnp.int32(0), one, tx.init(one), jnp.zeros(4))
  losses = []
  for _ in range(3):
    state, metrics = jax.jit(update)(state, {'x': jnp.ones(4)})
    losses.append(float(metrics['train_loss']))
    assert metrics['grad_norm'] == losses[-1]
  assert losses == [1, 10, 100]
  np.testing.assert_array_equal(state.extra, [1, 2, 3, 0])


class AttentionTask:
  """Attention whose key bias has no effect, so its gradient is rounding error."""

  def augment(self, batch, rng):
    del rng
    return batch

  def loss(self, params, extra, batch, rng):
    del extra, rng
    x = batch['x']  # [B, N, D]
    keys = x @ params['key'] + params['key_bias']
    weights = jax.nn.softmax(x @ keys.swapaxes(1, 2))  # [B, N, N]
    logits = (weights @ x).mean(axis=1) @ params['head']
    losses = optax.softmax_cross_entropy(logits, batch['label'])
    return (losses.sum(), batch['label'].sum()), {}

  def update_extra(self, extra, params, metrics):
    del params, metrics
    return extra


def test_micro_batches_with_unlabelled_rows_match_the_whole_batch_with_adam():
  """Adam divides by the size of a gradient: rounding error becomes a full update.

  With an epsilon above rounding, parameters without effect agree too.
  """
  rng = np.random.RandomState(0)
  shapes = {'key': (4, 4), 'key_bias': (4,), 'head': (4, 3)}
  params = {name: np.float32(rng.normal(size=x)) for name, x in shapes.items()}
  label = np.eye(3, dtype=np.float32)[rng.randint(3, size=8)]
  label[[1, 2, 5]] = 0
  batch = {'x': np.float32(rng.normal(size=(8, 5, 4))), 'label': label}

  @functools.partial(jax.jit, static_argnums=0)
  def updated(accum_steps, eps):
    tx = optax.adam(1e-3, eps=eps)
    state = state_lib.TrainState(jnp.int32(0), params, tx.init(params), ())
    task = AttentionTask()
    update = state_lib.make_update(task, tx, lambda _: 1e-3, 0, accum_steps)
    for _ in range(3):
      state, _ = update(state, batch)
    return state.params

  def differences(eps):
    whole, accumulated = updated(1, eps), updated(4, eps)
    return {name: abs(whole[name] - accumulated[name]).max() for name in params}

  found = differences(1e-8)
  assert found.pop('key_bias') > 1e-5
  assert max(found.values()) < 1e-6
  assert max(differences(1e-3).values()) < 1e-6
