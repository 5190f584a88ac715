"""Tests of checkpoints that are damaged, deleted while read, or unreadable."""

import errno
import json
import os
import random
import shutil

from etils.epath import backend
import jax
import jax.numpy as jnp
import pytest
import tensorstore as ts

from tests import trees
from vit_jax.learning import optim, state as state_lib
from vit_jax.run import checkpoints as checkpoints_lib

# From coroutines that Orbax had started when a call failed.
pytestmark = pytest.mark.filterwarnings('ignore:coroutine:RuntimeWarning')


def make_state(step, dtype=jnp.float32):
  """A state with averaged parameters and a large optimiser state."""
  params = {'kernel': jnp.full((64, 8), step, dtype), 'bias': jnp.ones(3, dtype)}
  average = jax.tree.map(lambda x: x + 0.5, params)
  moments = jax.random.normal(jax.random.key(step), (200, 100))
  opt_state = (moments, optim.EmaState(average))
  return state_lib.TrainState(jnp.int32(step), params, opt_state)


def abstract(dtype=jnp.float32, kernel=(64, 8)):
  mesh = jax.make_mesh((8,), ('data',))
  tree = make_state(0, dtype)
  tree.params['kernel'] = jax.ShapeDtypeStruct(kernel, dtype)
  whole = jax.NamedSharding(mesh, jax.P())
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree
  )


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Read-only checkpoints of steps 10 and 20."""
  workdir = tmp_path_factory.mktemp('saved')
  (workdir / 'config.json').touch()
  checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
  for step in (10, 20):
    checkpoints.save(step, make_state(step))
  checkpoints.close()
  return workdir


@pytest.fixture
def workdir(saved, tmp_path):
  """A copy of the checkpoints, for tests that modify them."""
  return shutil.copytree(saved, tmp_path / 'run')


def restore(workdir, **kwargs):
  return checkpoints_lib.Checkpoints(workdir).restore(abstract(**kwargs))


def files_of(workdir, step=20):
  folder = workdir / 'checkpoints' / str(step) / 'default'
  return sorted(p for p in folder.rglob('*') if p.is_file())


def names_in(workdir):
  return sorted(p.name for p in (workdir / 'checkpoints').iterdir())


# --- Damage ---


def test_every_flipped_bit_is_detected(workdir):
  rng = random.Random(0)
  files = [p for p in files_of(workdir) if p.name != 'commit_success.txt']
  assert {'_METADATA', '_sharding', 'checksums.json'} <= {path.name for path in files}
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  flips = [(path, rng.random()) for path in files for _ in range(3)]
  assert len(flips) > 26
  for path, place in flips:
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match='the newest, step 20: .*checksum'):
      reader.restore(abstract(), 20)
    path.write_bytes(content)
  assert reader.restore(abstract())[1] == 20


def test_deep_tree_is_rejected(workdir):
  """Libraries that build trees call themselves once for each level."""
  folder = workdir / 'checkpoints' / '20' / 'default'
  metadata = json.loads((folder / '_METADATA').read_text())
  entry = next(iter(metadata['tree_metadata'].values()))
  entry['key_metadata'] *= 3000
  (folder / '_METADATA').write_text(json.dumps(metadata))
  checksums = json.loads((folder / 'checksums.json').read_text())
  checksums |= checkpoints_lib._checksums(folder, ['_METADATA'])
  (folder / 'checksums.json').write_text(json.dumps(checksums))
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  with pytest.raises(ValueError, match="checkpoints/20' cannot be restored: .* levels"):
    reader.restore_weights()


@pytest.mark.parametrize('change', ['missing', 'truncated', 'unlisted', 'pipe'])
def test_missing_truncated_and_unlisted_files_and_pipes_are_detected(
  workdir, change, caplog
):
  [path] = [p for p in files_of(workdir) if p.stat().st_size > 70_000]
  if change == 'missing':
    path.unlink()
  elif change == 'unlisted':
    path = workdir / 'checkpoints/20/default/checksums.json'
    path.unlink()
  elif change == 'pipe':
    path.unlink()
    os.mkfifo(path)
  else:
    path.write_bytes(path.read_bytes()[:-5])
  state, step = restore(workdir)
  assert step == 10
  trees.assert_same(state, make_state(10))
  assert names_in(workdir) == ['10']
  assert (workdir / 'damaged_checkpoints' / '20').is_dir()
  [warning] = [r for r in caplog.records if r.levelname == 'WARNING']
  assert str(path) in warning.getMessage()


def test_checkpoint_of_another_model_is_an_error_and_is_kept(workdir):
  with pytest.raises(ValueError, match=r"20' .*'params/kernel' .*\(64, 8\).*\(64, 9\)"):
    restore(workdir, kernel=(64, 9))
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  with pytest.raises(ValueError, match=r"/ema/kernel' .*\(64, 8\).*\(64, 9\)"):
    reader.restore_weights(abstract(kernel=(64, 9)).params)
  assert names_in(workdir) == ['10', '20']


def test_renamed_checkpoint_is_an_error_and_is_kept(workdir):
  """Its files are good, and the remedy is to rename it back."""
  (workdir / 'checkpoints' / '20').rename(workdir / 'checkpoints' / '19')
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  for read in (
    lambda: restore(workdir),
    lambda: reader.restore_weights(),
    lambda: reader.restore_weights(step=19),
    lambda: checkpoints_lib.load_weights(workdir),
  ):
    with pytest.raises(ValueError, match="checkpoints/19' .*step 20.* rename it to 20"):
      read()
  assert names_in(workdir) == ['10', '19']
  (workdir / 'checkpoints' / '19').rename(workdir / 'checkpoints' / '20')
  assert restore(workdir)[1] == 20


# --- Incomplete and deleted checkpoints ---


def test_incomplete_checkpoints_are_skipped_and_removed(workdir):
  folder = workdir / 'checkpoints'
  (folder / '999').mkdir()  # Its files were deleted before a kill.
  (folder / '1000.orbax-checkpoint-tmp' / 'default').mkdir(parents=True)
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  assert reader.restore_weights().step == 20
  want = optim.get_ema(make_state(20).opt_state)
  trees.assert_same(checkpoints_lib.load_weights(workdir).params, want)
  assert (folder / '999').exists()
  writer = checkpoints_lib.Checkpoints(workdir, keep=2)
  assert writer.restore(abstract())[1] == 20
  writer.save(30, make_state(30))
  writer.close()
  assert names_in(workdir) == ['20', '30']
  with pytest.raises(FileNotFoundError, match='elsewhere.* has no complete checkpoint'):
    checkpoints_lib.load_weights(workdir / 'elsewhere')


def test_newer_checkpoint_is_read_if_one_is_deleted_meanwhile(workdir, monkeypatch):
  original = checkpoints_lib._read_weights
  folder = workdir / 'checkpoints'

  def deleted(path, *args):
    if path.parent.name == '20':  # Meanwhile the run saved step 30.
      shutil.rmtree(folder / '20')
      writer = checkpoints_lib.Checkpoints(workdir)
      writer.save(30, make_state(30))
      writer.close()
    return original(path, *args)

  shutil.rmtree(folder / '10')
  monkeypatch.setattr(checkpoints_lib, '_read_weights', deleted)
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  assert reader.restore_weights().step == 30


def test_only_parameters_are_read(saved):
  counter = '/tensorstore/kvstore/file/bytes_read'

  def count():
    [metric] = ts.experimental_collect_matching_metrics(counter)
    return metric['values'][0]['value']

  reader = checkpoints_lib.Checkpoints(saved, read_only=True)
  whole = abstract()
  before = count()
  weights = reader.restore_weights(whole.params, {})
  part, before = count() - before, count()
  reader.restore(whole)
  everything = count() - before
  assert everything > 70_000
  assert part < 10_000
  kernel = weights.params['kernel']
  assert kernel.sharding == whole.params['kernel'].sharding
  assert kernel.dtype == jnp.float32
  assert (kernel == 20.5).all()


# --- Storage errors ---


class Faults:
  """Makes calls to etils' backend for local files and to TensorStore fail."""

  NAMES = ('open', 'listdir', 'makedirs', 'mkdir', 'rename', 'rmtree', 'stat')

  def __init__(self, monkeypatch):
    self.calls, self._first = 0, None
    for name in self.NAMES:
      self._wrap(monkeypatch, backend._OsPathBackend, name)
    self._wrap(monkeypatch, ts, 'open')

  def arm(self, first):
    """Makes all calls from number `first` on fail, or none if it is None."""
    self.calls, self._first = 0, first

  def _wrap(self, monkeypatch, holder, name):
    original = getattr(holder, name)

    def call(*args, **kwargs):
      number, self.calls = self.calls, self.calls + 1
      if self._first is not None and number >= self._first:
        raise OSError(errno.EIO, 'the storage does not answer')
      return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, call)


