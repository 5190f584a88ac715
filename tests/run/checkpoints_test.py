"""Tests of checkpoints that are damaged, deleted meanwhile, or cannot be read."""

import errno
import random
import shutil
import threading

from etils.epath import backend
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from tests import trees
from vit_jax.learning import optim, state as state_lib
from vit_jax.run import checkpoint_files, checkpoints as checkpoints_lib

# Of what Orbax had begun when a call failed.
pytestmark = pytest.mark.filterwarnings('ignore:coroutine:RuntimeWarning')


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
  monkeypatch.setattr(checkpoints_lib, 'RETRY_AFTER', (0, 0))


def make_state(step, dtype=jnp.float32):
  """A state with an average, and an optimiser's state larger than all else."""
  params = {
    'kernel': jnp.full((64, 8), step, dtype),
    'bias': jnp.ones(3, dtype),
  }
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
  """Checkpoints of steps 10 and 20; read only."""
  workdir = tmp_path_factory.mktemp('saved')
  checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
  for step in (10, 20):
    checkpoints.save(step, make_state(step))
  checkpoints.close()
  return workdir


@pytest.fixture
def workdir(saved, tmp_path):
  """A copy of them; to be changed at will."""
  return shutil.copytree(saved, tmp_path / 'run')


def restore(workdir, **kwargs):
  return checkpoints_lib.Checkpoints(workdir).restore(abstract(**kwargs))


def files_of(workdir, step=20):
  folder = workdir / 'checkpoints' / str(step) / 'default'
  return sorted(p for p in folder.rglob('*') if p.is_file())


def names_in(workdir):
  return sorted(p.name for p in (workdir / 'checkpoints').iterdir())


# --- Damage ---


def test_every_flipped_bit_is_noticed(workdir):
  rng = random.Random(0)
  files = [p for p in files_of(workdir) if p.name != 'commit_success.txt']
  assert {'_METADATA', '_sharding', 'checksums.json', 'process_0.json'} <= {
    path.name for path in files
  }
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  flips = [(path, rng.random()) for path in files for _ in range(6)]
  assert len(flips) > 52
  for path, place in flips:
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(place * len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match='the newest, step 20: .*checksum'):
      reader.restore(abstract(), 20)
    path.write_bytes(content)
  assert reader.restore(abstract())[1] == 20


@pytest.mark.parametrize('change', ['swapped', 'shifted', 'reversed'])
def test_changes_that_keep_the_sum_of_the_words_are_noticed(workdir, change):
  """In the first 64 KiB of a file, taken as little-endian 64-bit words."""
  [path] = [p for p in files_of(workdir) if p.stat().st_size > 70_000]
  words = np.frombuffer(path.read_bytes()[: 2**16], '<u8').copy()
  before = words.copy()
  if change == 'swapped':
    words[5000:5002] = words[5001:4999:-1]
  elif change == 'shifted':
    words[5000] += 1
    words[5001] -= 1
  else:
    words = words[::-1]
  assert (words != before).any()
  assert words.sum() == before.sum()
  with path.open('r+b') as file:
    file.write(words.tobytes())
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  with pytest.raises(ValueError, match='checksum'):
    reader.restore(abstract(), 20)


@pytest.mark.parametrize('change', ['missing', 'truncated', 'longer', 'unlisted'])
def test_files_that_are_not_whole_are_noticed(workdir, change):
  [path] = [p for p in files_of(workdir) if p.stat().st_size > 70_000]
  if change == 'missing':
    path.unlink()
  elif change == 'unlisted':
    shutil.rmtree(path.parents[2] / 'checksums')
    (path.parents[2] / 'checksums.json').unlink()
  else:
    size = path.stat().st_size + (-5 if change == 'truncated' else 5)
    with path.open('r+b') as file:
      file.truncate(size)
  state, step = restore(workdir)
  assert step == 10
  trees.assert_same(state, make_state(10))
  assert names_in(workdir) == ['10']
  assert (workdir / 'damaged_checkpoints' / '20_0').is_dir()


