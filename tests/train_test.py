"""Tests of the training loop: what it writes, resumes and rejects."""

import copy
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import conftest, trees
from vit_jax import checkpoint, predict, train
from vit_jax.distributed import sharding
from vit_jax.evaluators import evaluation
from vit_jax.learning import optim, state as state_lib
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  loop,
  metrics as metrics_lib,
  stopping,
  workdir as workdir_lib,
)
from vit_jax.tasks import classify
from vit_jax.weights import identify

NAMES = {'class_names': [str(i) for i in range(10)]}


def fit(config, workdir):
  return train.train_and_evaluate(copy.deepcopy(config), str(workdir))


@pytest.fixture(scope='module')
def finished(tmp_path_factory, request):
  """A run of six steps: its config, folder, last state and metrics."""
  config = copy.deepcopy(request.getfixturevalue('module_config'))
  config.evals = (('test', 'test'), ('val', 'train[:50]', 'digits'))
  config.best_metric = 'accuracy_val'
  workdir = tmp_path_factory.mktemp('finished')
  state, metrics = fit(config, workdir)
  return config, workdir, state, metrics


@pytest.fixture(scope='module')
def module_config(data_dir):
  """The config of `tiny_config`, with everything random switched on."""
  config = conftest.make_tiny_config(data_dir)
  config.pp.flip = True
  config.model.transformer.dropout_rate = 0.1
  config.update(warmup_steps=2, ema_decay=0.9, eval_every=2, checkpoint_every=2)
  return config


def test_files_and_metrics_of_a_run(finished):
  config, workdir, state, metrics = finished
  assert int(state.step) == 6
  assert (metrics['num_examples_test'], metrics['num_examples_val']) == (360, 50)
  lines = metrics_lib.read(workdir)
  train_lines = [line for line in lines if 'train_loss' in line]
  assert [line['step'] for line in train_lines] == [2, 4, 6]
  assert all(line['img_sec_core_train'] > 0 for line in train_lines[1:])
  # Rate of the update that produced each step; update 0 has half the base rate.
  np.testing.assert_allclose(
    [line['lr'] for line in train_lines],
    [1e-3, 1e-3 * (1 + np.cos(np.pi / 4)) / 2, 1e-3 * (1 + np.cos(3 * np.pi / 4)) / 2],
    rtol=1e-5,
  )  # fmt: skip
  eval_lines = [line for line in lines if 'accuracy_test' in line]
  assert [line['step'] for line in eval_lines] == [2, 4, 6]
  assert eval_lines[-1]['num_examples_test'] == 360
  assert eval_lines[-1]['accuracy_test'] == metrics['accuracy_test']
  assert eval_lines[-1]['img_sec_core_test'] > 0
  assert (workdir / 'checkpoints' / '6').is_dir()
  assert json.loads((workdir / 'class_names.json').read_text()) == [
    str(i) for i in range(10)
  ]
  stored = json.loads((workdir / 'config.json').read_text())
  assert stored['base_lr'] == config.base_lr
  assert stored['model']['patches']['size'] == [4, 4]
  versions = json.loads((workdir / 'versions.json').read_text())
  assert {'python', 'jax', 'flax', 'optax'} <= set(versions)
  assert list(workdir.glob('events.out.tfevents.*'))


def test_finished_run_does_nothing(finished, capsys):
  config, workdir, state, metrics = finished
  before = (workdir / 'metrics.jsonl').read_text()
  again, found = fit(config, workdir)
  assert 'This run is finished' in capsys.readouterr().out
  trees.assert_same(again, state)
  assert found['accuracy_test'] == metrics['accuracy_test']
  assert (workdir / 'metrics.jsonl').read_text() == before


def test_evaluates_the_averaged_weights(finished):
  _, workdir, state, metrics = finished
  model = predict.load(str(workdir))
  trees.assert_same(model.params, state_lib.best_params(state))
  assert any(
    (a != b).any()
    for a, b in zip(
      jax.tree.leaves(jax.device_get(model.params)),
      jax.tree.leaves(jax.device_get(state.params)),
    )
  )
  again = evaluation.evaluate(model, 'test')
  assert again['accuracy'] == pytest.approx(metrics['accuracy_test'])
  assert again['loss'] == pytest.approx(metrics['loss_test'], rel=1e-5)


class StopAfter:
  """Simulates a signal during a step or during an evaluation."""

  signal = 15

  def __init__(self, step, evaluating=False):
    self.step = step
    self.evaluating = evaluating

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def after(self, step):
    return step == self.step

  def should_interrupt(self):
    return self.evaluating


