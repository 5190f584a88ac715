"""Draws images and predictions for TensorBoard during training.

The task draws the images of a batch (vit_jax/tasks/base.py: draw_training,
draw_evaluation). This module draws attention maps of any Vision Transformer.
"""

from collections.abc import Callable
import copy
import functools
from typing import Any

from absl import logging
import jax
import numpy as np

from vit_jax import input_pipeline
from vit_jax.data import records
from vit_jax.data.images import false_colours
from vit_jax.distributed import sharding
from vit_jax.figures import grids, internals
from vit_jax.inference import engine
from vit_jax.learning import state as state_lib


class Pictures:
  """Draws the first images of training batches and of an evaluation split.

  All processes must call each method in the same order; the first process
  draws. Raises ValueError if `config.log_attention` is set and the model has
  no attention.
  """

  def __init__(
    self, task: Any, mesh: jax.sharding.Mesh, source: records.Source
  ) -> None:
    self._grid = _attention_grid(task) if task.config.log_attention else None
    self._task = task
    self._mesh = mesh
    self._source = source
    self._count = task.config.log_images
    # First images of the split, read on first use.
    self._batch: dict[str, Any] | None = None
    replicated = sharding.replicated(mesh)
    self._augmented = jax.jit(self._augment, out_shardings=replicated)
    self._outputs = jax.jit(self._compute, out_shardings=replicated)

  def training(self, batch: dict[str, Any], step: int) -> dict[str, np.ndarray]:
    """Draws the first rows of a training batch as the model sees them.

    Takes arrays [B, ...] before `augment`, and the number of updates made before.
    Returns uint8 [height, width, 3] by name; {} on all processes but the first,
    and if `config.log_images` is 0.
    """
    if not self._count:
      return {}
    with jax.set_mesh(self._mesh):
      rows = jax.device_get(self._augmented(batch, np.int32(step)))
    if jax.process_index():
      return {}
    return _attempt(lambda: self._task.draw_training(rows))

  def evaluation(self, params: Any, extra: Any) -> dict[str, np.ndarray]:
    """Draws the first images of the split with predictions, as `training`."""
    if not self._count:
      return {}
    if self._batch is None:
      self._batch = self._first_images()
    with jax.set_mesh(self._mesh):
      results = jax.device_get(self._outputs(params, extra, self._batch))
    if jax.process_index():
      return {}
    real = results[0]['mask'] > 0
    batch, outputs, weights = engine.take(results, real)

    def draw() -> dict[str, np.ndarray]:
      images = self._task.draw_evaluation(batch, outputs)
      if self._grid is None:
        return images
      visible = false_colours.of_inputs(batch['image'], self._task.config.pp)
      picture = draw_attention(self._task.model, visible, weights, self._grid)
      return {**images, 'attention': picture}

    return _attempt(draw)

  def _augment(self, batch: dict[str, Any], step: jax.Array) -> dict[str, Any]:
    rng = state_lib.step_key(self._task.config.seed, step)
    batch = state_lib.augment(self._task, batch, rng)
    return engine.take(batch, slice(self._count))

  def _compute(
    self, params: Any, extra: Any, batch: dict[str, Any]
  ) -> tuple[Any, Any, list[jax.Array]]:
    task = self._task
    weights: list[jax.Array] = []
    outputs = task.drawn_outputs(params, extra, batch)
    if self._grid is not None:
      weights, _ = internals.forward(task.model, params, batch['image'])
      # The maps show the mean over heads; all heads would take much memory.
      weights = [w.mean(axis=1, keepdims=True) for w in weights]
    return engine.take((batch, outputs, weights), slice(self._count))

  def _first_images(self) -> dict[str, Any]:
    """Returns a batch of at least `log_images` rows that the devices divide."""
    config = self._task.config
    shards = sharding.batch_shards(self._mesh)
    config = copy.deepcopy(config)
    config.update(batch_eval=-(-self._count // shards) * shards, prefetch=1)
    batches = input_pipeline.eval_batches(
      config, self._source, self._task.example, self._mesh
    )
    return next(batches)


def _attempt(draw: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Returns what `draw` returns; {} and a warning if it fails, which ends no run."""
  try:
    return draw()
  except Exception as e:  # pylint: disable=broad-except
    logging.warning('pictures cannot be drawn: %s: %s', type(e).__name__, e)
    return {}


def _attention_grid(task: Any) -> tuple[int, int]:
  """Returns the patches (down, across) of attention maps, if there are any."""
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  images = task.image_spec(1)
  try:
    grid = internals.patch_grid(task.model, params, images)
    forward = functools.partial(internals.forward, task.model)
    jax.eval_shape(forward, params, images)
  except ValueError as e:
    raise ValueError(
      f'log_attention=True is not possible: {e}; or set --config.log_attention=False'
    ) from e
  return grid


def draw_attention(
  model: Any, images: np.ndarray, weights: list[np.ndarray], grid: tuple[int, int]
) -> np.ndarray:
  """Draws images, the attention maps of the last layer, and attention rollout.

  Takes float32 [B, H, W, C] in [-1, 1] and L arrays float32 [B, K, N, N]. Two images
  per row are each followed by their two maps. The patch of the largest value is
  yellow; the caption gives its share.
  """
  attention = internals.make_attention(model, weights, None, grid)
  last_maps = internals.maps(attention)[-1]  # [B, h, w]
  rollout_maps = internals.rollout_maps(attention)  # [B, h, w]
  size = images.shape[1:3]
  columns = [
    grids.to_pixels(images),
    grids.heat(last_maps, size),
    grids.heat(rollout_maps, size),
  ]
  captions = []
  for last_map, rollout_map in zip(last_maps, rollout_maps):
    captions.append(grids.Caption(''))
    captions.append(grids.Caption(f'yellow: {100 * last_map.max():.1f} %'))
    captions.append(grids.Caption(f'yellow: {100 * rollout_map.max():.1f} %'))
  pixels = np.stack(columns, axis=1)  # [B, 3, H, W, 3]
  return grids.grid(
    pixels.reshape(-1, *pixels.shape[2:]),
    captions,
    columns=2 * len(columns),
    titles=2 * ('image', 'last layer', 'rollout'),
    most=grids.MOST,
  )