def test_a_checkpoint_under_the_number_of_another_is_refused(workdir, caplog):
  folder = workdir / 'checkpoints'
  (folder / '20').rename(folder / '15')
  assert restore(workdir)[1] == 10
  assert 'checkpoints/15 cannot be restored' in caplog.text
  assert 'the state in it is of step 20' in caplog.text
  with pytest.raises(FileNotFoundError, match='has no complete checkpoint'):
    checkpoints_lib.load_weights(workdir / 'elsewhere')


def test_one_of_another_model_is_of_no_use_and_nothing_is_moved(workdir):
  with pytest.raises(ValueError, match=r'the newest, step 20: .*\(64, 8\)'):
    restore(workdir, kernel=(64, 9))
  assert names_in(workdir) == ['10', '20']


# --- What is no checkpoint, or none any more ---


def test_what_is_incomplete_is_passed_over(workdir):
  folder = workdir / 'checkpoints'
  (folder / '999').mkdir()
  (folder / '1000.orbax-checkpoint-tmp' / 'default').mkdir(parents=True)
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  assert reader.steps() == [10, 20]
  assert reader.restore_weights().step == 20
  want = optim.get_ema(make_state(20).opt_state)
  trees.assert_same(checkpoints_lib.load_weights(workdir).params, want)
  assert (folder / '999').exists()
  # A run moves it out of the way: Orbax would save nothing before step 999.
  writer = checkpoints_lib.Checkpoints(workdir, keep=2)
  assert writer.restore(abstract())[1] == 20
  writer.save(30, make_state(30))
  writer.close()
  assert names_in(workdir) == ['20', '30']


def test_reading_beside_a_run_that_deletes(tmp_path):
  writer = checkpoints_lib.Checkpoints(tmp_path, keep=1)
  writer.save(1, make_state(1))
  writer.wait()
  done = threading.Event()

  def write():
    step = 1
    while not done.is_set():
      step += 1
      writer.save(step, make_state(step))
      writer.wait()

  thread = threading.Thread(target=write)
  thread.start()
  try:
    for _ in range(12):
      weights = checkpoints_lib.Checkpoints(tmp_path, read_only=True).restore_weights()
      assert (weights.params['kernel'] == weights.step + 0.5).all()
  finally:
    done.set()
    thread.join()
  writer.close()


def test_one_deleted_while_it_is_read_gives_way_to_the_next(workdir, monkeypatch):
  original = checkpoint_files.read_weights
  folder = workdir / 'checkpoints'

  def deleted(path, *args):
    if path.parent.name == '20':  # The run has saved step 30 meanwhile.
      shutil.rmtree(folder / '20')
      writer = checkpoints_lib.Checkpoints(workdir)
      writer.save(30, make_state(30))
      writer.close()
    return original(path, *args)

  shutil.rmtree(folder / '10')
  monkeypatch.setattr(checkpoint_files, 'read_weights', deleted)
  reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
  assert reader.restore_weights().step == 30


def test_a_reader_is_not_advised_to_take_a_folder_away(workdir):
  for step in (10, 20):
    for path in files_of(workdir, step):
      path.write_bytes(b'')
  with pytest.raises(ValueError, match='no checkpoint in') as error:
    checkpoints_lib.load_weights(workdir)
  assert 'folder away' not in str(error.value)
  assert names_in(workdir) == ['10', '20']


def test_parameters_are_read_and_no_more(saved):
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


def test_what_orbax_would_not_write_is_an_error(workdir):
  checkpoints = checkpoints_lib.Checkpoints(workdir)
  with pytest.raises(OSError, match='step 20 or a later one already'):
    checkpoints.save(20, make_state(20))


# --- Storage that does not answer ---


class Faults:
  """Lets calls of etils' backend for local files, and of TensorStore's, fail."""

  NAMES = ('open', 'exists', 'isdir', 'listdir', 'makedirs', 'mkdir', 'rename')
  NAMES += ('rmtree', 'stat')

  def __init__(self, monkeypatch):
    self.calls = 0
    self._first, self._forever = None, False
    for name in self.NAMES:
      self._wrap(monkeypatch, backend._OsPathBackend, name)
    self._wrap(monkeypatch, ts, 'open')

  def arm(self, first, forever):
    self.calls, self._first, self._forever = 0, first, forever

  def _wrap(self, monkeypatch, holder, name):
    original = getattr(holder, name)

    def call(*args, **kwargs):
      number, self.calls = self.calls, self.calls + 1
      if self._first is not None and (
        number == self._first or (self._forever and number > self._first)
      ):
        if name in ('exists', 'isdir'):
          return False  # What these make of any error.
        raise OSError(errno.EIO, 'the storage does not answer')
      return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, call)