def stop(config, workdir, request):
  """Trains until a signal."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(stopping, 'StopRequest', lambda: request)
    with pytest.raises(train.Interrupted, match=f'Saved step {request.step} '):
      fit(config, workdir)


def move(config, workdir, target, step):
  """Trains until the workdir is moved after a step, before its checkpoint."""
  original = loop.Run.update

  def update(run, batch):
    original(run, batch)
    if run.step == step:
      run.checkpoints.wait()  # Else a pending save would make the folder again.
      workdir.rename(target)

  config = copy.deepcopy(config)
  config.progress_every = 0  # Saving detects it.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Run, 'update', update)
    with pytest.raises(
      OSError, match=f"workdir='{workdir}' was moved or deleted during"
    ):
      fit(config, workdir)
  assert not workdir.exists()


def test_resumes_bit_for_bit(finished, tmp_path):
  """After a move, and twice after a signal in the last evaluation.

  Signals between updates are in run/resume_test.py.
  """
  config, finished_workdir, state, _ = finished
  config = copy.deepcopy(config)
  config.eval_every = 0  # Only the last one.
  workdir = tmp_path / 'moved'
  move(config, tmp_path / 'first', workdir, step=4)
  for _ in range(2):
    stop(config, workdir, StopAfter(6, evaluating=True))
  again, _ = fit(config, workdir)
  trees.assert_same(again, state)
  ours, theirs = (
    [
      {key: x for key, x in line.items() if not key.startswith('img_sec_core')}
      for line in metrics_lib.read(folder)
    ]
    for folder in (workdir, finished_workdir)
  )
  # The moved run wrote none.
  assert ours == [
    x for x in theirs if x['step'] == 6 or ('train_loss' in x and x['step'] > 2)
  ]


def test_resumes_on_other_devices_in_another_order(
  module_config, tmp_path, monkeypatch, capsys
):
  config = copy.deepcopy(module_config)
  config.model.transformer.dropout_rate = 0.0
  config.update(total_steps=4, eval_every=4)
  want, _ = fit(config, tmp_path / 'whole')
  shutil.copytree(tmp_path / 'whole', tmp_path / 'moved')
  shutil.rmtree(tmp_path / 'moved' / 'checkpoints' / '4')
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
  config.mesh.update(data=1, fsdp=8)
  config.accum_steps = 2
  config.model.transformer.update(scan=True, attention='xla')
  got, _ = fit(config, tmp_path / 'moved')
  assert 'Resuming from step 2.' in capsys.readouterr().out
  kernel = got.params['Transformer']['encoderblock_0']['MlpBlock_0']['Dense_0']
  assert kernel['kernel'].addressable_shards[0].data.shape == (2, 16)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    jax.device_get(got.params),
    jax.device_get(want.params),
  )


def losses_of(config, mesh):
  """Returns losses of a few steps on a mesh, in float32, and the last state."""
  mesh = sharding.make_mesh(mesh, jax.devices()[: np.prod(list(mesh.values()))])
  program = train.make_program(config, NAMES, mesh)
  state = program.create_state({})
  update = jax.jit(program.update)
  result = []
  with jax.set_mesh(mesh):
    for i in range(4):
      rng = np.random.RandomState(i)
      batch = {
        'image': rng.uniform(-1, 1, (16, 8, 8, 1)).astype(np.float32),
        'label': np.eye(10, dtype=np.float32)[rng.randint(10, size=16)],
      }
      batch = jax.device_put(batch, sharding.batch_sharding(mesh))
      state, metrics = update(state, batch)
      result.append([float(metrics['train_loss']), float(metrics['grad_norm'])])
  return np.array(result), state


def test_loss_does_not_depend_on_the_mesh(module_config, monkeypatch):
  """With dropout and micro-batches; on one device, replicated and sharded."""
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 1)
  config = copy.deepcopy(module_config)
  config.accum_steps = 2
  want, _ = losses_of(config, {'data': 1})
  got, state = losses_of(config, {'data': 2, 'fsdp': 2, 'model': 2})
  np.testing.assert_allclose(got, want, rtol=1e-5)
  moments = optax.tree.get(state.opt_state, 'mu')
  for tree in (state.params, moments):
    kernel = tree['Transformer']['encoderblock_0']['MlpBlock_0']['Dense_0']
    assert kernel['kernel'].addressable_shards[0].data.shape == (8, 8)


class RandomTask:
  """Its loss is a random number times the parameter."""

  def augment(self, batch, rng):
    return batch

  def update_extra(self, extra, params, metrics):
    return extra

  def loss(self, params, extra, batch, rng):
    total = params * jax.random.uniform(rng) * batch['x'].sum()
    return (total, batch['x'].sum()), {}


def test_every_micro_batch_and_step_has_its_own_dropout():
  tx = optax.sgd(1.0)
  seen = []
  for accum_steps in (1, 2):
    update = state_lib.make_update(RandomTask(), tx, lambda _: 1.0, 0, accum_steps)
    state = state_lib.TrainState(jnp.int32(0), jnp.ones(()), tx.init(jnp.ones(())))
    for _ in range(2):
      state, metrics = update(
        state.replace(params=jnp.ones(())), {'x': jnp.ones((4, 1))}
      )
      seen.append(float(metrics['train_loss']))
  key = jax.random.fold_in(jax.random.key(0), 1)
  two = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(2)]
  assert seen[3] == pytest.approx(float(sum(two)) / 2)
  assert len(set(seen)) == 4


def test_non_finite_loss_stops_the_run(module_config, tmp_path):
  config = copy.deepcopy(module_config)
  config.update(
    optimizer='sgd', base_lr=1e38, grad_norm_clip=0.0, warmup_steps=0,
    total_steps=20, progress_every=10, checkpoint_every=1, ema_decay=0.0,
  )  # fmt: skip
  with pytest.raises(FloatingPointError, match=r'at step \d+: not finite') as e:
    fit(config, tmp_path)
  step = int(str(e.value).split('at step ')[1].split(':')[0])
  assert f'Last good checkpoint: step {step - 1}' in str(e.value) or step == 1
  saved = checkpoints_lib.Checkpoints(tmp_path, read_only=True).steps()
  assert max(saved, default=0) == step - 1


# --- Rejected before compilation and before writing ---


def refuse(config, workdir, message, error=ValueError):
  with pytest.raises(error, match=message):
    fit(config, workdir)
  assert not workdir.exists()


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'batch': 12}, r'batch=12 is not a multiple of 8 .*--config.batch=16'),
    ({'accum_steps': 3}, r'batch=16 is not a multiple of 24 .*= 8 x 3'),
    ({'task': 'count'}, "task='count' is unknown"),
    ({'batch': 10**9}, 'batch=1000000000 and prefetch=2: the batches'),
    ({'dataset': 'mnist:99.9.9'}, 'cannot be loaded at version 99.9.9'),
    ({'pp.test': 'test[:100000]'}, "'test.:100000.' cannot be sliced: .*360"),
    ({'warmup_steps': 9}, 'warmup_steps=9 must be .*below total_steps=6'),
    ({'pp.crop': 10}, 'image height 10 is not a multiple of the patch'),
    ({'pp.test': 'val'}, "has no split 'val'"),
    ({'mesh.model': 3}, 'does not fit 8 device'),
    ({'model.classifier': 'unpooled'}, "use 'token' or 'gap'"),
    (
      {'sharding_rules': (('head', ('expert',)),)},
      'expert of P.* is not found in mesh',
    ),
  ],
)
def test_wrong_configs_are_rejected(module_config, tmp_path, fields, message):
  config = copy.deepcopy(module_config)
  config.update_from_flattened_dict(fields)
  refuse(config, tmp_path / 'run', message)


def test_unknown_keys_are_rejected(module_config, tmp_path):
  config = copy.deepcopy(module_config)
  config.pp.corp = 3
  refuse(config, tmp_path / 'run', r"no key 'pp.corp': did you mean 'pp.crop'")


def test_workdir_of_another_config_is_rejected(finished):
  config, workdir, _, _ = finished
  config = copy.deepcopy(config)
  config.base_lr = 0.5
  config.progress_every = 3  # This one may differ.
  with pytest.raises(ValueError, match='base_lr: 0.001 there, 0.5 here') as error:
    fit(config, workdir)
  assert 'progress_every' not in str(error.value)


def test_unwritable_workdir_is_rejected(module_config, tmp_path):
  path = tmp_path / 'file'
  path.write_text('')
  with pytest.raises(ValueError, match="workdir='.*file' is a file"):
    fit(module_config, path)
  with pytest.raises(ValueError, match="workdir='.*run' cannot be written"):
    fit(module_config, path / 'run')


def test_folder_without_a_run_cannot_be_evaluated(tmp_path):
  with pytest.raises(FileNotFoundError, match='holds no run: there is no config'):
    evaluation.evaluate(predict.load(str(tmp_path)), 'test')
  with pytest.raises(FileNotFoundError, match='holds no run'):
    workdir_lib.load(tmp_path)


def test_attentive_probe_of_a_model_with_a_class_token(tiny_config, tmp_path):
  """Attention pooling is new; everything else is loaded from the weights and frozen."""
  config = run_config.complete(tiny_config)

  def made():
    task = classify.Task(config, NAMES)
    return task, jax.eval_shape(task.init, jax.random.key(0))[0]

  _, params = made()
  path = str(tmp_path / 'token.npz')
  checkpoint.save(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params), path)
  config.model.classifier, config.pretrained = 'token_map', path
  config.lr_multipliers = (('MAPHead_0/', 1.0), ('^head/', 1.0), ('', 0.0))
  task, params = made()
  loaded = checkpoint.pretrained_weights(config, task, params)
  assert set(loaded) == set(optim.frozen_sizes(config.lr_multipliers, params))
  assert {'cls', 'Transformer/encoder_norm/scale'} < set(loaded)
  assert identify.model_config(params).classifier == 'token_map'


def test_linear_probe_trains_only_the_head(tiny_config, tmp_path, capsys, monkeypatch):
  """Also records a profile, in a relative folder."""
  monkeypatch.chdir(tmp_path)
  tiny_config.lr_multipliers = (('^head/', 1.0), ('', 0.0))
  tiny_config.update(weight_decay=0.1, ema_decay=0.5)
  tiny_config.update(total_steps=13, profile_steps=2, eval_every=0, checkpoint_every=0)
  tiny_config.pp.train = 'train[:10]'
  state, _ = fit(tiny_config, 'run')
  assert list(tmp_path.glob('run/plugins/profile/*/*.xplane.pb'))
  said = capsys.readouterr().out
  assert '2,096 of the parameters are frozen' in said
  assert '13 updates are too few' in said
  assert said.index('lower --config.batch to 10') < said.index('Compiling')
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  first = train.make_program(tiny_config, NAMES, mesh).create_state({})
  for name, tree in jax.device_get(state.params).items():
    if name == 'head':
      assert (tree['kernel'] != 0).any()
    else:
      trees.assert_same(tree, first.params[name])
  moments = optax.tree.get(state.opt_state, 'mu')
  assert sum(x.size for x in jax.tree.leaves(moments)) == 16 * 10 + 10
  # The averaged weights, last in the chain, are found in a partitioned optimizer.
  averaged = predict.load('run').params
  trees.assert_same(averaged, state_lib.best_params(state))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'evals': (('test', 'tset'),)}, "has no split 'tset'"),
    ({'evals': (('test', 'test'),) * 2}, 'must differ'),
    (
      {'evals': (('val', 'test'),), 'best_metric': 'accuracy_test'},
      "best_metric='accuracy_test' is not among.*accuracy_val",
    ),
    ({'lr_multipliers': (('hed/', 0.0),)}, r"\['hed/'\] match nothing"),
    (
      {'task_options': {'mixup': 0.2}, 'batch': 1, 'mesh': {'data': 1, 'model': 8}},
      'mixup=0.2 mixes an image',
    ),
    ({'task_options': {'mixpu': 0.2}}, "no key 'task_options.mixpu': did you"),
    ({'task': 'no.such.module'}, "there is no module 'no'; use one of"),
    ({'task': 'tests.trees'}, 'the module has no class Task'),
  ],
)
def test_wrong_tasks_and_evaluations_are_named(tiny_config, tmp_path, fields, message):
  with tiny_config.ignore_type():
    tiny_config.update(fields)
  refuse(tiny_config, tmp_path / 'run', message)


@pytest.mark.parametrize(
  'task_class, message',
  [
    ('class Task: pass', 'Task must be a subclass of vit_jax.tasks.base.Task'),
    (
      'class Task(classify.Task):\n  class Options: pass',
      r"Options lacks .*'mixup'.*vit_jax.tasks.classify.Task.Options",
    ),
    (
      'class Task(classify.Task):\n  def loss(self, *_): return jnp.float32(1)',
      r'loss=\(\), .*must be \(\(sum, weight\), metrics\)',
    ),
    (
      'class Task(classify.Task):\n  def loss(self, *_): return jnp.zeros(2), 16',
      r'loss=\(\(2,\), \(\)\), .*must be \(\(sum, weight\), metrics\)',
    ),
    (
      'class Task(classify.Task):\n'
      '  def loss(self, params, extra, batch, rng):\n'
      "    batch = {**batch, 'label': batch['label'][:, None]}\n"
      '    return super().loss(params, extra, batch, rng)',
      r'logits=\(16, 10\) .*shape of the labels, \(16, 1, 10\)',
    ),
  ],
)
def test_wrong_task_classes_are_named(
  tiny_config, tmp_path, monkeypatch, task_class, message
):
  module = (
    f'import jax.numpy as jnp\nfrom vit_jax.tasks import classify\n{task_class}\n'
  )
  (tmp_path / 'wrong_task.py').write_text(module)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'wrong_task', raising=False)
  tiny_config.task = 'wrong_task'
  with pytest.raises(ValueError, match=message):
    fit(tiny_config, tmp_path / 'run')
  sys.modules.pop('wrong_task')
