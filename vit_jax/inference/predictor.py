"""Runs a trained model on images: the class of predictors."""

import collections
from collections.abc import Callable
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
  # Those flags of `python -m vit_jax.predict` beyond --top and --out that
  # `report` reads.
  FLAGS = ()

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
    return self.run(images, keep=())[1]

  def inputs(self, images: Sequence[Any]) -> dict:
    """Returns the task's inputs for images, see `outputs`: arrays [n, ...]."""
    return _stacked(list(self._rows(images)), len(images))

  def run(
    self, images: Sequence[Any], compute=None, keep: Sequence[str] | None = None
  ) -> tuple[dict, Any]:
    """Computes arrays for images, see `outputs`.

    Args:
      images: see `outputs`.
      compute: compiled function (params, extra, inputs) -> arrays [B, ...]; by
        default the outputs of the task.
      keep: see `each`.

    Returns:
      The inputs and the results of `compute`, arrays [n, ...].
    """
    found = self.each(images, compute=compute, keep=keep)
    if not found:
      return self._none(compute or self._outputs)
    return jax.tree.map(lambda *rows: np.stack(rows), *found)

  def each(
    self,
    images: Sequence[Any],
    inputs: Callable[[dict], dict] | None = None,
    compute: Callable | None = None,
    keep: Sequence[str] | None = None,
  ) -> list[tuple[dict, Any]]:
    """Computes the inputs and the outputs of each image.

    Images whose inputs have the same shapes share batches, and the model is
    compiled for each shape.

    Args:
      images: see `outputs`.
      inputs: function from a record to inputs; by default that of the task.
      compute: see `run`.
      keep: names of the inputs to return, which take memory; None for all.

    Returns:
      For each image its inputs and its outputs, NumPy arrays.

    Raises:
      FileNotFoundError, ValueError: see `outputs`.
    """
    found = [None] * len(images)
    waiting, counts = {}, collections.Counter()

    def flush(shapes):
      numbers, rows = zip(*waiting.pop(shapes))
      # All batches have one size, so that the model is compiled once.
      size = 1 if counts[shapes] == 1 else self.batch_size(rows[0])
      for number, result in zip(
        numbers, self._compute(rows, size, compute or self._outputs, keep)
      ):
        self._check_finite(result[1], images[number], number)
        found[number] = result

    for number, row in enumerate(self._rows(images, inputs)):
      shapes = tuple(x.shape for x in row.values())
      counts[shapes] += 1
      waiting.setdefault(shapes, []).append((number, row))
      if len(waiting[shapes]) == self.batch_size(row):
        flush(shapes)
    for shapes in list(waiting):
      flush(shapes)
    return found

  def batch_size(self, row: dict) -> int:
    """Returns the number of images of a batch, for the inputs of one image."""
    del row
    return self.BATCH

  def _compute(self, rows, size, compute, keep) -> list[tuple[dict, Any]]:
    """Computes (inputs, outputs) of some images in a batch of a given size."""
    batch = _stacked(rows, size)
    outputs = compute(self.params, self.extra, batch)
    if keep is not None:
      batch = {name: batch[name] for name in keep}
    both = jax.tree.map(np.asarray, (batch, outputs))
    return [jax.tree.map(lambda x, i=i: x[i], both) for i in range(len(rows))]

  def _rows(self, images, inputs=None):
    """Yields the inputs of each image."""
    if isinstance(images, (str, bytes)):
      raise ValueError(
        f'images={images!r:.80} must be a list: give [image] for a single one'
      )
    inputs = inputs or self.task.inputs

    def prepared(encoded, number):
      record = {'image': encoded, 'index': np.int64(number)}
      return {k: np.asarray(v) for k, v in inputs(record).items()}

    for number, image in enumerate(images):
      yield preprocess.from_user(
        image,
        lambda encoded, number=number: prepared(encoded, number),
        self.config.max_image_pixels,
      )

  def _check_finite(self, outputs, image, number):
    """Raises ValueError if an output of an image is not finite."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(outputs)):
      name = image if isinstance(image, str) else f'image {number}'
      raise ValueError(
        f"the output of step {self.step} in '{self.workdir}' for '{name}' "
        'is not finite: the training diverged, or its checkpoint is '
        'damaged; choose another checkpoint (--step=N)'
      )

  def _none(self, compute):
    """Returns the inputs and outputs of an empty list of images."""
    spec = self.task.input_spec()
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