@pytest.fixture
def faults(monkeypatch):
  return Faults(monkeypatch)


def attempt(function, *args):
  """Returns (what a function returns, None) or (None, the text of OSError)."""
  try:
    return function(*args), None
  except OSError as e:
    return None, str(e)


def test_an_error_at_any_call_of_a_restoration_loses_nothing(workdir, faults, caplog):
  faults.arm(None, False)
  restore(workdir)
  for number in range(faults.calls):
    for forever in (False, True):
      caplog.clear()
      faults.arm(number, forever)
      found, error = attempt(restore, workdir)
      faults.arm(None, False)
      if error is None:
        assert found[1] == 20
      else:
        assert forever
        assert 'cannot be read now: [Errno 5]' in error
        assert 'start the same command again' in error
      assert 'damaged' not in caplog.text
      assert names_in(workdir) == ['10', '20']
  assert not (workdir / 'damaged_checkpoints').exists()


def save(workdir, step):
  checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
  try:
    checkpoints.save(step, make_state(step))
  finally:
    checkpoints.close()


def test_an_error_at_any_call_of_a_save_loses_nothing(workdir, faults):
  faults.arm(None, False)
  save(workdir, 21)
  for step, number in enumerate(range(0, faults.calls, 4), 30):
    before = checkpoints_lib.Checkpoints(workdir).steps()[-1]
    faults.arm(number, step % 2 == 0)
    _, error = attempt(save, workdir, step)
    faults.arm(None, False)
    if error is None:
      assert restore(workdir)[1] == step
    else:
      assert 'a checkpoint could not be written to' in error
      assert restore(workdir)[1] in (before, step)
    assert not (workdir / 'damaged_checkpoints').exists()


def test_errors_and_then_damage_are_told_as_damage(workdir, monkeypatch):
  """In any order: the last of all attempts may be the first to see damage."""
  original, faults = checkpoint_files.attempt, []

  def attempt(path, *args):
    fault = faults.pop(0) if faults and path.parent.name == '20' else None
    answers = {
      'error': (None, None, 'no answer'),
      'damage': (None, 'cut', None),
    }
    return answers.get(fault) or original(path, *args)

  monkeypatch.setattr(checkpoint_files, 'attempt', attempt)
  for first, step in (
    (['error', 'error'], 20),
    (['error', 'error', 'damage'], 20),
    (['error', 'error', 'error', 'damage', 'damage'], 10),
    (['damage', 'error', 'damage', 'error', 'damage', 'damage'], 10),
  ):
    faults[:] = first
    reader = checkpoints_lib.Checkpoints(workdir, read_only=True)
    assert reader.restore(abstract())[1] == step, first
  faults[:] = ['error'] * 4
  with pytest.raises(OSError, match='cannot be read now: no answer'):
    restore(workdir)


def test_a_save_that_began_is_completed_when_the_run_fails(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)

  def run():
    with checkpoints:
      checkpoints.save(1, make_state(1))
      raise FloatingPointError

  with pytest.raises(FloatingPointError):
    run()
  assert checkpoints.steps() == [1]
  checkpoints.save(2, make_state(2))  # It can be used again.
  checkpoints.close()
  assert checkpoints.steps() == [2]


# --- The best ---


def save_rated(workdir, *rated, keep=1):
  """Saves steps with their accuracies, each after another start."""
  for step, accuracy in rated:
    checkpoints = checkpoints_lib.Checkpoints(workdir, keep, 'accuracy')
    metrics = accuracy and {'accuracy': accuracy, 'loss': np.float32(1)}
    checkpoints.save(step, make_state(step), metrics)
    checkpoints.close()