@pytest.fixture
def faults(monkeypatch):
  return Faults(monkeypatch)


def attempt(function, *args):
  """Returns (result, None), or (None, message) if the function raises OSError."""
  try:
    return function(*args), None
  except OSError as e:
    return None, str(e)


def test_storage_errors_while_reading_lose_no_checkpoint(workdir, faults, caplog):
  faults.arm(None)
  restore(workdir)
  for number in range(faults.calls):
    faults.arm(number)
    found, error = attempt(restore, workdir)
    faults.arm(None)
    assert found[1] == 20 if error is None else 'storage does not answer' in error
    assert 'damaged' not in caplog.text
    assert names_in(workdir) == ['10', '20']
  assert not (workdir / 'damaged_checkpoints').exists()


def save(workdir, step):
  checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
  try:
    checkpoints.save(step, make_state(step))
  finally:
    checkpoints.close()


def test_storage_errors_while_saving_lose_no_checkpoint(workdir, faults):
  faults.arm(None)
  save(workdir, 21)
  for step, number in enumerate(range(0, faults.calls, 6), 30):
    before = checkpoints_lib.Checkpoints(workdir).steps()[-1]
    faults.arm(number)
    _, error = attempt(save, workdir, step)
    faults.arm(None)
    if error is None:
      assert restore(workdir)[1] == step
    else:
      assert str(workdir / 'checkpoints') in error
      assert restore(workdir)[1] in (before, step)
    assert not (workdir / 'damaged_checkpoints').exists()


