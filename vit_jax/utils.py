"""The utils of the original: schedule, gradient accumulation, log file."""

from collections.abc import Callable
import logging as python_logging

from absl import logging
from etils import epath
import jax

from vit_jax.learning import optim

create_learning_rate_schedule = optim.create_learning_rate_schedule


def accumulate_gradient(
  loss_and_grad_fn: Callable, params, images, labels, accum_steps: int | None
):
  """Computes loss and gradient of a batch in micro-batches, to save memory.

  Args:
    loss_and_grad_fn: (params, images, labels) -> (loss, gradient), both means
      over the images.
    params: the parameters.
    images: [B, ...].
    labels: [B, ...].
    accum_steps: number of micro-batches; None, 0 and 1 compute the batch at
      once.

  Returns:
    (loss, gradient), the means over the batch.

  Raises:
    ValueError: if `accum_steps` does not divide the batch.
  """
  steps = accum_steps or 1
  total = optim.accumulate(
    lambda batch, _: loss_and_grad_fn(params, *batch), (images, labels), steps
  )
  return jax.tree.map(lambda x: x / steps, total)


class GFileHandler(python_logging.StreamHandler):
  """Appends log records to a file, local or in a bucket.

  Args:
    filename: path of the file; its folder is created.
    mode: 'a' to append to the file, 'w' to overwrite it.
  """

  def __init__(self, filename: str, mode: str = 'a'):
    path = epath.Path(filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    super().__init__(path.open(mode))

  def close(self):
    """Closes the file."""
    self.stream.close()
    super().close()


def add_gfile_logger(
  workdir: str, *, basename: str = 'train', level: int = python_logging.INFO
) -> GFileHandler:
  """Also writes the log to <workdir>/<basename>.log from now on.

  Returns:
    The handler; remove it from the root logger to stop.
  """
  handler = GFileHandler(f'{workdir}/{basename}.log')
  handler.setLevel(level)
  handler.setFormatter(logging.PythonFormatter())
  python_logging.getLogger('').addHandler(handler)
  return handler
