"""Tests of two processes whose storage fails, or is damaged, for one of them."""

from tests import processes

# Each process prints what became of each trial. Of process 1 the calls from number
# `at` on fail, of those that etils makes on local files.
PROGRAM = """
import errno, json, os, sys, time
import jax
jax.config.update('jax_platforms', 'cpu')
import jax.numpy as jnp
from etils.epath import backend
from vit_jax.learning import state as state_lib
from vit_jax.run import checkpoint_files
from vit_jax.run import checkpoints as checkpoints_lib
from vit_jax.distributed import processes

address, me, workdir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
processes.initialize(address, 2, me)
checkpoints_lib.RETRY_AFTER = (0, 0.1)
mesh = jax.make_mesh((2,), ('data',))
split = jax.NamedSharding(mesh, jax.P('data'))
whole = jax.NamedSharding(mesh, jax.P())

def tree(step):
  params = {'kernel': jnp.full((64, 8), step, jnp.float32)}
  return state_lib.TrainState(jnp.int32(step), params, (params,))

shardings = jax.tree.map(lambda x: split if x.ndim else whole, tree(0))
make = jax.jit(tree, static_argnums=0, out_shardings=shardings)
abstract = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(0)
)
checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
for step in (10, 20):
  checkpoints.save(step, make(step))
checkpoints.close()

calls, at, forever = 0, None, False
def failing(original, name):
  def call(*args, **kwargs):
    global calls
    number, calls = calls, calls + 1
    if at is not None and (number == at or forever and number > at):
      if name in ('exists', 'isdir'):
        return False
      raise OSError(errno.EIO, 'the storage does not answer')
    return original(*args, **kwargs)
  return call
for name in ('open', 'exists', 'isdir', 'listdir', 'mkdir', 'rename', 'stat'):
  original = getattr(backend._OsPathBackend, name)
  setattr(backend._OsPathBackend, name, failing(original, name))

said = []
def trial(function, first=None, ever=False):
  global calls, at, forever
  calls, at, forever = 0, first if me else None, ever
  try:
    said.append(function())
  except Exception as e:
    said.append([type(e).__name__, str(e)])
  at = None

def restore():
  return checkpoints_lib.Checkpoints(workdir).restore(abstract)[1]

if len(sys.argv) > 4:  # Process 1 cannot write any more, long after the start.
  processes.DEADLINE = 5
  writer = checkpoints_lib.Checkpoints(workdir, keep=2)
  writer.save(30, make(30))
  writer.wait()
  began = time.monotonic()
  trial(lambda: writer.save(40, make(40)) or 'went on', 0, True)
  print('SAID ' + json.dumps([*said[0], time.monotonic() - began]), flush=True)
  sys.exit()

trial(restore)
count = calls
for first in range(0, 40, 4):
  trial(restore, first)
trial(restore, 5, True)
trial(restore, 20, True)
check = checkpoint_files.check
def damaged(path, *args):
  if me and path.parent.name == '20':
    raise checkpoint_files.DamagedError('the half of process 1 is damaged')
  check(path, *args)
checkpoint_files.check = damaged
trial(restore)
checkpoint_files.check = check
# Storage that answers "there is no such file" is waited for, twice as long as this.
processes.DEADLINE = 3
def save():
  checkpoints = checkpoints_lib.Checkpoints(workdir, keep=2)
  checkpoints.save(30, make(30))
  checkpoints.wait()
trial(save, 6, True)
print('SAID ' + json.dumps(said), flush=True)
"""


def test_two_processes_agree_and_neither_waits_for_ever(tmp_path):
  _, outputs = processes.run_two(PROGRAM, tmp_path)
  said = processes.said(outputs)
  for own in said:
    assert own[:11] == [20] * 11  # Without an error, and after one that passes.
    for kind, message in own[11:13]:
      assert kind == 'OSError'
      assert 'cannot be read now: [Errno 5]' in message
    assert own[13] == 10  # Damage that one alone has seen.
    kind, message = own[14]
    assert kind == 'OSError'
    assert 'a checkpoint could not be written to' in message
  assert sorted(p.name for p in (tmp_path / 'damaged_checkpoints').iterdir()) == [
    '20_0'
  ]
  assert (tmp_path / 'checkpoints' / '10').is_dir()


def test_a_process_that_cannot_write_stops_both_at_that_save(tmp_path):
  _, outputs = processes.run_two(PROGRAM, tmp_path, 'late')
  for kind, message, seconds in processes.said(outputs):
    assert kind == 'OSError'
    assert 'a checkpoint could not be written to' in message
    assert 'the storage does not answer' in message
    assert seconds < 5  # The deadline.
