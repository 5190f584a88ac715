"""Runs a trained model on images: the class of predictors."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import preprocess


class Predictor:
  """A trained model that takes images as paths, PIL images or arrays.

  Attributes:
    task: the objective, a vit_jax.tasks.base.Task.
    params: the parameters; averaged if the run kept an average.
    extra: see vit_jax.tasks.base.Task.init.
    step: step of the checkpoint.
    workdir: folder of the run, '' if unknown.
    config: the config of the run.
    metadata: see vit_jax.tasks.base.Task.make_metadata.
    class_names: names of the classes, in the order of the logits.
  """

  BATCH = 32  # Images per batch.

  def __init__(self, task, params, extra, step: int):
    self.task = task
    self.params = params
    self.extra = extra
    self.step = step
    self.workdir = ''
    self.config = task.config
    self.metadata = task.metadata
    self.class_names = task.class_names
    self._outputs = jax.jit(task.outputs)

  def outputs(self, images: Sequence[Any]):
    """Computes the model's outputs for images.

    Args:
      images: a list (or an array [n, height, width, channels]) of images of any
        size: paths, PIL images, or arrays uint8 [height, width(, channels)].

    Returns:
      The outputs of the task, float32 arrays [n, ...].

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be
        read, or if an output is not finite.
    """
    return self.run(images)[1]

  def inputs(self, images: Sequence[Any]) -> dict:
    """Returns the task's inputs for images, see `outputs`: arrays [n, ...]."""
    return _stacked(self._rows(images, 0), len(images))

  def run(self, images: Sequence[Any], compute=None) -> tuple[dict, Any]:
    """Computes arrays for images, see `outputs`.

    Args:
      images: see `outputs`.
      compute: compiled function (params, extra, inputs) -> arrays [B, ...]; by
        default the outputs of the task.

    Returns:
      The inputs and the results of `compute`, arrays [n, ...].
    """
    compute = compute or self._outputs
    found = []
    # All batches have one shape, so that the model is compiled once.
    size = 1 if len(images) == 1 else self.BATCH
    for start in range(0, len(images), size):
      rows = self._rows(images[start : start + size], start)
      batch = _stacked(rows, size)
      outputs = compute(self.params, self.extra, batch)
      count = len(rows)
      found.append(
        jax.tree.map(lambda x, n=count: np.asarray(x)[:n], (batch, outputs))
      )
      self._check_finite(found[-1][1], images[start : start + count], start)
    if not found:
      return self._none(compute)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

  def _rows(self, images, start):
    """Returns the inputs of each image; the first has the index `start`."""
    if isinstance(images, (str, bytes)):
      raise ValueError(
        f'images={images!r:.80} must be a list: give [image] for a single one'
      )
    return [
      preprocess.from_user(
        image,
        lambda encoded, i=start + i: self._inputs(encoded, i),
        self.config.max_image_pixels,
      )
      for i, image in enumerate(images)
    ]

  def _check_finite(self, outputs, images, start):
    """Raises ValueError if an output [n, ...] of an image is not finite."""
    for i, image in enumerate(images):
      if not all(np.isfinite(x[i]).all() for x in jax.tree.leaves(outputs)):
        name = image if isinstance(image, str) else f'image {start + i}'
        raise ValueError(
          f"the output of step {self.step} in '{self.workdir}' for '{name}' "
          'is not finite: the training diverged, or its checkpoint is '
          'damaged; choose another checkpoint (--step=N)'
        )

  def _inputs(self, encoded, index):
    record = {'image': encoded, 'index': np.int64(index)}
    return {k: np.asarray(v) for k, v in self.task.inputs(record).items()}

  def _none(self, compute):
    """Returns the inputs and outputs of an empty list of images."""
    spec = self.task.batch_spec(1)
    shapes = jax.eval_shape(compute, self.params, self.extra, spec)
    return jax.tree.map(
      lambda x: np.zeros((0, *x.shape[1:]), x.dtype), (spec, shapes)
    )

  def predict(self, images: Sequence[Any]) -> list:
    """Returns the predictions for each image; here the outputs themselves."""
    outputs = self.outputs(images)
    return [
      jax.tree.map(lambda x, i=i: x[i], outputs) for i in range(len(images))
    ]

  def draws(self, args) -> bool:
    """Returns whether `report` writes a picture; for `args` see there."""
    del args
    return self.task.DRAWS

  def report(self, images: Sequence[str], args) -> list[str]:
    """Returns the lines that `python -m vit_jax.predict` prints.

    Args:
      images: paths.
      args: the flags of that command, such as `top`, the number of classes to
        show, and `out`, the path of the picture to write, or None.
    """
    del args
    return [
      f'{image}\n  {result}'
      for image, result in zip(images, self.predict(images))
    ]


def _stacked(rows: list[dict], size: int) -> dict:
  """Stacks the inputs of images, and adds rows of zeros up to `size` rows."""
  return {key: _padded([row[key] for row in rows], size) for key in rows[0]}


def _padded(rows, size):
  """Stacks arrays, and adds rows of zeros up to `size` rows."""
  batch = np.zeros((size, *rows[0].shape), rows[0].dtype)
  batch[: len(rows)] = rows
  return batch
