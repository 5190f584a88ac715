"""The utils of the original: schedule, gradient accumulation, log file."""

from collections.abc import Callable
import logging as python_logging
from typing import Any

from absl import logging
from etils import epath
import jax

from vit_jax.distributed import files
from vit_jax.learning import optim, schedules

create_learning_rate_schedule = schedules.create_learning_rate_schedule


def accumulate_gradient(
  loss_and_grad_fn: Callable,
  params: Any,
  images: jax.Array,
  labels: jax.Array,
  accum_steps: int | None,
) -> Any:
  """Computes loss and gradient of a batch in micro-batches, to save memory.

  `loss_and_grad_fn` is (params, images, labels) -> (loss, gradient), both means over
  the images [B, ...], as are those returned. `accum_steps` is the number of
  micro-batches, which must divide B; None, 0 and 1 compute the batch at once.
  """
  steps = accum_steps or 1
  total = optim.accumulate(
    lambda batch, _: loss_and_grad_fn(params, *batch), (images, labels), steps
  )
  return jax.tree.map(lambda x: x / steps, total)


class GFileHandler(python_logging.StreamHandler):
  """Appends log records to a file, local or in a bucket; creates its folder."""

  def __init__(self, filename: str, mode: str = 'a'):
    path = epath.Path(files.expanded(filename))
    path.parent.mkdir(parents=True, exist_ok=True)
    super().__init__(path.open(mode))

  def close(self) -> None:
    """Closes the file."""
    self.stream.close()
    super().close()


def add_gfile_logger(
  workdir: str, *, basename: str = 'train', level: int = python_logging.INFO
) -> GFileHandler:
  """Also writes the log to <workdir>/<basename>.log from now on.

  To stop, remove the handler, which is returned, from the root logger.
  """
  handler = GFileHandler(f'{workdir}/{basename}.log')
  handler.setLevel(level)
  handler.setFormatter(logging.PythonFormatter())
  python_logging.getLogger('').addHandler(handler)
  return handler
