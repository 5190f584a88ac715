"""Tests of completing and resolving configs, and of reading them from a run."""

import copy
import os

import pytest

from tests import stored_runs
from vit_jax import checkpoint
from vit_jax.configs import (
  augreg,
  common,
  digits,
  mixer_base16_cifar10,
  models as model_configs,
  pretrain,
  vit,
)
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  workdir as workdir_lib,
)
from vit_jax.tasks import classify


@pytest.mark.parametrize(
  'fields, want',
  [
    # 1,000 examples in batches of 16; expected: total steps, warm-up steps.
    (dict(total_steps=125, warmup_steps=31), (125, 31)),
    (dict(total_epochs=2.0, warmup_epochs=0.5), (125, 31)),
    # Warm-up longer than training: reduced to a tenth.
    (dict(total_epochs=2.0, warmup_epochs=5.0), (125, 12)),
    # No warm-up given: 500 as in the original, or a tenth.
    (dict(total_steps=10_000), (10_000, 500)),
    (dict(total_epochs=2.0), (125, 12)),
  ],
)
def test_steps_from_steps_or_epochs(fields, want):
  config = common.get_config()
  config.update(batch=16, **fields)
  resolved = run_config.resolve_steps(config, 1000)
  assert (resolved.total_steps, resolved.warmup_steps) == want
  assert (resolved.total_epochs, resolved.warmup_epochs) == (None, None)
  # A resolved config can be used for another run.
  assert run_config.resolve_steps(resolved, 77) == resolved


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(), '--config.total_steps=N'),
    (dict(total_epochs=0.001), 'less than one batch of 16'),
    (
      dict(total_steps=6, warmup_steps=6),
      'warmup_steps=6 must be below total_steps=6: lower',
    ),
  ],
)
def test_invalid_steps_are_rejected(fields, message):
  config = common.get_config()
  config.update(batch=16, **fields)
  with pytest.raises(ValueError, match=message):
    run_config.resolve_steps(config, 1000)


def test_original_keys_without_effect_are_dropped():
  config = run_config.complete(vit.get_config('ti16,cifar10'))
  original = config.copy_and_resolve_references()
  with original.unlocked():
    original.update(model_type='ViT', shuffle_buffer=50_000)
  assert run_config.complete(original).to_dict() == config.to_dict()


def test_original_configs_do_not_start_from_random_weights(tmp_path, monkeypatch):
  """Neither the original configs nor configs derived from them."""
  monkeypatch.chdir(tmp_path)
  mixer = common.get_config()  # As in the original file.
  mixer.model_type = 'Mixer'
  mixer.model = model_configs.get_mixer_b16_config()
  mixer.dataset = 'cifar10'
  mixer.total_steps = 10_000
  derived = common.with_dataset(common.get_config(), 'cifar10')
  derived.model = model_configs.get_config('ti16')
  for config in (
    mixer, derived, vit.get_config('ti16,cifar10'),
    mixer_base16_cifar10.get_config(),
  ):  # fmt: skip
    config = run_config.complete(config)
    name = config.model.model_name
    with pytest.raises(
      FileNotFoundError, match=rf'\./{name}\.npz.*--config.pretrained_dir=None'
    ):
      checkpoint.pretrained_weights(config, classify.Task, {})
    assert run_config.resolve_steps(config, 9).warmup_steps == 500
  assert augreg.get_config().pretrained_dir == 'gs://vit_models/augreg'
  # Recipes that train from scratch set this explicitly.
  for config in (digits.get_config(), pretrain.get_config('ti16,cifar10')):
    config = run_config.complete(config)
    assert checkpoint.pretrained_weights(config, classify.Task, {}) == {}


@pytest.mark.parametrize(
  'folders, train_split, test_split, want',
  [
    (('train', 'test'), 'train[:90%]', 'train[90%:]', (('test', 'test'),)),
    (('train',), 'train[:90%]', 'train[90%:]', ()),
    (('train', 'test'), 'train[:90%]', 'test[:5]', ()),
    (('train', 'test'), 'train+test[:5]', 'test[5:]', ()),
  ],
)
def test_folder_is_evaluated_on_its_test_images(
  tmp_path, caplog, folders, train_split, test_split, want
):
  """As in the original, whose AugReg notebook has pp.test='train[90%:]'."""
  for name in folders:
    (tmp_path / name).mkdir()
  config = augreg.get_config('R_Ti_16')
  config.dataset = str(tmp_path)
  config.pp.train, config.pp.test = train_split, test_split
  before = copy.deepcopy(config)
  found = run_config.with_test_folder(config)
  assert found.evals == want
  assert ('evaluating on that split' in caplog.text) == bool(want)
  assert (found.pp, config) == (before.pp, before)
  config.evals = (('val', 'train[90%:]'),)  # Explicit evals take precedence.
  assert run_config.with_test_folder(config).evals == config.evals


def test_batch_must_fit_in_memory(monkeypatch):
  config = common.get_config()
  config.batch = 10_000_000
  with pytest.raises(
    ValueError,
    match=r'batch=10000000 and prefetch=2: .*224 x 224 pixels, take 16822.81 GiB',
  ):
    run_config.check_memory(config, processes=1)
  config.update(batch=4096, batch_eval=4096)
  memory = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 2**20}  # 4 GiB
  monkeypatch.setattr(os, 'sysconf', memory.get)
  run_config.check_memory(config, processes=2)  # 3.4 GiB each
  with pytest.raises(ValueError, match='take 6.89 GiB.* has 4.00 GiB; lower'):
    run_config.check_memory(config, processes=1)


@pytest.mark.parametrize(
  'text, message',
  [
    ('import nothing_such', r'ModuleNotFoundError at .*mine\.py:2: No module'),
    ('x = (', r'SyntaxError at .*mine\.py:2'),
  ],
)
def test_failed_import_of_a_task_is_reported_with_its_cause(
  tmp_path, monkeypatch, text, message
):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'mine.py').write_text(f'"""A task."""\n{text}\n')
  with pytest.raises(ValueError, match=f"task='mine' cannot be imported: {message}"):
    run_config.get_task('mine')


# --- Stored configs ---


@pytest.fixture
def stored(tmp_path):
  """The files of a run, and its config."""
  config = run_config.complete(digits.get_config())
  config = run_config.resolve_steps(config, 1408)
  workdir_lib.create(tmp_path, config, {'class_names': ['a', 'b']}, data={})
  return tmp_path, workdir_lib.to_plain(config)


def test_stored_config_round_trips(stored):
  path, plain = stored
  config, metadata = workdir_lib.load(path)
  assert metadata == {'class_names': ['a', 'b']}
  run_evaluators.check(config)
  assert workdir_lib.to_plain(config) == plain


@pytest.mark.parametrize(
  'text, message',
  [
    ('{}', "no key 'model'"),
    ('{"model": {}, "batch": "x"}', "batch='x' .*integer"),
    ('{"model":', 'Expecting'),
  ],
)
def test_damaged_config_of_a_run_is_reported(stored, text, message):
  path, _ = stored
  stored_runs.change_config(path)
  (path / 'config.json').write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    workdir_lib.load(path)
  assert "config.json' is damaged" in str(error.value)
  assert 'restore the file' in str(error.value)
