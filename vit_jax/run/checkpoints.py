"""The checkpoints of a run (Orbax): the newest few, and the best.

They lie in `workdir/checkpoints/<step>`. They are written in the background,
appear under their name only when complete, and can be restored on any other mesh.
"""

import contextlib

from absl import logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from vit_jax.learning import state as state_lib
from vit_jax.run import workdir as workdir_lib


def _short(error: Exception) -> str:
  """Begin and end of an error's text; Orbax's are long, the cause stands last."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) < 300 else f'{text[:120]} ... {text[-160:]}'


def _stored(state: state_lib.TrainState) -> dict:
  """What of a state is written: where there is nothing extra, nothing of it."""
  tree = {key: getattr(state, key) for key in ('step', 'params', 'opt_state')}
  if jax.tree.leaves(state.extra):
    tree['extra'] = state.extra
  return tree


class Checkpoints:
  """The checkpoints of a run: the newest few, and the best.

  Args:
    workdir: folder of the run.
    keep: number of the newest that stay.
    best_metric: name of the metric by which one more, the best, stays.
    low: whether the lowest is the best.
    read_only: whether the folder is only read from.
  """

  def __init__(
    self,
    workdir,
    keep: int = 1,
    best_metric: str | None = None,
    low: bool = False,
    read_only: bool = False,
  ):
    self._read_only = read_only
    self.directory = workdir_lib.absolute(workdir) / 'checkpoints'
    sign = -1 if low else 1
    policies = [checkpoint_managers.LatestN(max(1, keep))]
    if best_metric:
      policies.append(
        checkpoint_managers.BestN(
          get_metric_fn=lambda m: (
            sign * m.get(best_metric, -sign * float('inf'))
          ),
          n=1,
          keep_checkpoints_without_metrics=False,
        )
      )
    options = ocp.CheckpointManagerOptions(
      preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      cleanup_tmp_directories=not read_only,
      create=not read_only,
    )
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=options,
      item_handlers=ocp.StandardCheckpointHandler(),
    )

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def save(
    self, step: int, state: state_lib.TrainState, metrics: dict | None = None
  ):
    """Begins to write a checkpoint; the one before it must then be complete.

    Raises:
      OSError: if this or the one before cannot be written.
    """
    try:
      self._manager.save(
        step, args=ocp.args.StandardSave(_stored(state)), metrics=metrics
      )
    except Exception as e:
      raise self._failure(e) from e

  def wait(self):
    """Waits until all is written; raises OSError if it cannot be."""
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      raise self._failure(e) from e

  def _failure(self, cause):
    steps = self.steps()
    last = f'step {steps[-1]}' if steps else 'none'
    return OSError(
      f"a checkpoint could not be written to '{self.directory}': {_short(cause)}. The "
      f'last complete one: {last}. Free some space (or mend the disk) and start '
      'the same command again: the run goes on from there'
    )

  def restore(self, abstract, step: int | None = None):
    """Restores a checkpoint onto the shardings of `abstract`.

    Tries the newest first; one that is damaged or is not of this run is moved
    aside, and the next older one is taken.

    Args:
      abstract: TrainState of jax.ShapeDtypeStruct.
      step: the one to restore, and no other.

    Returns:
      (state, step); (None, 0) where there is no checkpoint.

    Raises:
      ValueError: if there are checkpoints but none can be restored.
    """
    failures = []
    for candidate in [step] if step is not None else self.steps()[::-1]:
      try:
        restored = self._manager.restore(
          candidate, args=ocp.args.StandardRestore(_stored(abstract))
        )
      except Exception as e:  # pylint: disable=broad-except
        reason = _short(e)
        failures.append((candidate, reason))
        logging.warning(
          'Checkpoint %s/%d cannot be restored (it is damaged or of another '
          'run): %s',
          self.directory,
          candidate,
          reason,
        )
        continue
      for bad, _ in failures if not self._read_only else []:
        self._move_aside(bad)
      if failures:
        logging.warning('Restored the older checkpoint of step %d', candidate)
      return abstract.replace(**restored), candidate
    if failures:
      raise ValueError(
        f"no checkpoint in '{self.directory}' can be restored; the newest, step "
        f'{failures[0][0]}: {failures[0][1]}. Take the folder away to start '
        'anew, or use another --workdir'
      )
    return None, 0

  def _move_aside(self, step):
    """Keeps a damaged checkpoint under another name, out of the way."""
    if jax.process_index() == 0:
      target = self.directory.parent / 'damaged_checkpoints'
      target.mkdir(parents=True, exist_ok=True)
      count = sum(1 for _ in target.iterdir())
      (self.directory / str(step)).rename(target / f'{step}_{count}')
    multihost_utils.sync_global_devices('move_aside')
    self._manager.reload()

  def close(self):
    """Waits until all is written and frees what is held."""
    self.wait()
    self._manager.close()


def has_checkpoint(workdir) -> bool:
  """Tells whether a folder holds a checkpoint, without opening any."""
  folder = epath.Path(workdir) / 'checkpoints'
  return folder.exists() and any(p.name.isdigit() for p in folder.iterdir())


def load_params(workdir):
  """Loads the parameters of a run, and nothing else, onto the host.

  Args:
    workdir: folder of the run.

  Returns:
    Nested dict of numpy arrays: the averaged weights where the run kept them,
    of the newest checkpoint.

  Raises:
    FileNotFoundError: if there is no complete checkpoint.
    ValueError: if it cannot be read.
  """
  checkpoints = Checkpoints(workdir, read_only=True)
  steps = checkpoints.steps()
  checkpoints.close()
  if not steps:
    raise FileNotFoundError(
      f"'{workdir}' has no complete checkpoint: train first, or longer"
    )
  path = checkpoints.directory / str(steps[-1]) / 'default'
  try:
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
      tree = handler.metadata(path).tree
      wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
      holder = wanted  # What has the parameters: the state, or the average.
      key = 'params'
      for part in wanted['opt_state']:
        if isinstance(part, dict) and 'ema' in part:
          holder, key = part, 'ema'
      holder[key] = jax.tree.map(lambda _: 0, holder[key])
      restored = handler.restore(
        path,
        args=ocp.args.PyTreeRestore(
          item=wanted,
          restore_args=jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
          ),
        ),
      )
  except Exception as e:
    raise ValueError(
      f"the checkpoint '{path}' cannot be read: {_short(e)}"
    ) from e
  averages = [
    part['ema']
    for part in restored['opt_state']
    if isinstance(part, dict) and 'ema' in part
  ]
  return averages[0] if averages else restored['params']