def test_pending_save_is_completed_if_the_run_fails(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)

  def run():
    with checkpoints:
      checkpoints.save(1, make_state(1))
      raise FloatingPointError

  with pytest.raises(FloatingPointError):
    run()
  assert checkpoints.steps() == [1]
  checkpoints.save(2, make_state(2))  # The object can be reused.
  checkpoints.close()
  assert checkpoints.steps() == [2]


# --- The best checkpoint ---


def save_rated(workdir, *rated, keep=1, low=False):
  """Saves steps and logs their accuracies; each save is by a restarted run."""
  for step, accuracy in rated:
    if accuracy is not None:
      rate(workdir, step, accuracy)
    with checkpoints_lib.Checkpoints(workdir, keep, 'accuracy', low) as checkpoints:
      checkpoints.save(step, make_state(step))


def rate(workdir, step, accuracy):
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write(json.dumps({'step': step, 'loss': 1.0}) + '\n')
    file.write(json.dumps({'step': step, 'accuracy': accuracy}) + '\n')


def test_best_checkpoint_is_kept_across_restarts(tmp_path):
  save_rated(tmp_path, (1, 0.5), (2, 0.9), (3, 0.7), (4, None), (5, 0.8))
  assert names_in(tmp_path) == ['2', '5']
  save_rated(tmp_path, (6, 0.85), (7, float('nan')))
  assert names_in(tmp_path) == ['2', '7']
  save_rated(tmp_path, (8, 0.95))
  assert names_in(tmp_path) == ['8']
  save_rated(tmp_path, (9, 0.88), (10, 0.9), low=True)
  assert names_in(tmp_path) == ['10', '9']


def test_checkpoint_evaluated_after_a_signal_can_be_the_best(tmp_path):
  """The signal interrupted the evaluation, and the resumed run repeats it."""
  save_rated(tmp_path, (1, None))
  rate(tmp_path, 1, 0.9)
  save_rated(tmp_path, (2, 0.5))
  assert names_in(tmp_path) == ['1', '2']
  assert restore(tmp_path)[1] == 2