def test_the_best_stays_also_after_another_start(tmp_path):
  save_rated(tmp_path, (1, 0.5), (2, 0.9), (3, 0.7), (4, None), (5, 0.8))
  assert names_in(tmp_path) == ['2', '5']
  save_rated(tmp_path, (6, 0.85))
  assert names_in(tmp_path) == ['2', '6']
  low = checkpoints_lib.Checkpoints(tmp_path, 1, 'accuracy', low=True)
  low.save(7, make_state(7), {'accuracy': 0.88})
  low.close()
  assert names_in(tmp_path) == ['6', '7']


@pytest.mark.parametrize(
  'content',
  [b'', b'\xff\xfe', b'[1,2]', b'null', b'{"accuracy": "high"}', b'[' * 10**5,
   b'{"accuracy": NaN}', b'{"accuracy": [1]}', b'{"accuracy": true}'],
)  # fmt: skip
def test_a_damaged_metric_ends_no_run(tmp_path, content):
  save_rated(tmp_path, (1, 0.9), (2, 0.5))
  folder = tmp_path / 'checkpoints' / '1'
  assert (folder / 'default/metrics.json').exists()
  (folder / 'default/metrics.json').write_bytes(content)
  (folder / '_CHECKPOINT_METADATA').write_bytes(content)
  checkpoints = checkpoints_lib.Checkpoints(tmp_path, 1, 'accuracy')
  assert checkpoints.restore(abstract(), 1)[1] == 1
  checkpoints.save(3, make_state(3), {'accuracy': 0.6})
  checkpoints.close()
  assert names_in(tmp_path) == ['3']  # Of what is known it is the best.


def test_no_flipped_bit_changes_which_is_the_best(tmp_path):
  save_rated(tmp_path, (1, 0.9))
  folder = tmp_path / 'checkpoints' / '1'
  file = folder / 'default' / 'metrics.json'
  content = file.read_bytes()
  for place in range(8 * len(content)):
    damaged = bytearray(content)
    damaged[place // 8] ^= 1 << place % 8
    file.write_bytes(damaged)
    assert checkpoint_files.read_metric(folder, 'accuracy') is None
  file.write_bytes(content)
  assert checkpoint_files.read_metric(folder, 'accuracy') == 0.9


def test_what_is_evaluated_after_a_signal_can_be_the_best(tmp_path):
  """The signal came during the evaluation: it is done when the run goes on."""
  save_rated(tmp_path, (1, None))
  checkpoints = checkpoints_lib.Checkpoints(tmp_path, 1, 'accuracy')
  checkpoints.rate(1, {'accuracy': 0.9})
  save_rated(tmp_path, (2, 0.5))
  assert names_in(tmp_path) == ['1', '2']
  assert checkpoints.restore(abstract(), 1)[1] == 1
  checkpoints.rate(3, {'accuracy': 0.95})  # There is none.
  assert names_in(tmp_path) == ['1', '2']


# --- What else lies in the folder ---


def test_what_is_no_checkpoint_is_passed_over(workdir):
  folder = workdir / 'checkpoints'
  (folder / '\N{SUPERSCRIPT FOUR}').mkdir()
  (folder / '\N{ARABIC-INDIC DIGIT THREE}').mkdir()
  (folder / '007').mkdir()
  (folder / '50').write_text('a file')
  (folder / '70').symlink_to(folder / 'nowhere')
  (folder / 'damaged_checkpoints').write_text('a file')
  (workdir / 'damaged_checkpoints').write_text('a file')
  odd = set(names_in(workdir)) - {'10', '20'}
  assert checkpoints_lib.load_weights(workdir).step == 20
  checkpoints = checkpoints_lib.Checkpoints(workdir, 1, 'accuracy')
  assert checkpoints.restore(abstract())[1] == 20
  for step in (40, 50, 70):  # Some of these names are taken.
    checkpoints.save(step, make_state(step), {'accuracy': step / 100})
    checkpoints.wait()
    assert checkpoints.steps()[-1] == step
  checkpoints.close()
  assert set(names_in(workdir)) == odd - {'50', '60'}
  assert sorted(
    path.name for path in (workdir / 'damaged_checkpoints_1').iterdir()
  ) == ['50_0', '70_1']
