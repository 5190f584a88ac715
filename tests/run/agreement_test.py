"""Tests of two processes, one with a damaged checkpoint or failing storage."""

from tests import processes

# Each process prints the steps that it restored.
PROGRAM = """
import errno, json, sys
import jax
jax.config.update('jax_platforms', 'cpu')
import jax.numpy as jnp
from etils.epath import backend
from vit_jax.learning import state as state_lib
from vit_jax.run import checkpoints as checkpoints_lib
from vit_jax.distributed import heartbeats, processes

heartbeats.GRACE = 0.5
address, me, workdir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
processes.initialize(address, 2, me)
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

def restore():
  return checkpoints_lib.Checkpoints(workdir).restore(abstract)[1]

restored = [restore()]
check = checkpoints_lib._check
def damaged(path, *args):
  if me and path.parent.name == '20':
    return 'the half of process 1 is damaged'
  return check(path, *args)
checkpoints_lib._check = damaged
restored.append(restore())
checkpoints_lib._check = check
print('SAID ' + json.dumps(restored), flush=True)

def fail(*args, **kwargs):
  raise OSError(errno.EIO, 'the storage does not answer')
if me:
  for name in ('open', 'mkdir', 'makedirs'):
    setattr(backend._OsPathBackend, name, fail)
  import tensorstore
  tensorstore.open = fail
with processes.connected(distributed=False):
  with checkpoints:
    for step in range(30, 1000):
      checkpoints.save(step, make(step))
"""


def test_processes_agree_on_damage_and_stop_together(tmp_path):
  (tmp_path / 'config.json').touch()  # Else the run would seem to have been moved.
  statuses, outputs = processes.run_two(PROGRAM, tmp_path)
  for steps in processes.said(outputs):
    assert steps == [20, 10]  # Damage seen by one process counts for both.
  assert [p.name for p in (tmp_path / 'damaged_checkpoints').iterdir()] == ['20']
  assert all(statuses)
  assert all('the storage does not answer' in output for output in outputs)
