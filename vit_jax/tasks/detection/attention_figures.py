"""Attention inside a detector, and where the boxes of each query lie.

The arrays behind figures 3, 6 and 7 of arXiv 2005.12872; figures.py draws them.

Shapes: B images, h x w cells of the feature map, Q queries, P points, n images
of a data set.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import records
from vit_jax.inference import engine
from vit_jax.tasks.detection import boxes as boxes_lib

SMALL, WIDE, TALL = range(3)
# Least area of a large box, as a share of the image. The paper gives none.
LARGE = 0.1
_BATCH = 32  # Maximum batch size for the boxes of a split.
_MAP = 'input_proj'  # The module whose output has the cells of the feature map.


class Attention(NamedTuple):
  """Predictions and attention of a detector, averaged over the heads."""

  boxes: np.ndarray  # [B, Q, 4], corners x0, y0, x1, y1, shares of the image.
  labels: np.ndarray  # Best class of each query but "no object", int32 [B, Q].
  scores: np.ndarray  # Probability of that class, float32 [B, Q].
  # Self-attention of the encoder, float32 [B, h, w, h, w]: how much the cell of
  # the first two indices attends to the cell of the last two.
  encoder: np.ndarray
  decoder: np.ndarray  # Cross-attention of the decoder, float32 [B, Q, h, w].
  # Share of the canvas that the image fills, down and across, float32 [B, 2].
  filled: np.ndarray


def compute(
  task: Any, params: Any, extra: Any, batch: dict[str, jax.Array]
) -> Attention:
  """Computes predictions, and the attention of the last layers, for images.

  The batch has `image`, float32 [B, H, W, 3] in [-1, 1], and `real`, bool
  [B, H, W], if there is padding. The weights of one image take much memory.
  """
  images = {k: batch[k] for k in ('image', 'real') if k in batch}
  jitted = jax.jit(functools.partial(compute_at_once, task))
  return engine.by_parts(lambda rows: jitted(params, extra, rows), images, 1)


def compute_at_once(
  task: Any, params: Any, extra: Any, batch: dict[str, jax.Array]
) -> Attention:
  """Like `compute`, for all images at once; `jax.jit` can trace it."""
  model = task.model
  outputs, sown = model.apply(
    {'params': params, **extra},
    batch['image'],
    batch.get('real'),
    train=False,
    mutable='intermediates',
    capture_intermediates=lambda module, _: module.name == _MAP,
  )
  sown = sown['intermediates']
  grid = sown[_MAP]['__call__'][0].shape[1:3]
  encoder = sown[f'encoder_layer_{model.num_encoder_layers - 1}']
  decoder = sown[f'decoder_layer_{model.num_decoder_layers - 1}']

  def mean_over_heads(attention: Any) -> jax.Array:
    [weights] = attention['attention_weights']  # [B, K, ..., S]
    return weights.astype(jnp.float32).mean(axis=1)

  of_cells = mean_over_heads(encoder['self_attention'])  # [B, S, S]
  of_queries = mean_over_heads(decoder['cross_attention'])  # [B, Q, S]
  return Attention(
    **task.detections({name: x[-1] for name, x in outputs.items()}),
    encoder=of_cells.reshape(-1, *grid, *grid),
    decoder=of_queries.reshape(*of_queries.shape[:2], *grid),
    filled=boxes_lib.filled(batch),
  )


def at_points(attention: Attention, points: np.ndarray) -> np.ndarray:
  """Returns the self-attention of the cells in which points lie.

  Points are float [B, P, 2], see `check_points`; the result [B, P, h, w].
  """
  points = check_points(points)
  grid = np.array(attention.encoder.shape[1:3])
  positions = points[..., ::-1] * attention.filled[:, None] * grid  # [B, P, 2]
  cells = np.minimum(positions.astype(int), grid - 1)
  rows = np.arange(len(points))[:, None]
  return attention.encoder[rows, cells[..., 0], cells[..., 1]]


def check_points(points: Any) -> np.ndarray:
  """Returns points as float64 [..., 2]: x and y as shares of width and height.

  ValueError if one lies outside of the image.
  """
  points = np.asarray(points, np.float64)
  is_outside = ~((points >= 0) & (points <= 1)).all(axis=-1)
  if is_outside.any():
    x, y = points[is_outside][0]
    raise ValueError(
      f'point {x:g},{y:g} lies outside of the image: pass x and y as shares of '
      'its width and height, from 0 to 1 (--points)'
    )
  return points


def best_queries(scores: np.ndarray, threshold: float, most: int) -> np.ndarray:
  """Returns the queries of an image that detect an object, most confident first.

  Args:
    scores: float [Q].
    threshold: minimum score.
    most: maximum number of queries.

  Returns:
    int64 [n]; one query if no score reaches the threshold.
  """
  order = np.argsort(-scores, kind='stable')
  count = max(1, int((scores >= threshold).sum()))
  return order[: min(count, most)]


def query_boxes(
  task: Any, mesh: jax.sharding.Mesh, source: records.Source, params: Any, extra: Any
) -> np.ndarray:
  """Predicts the boxes of all queries, also of those without an object.

  All processes must call it. Returns float32 [n, Q, 4] for all images of a
  split: centre x and y, width and height, as shares of the image.
  """

  def boxes(
    params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    return {'boxes': task.outputs(params, extra, batch)['boxes']}

  predict = engine.on_all_hosts(mesh, boxes)
  results = engine.collect(
    engine.limited(task.config, mesh, _BATCH),
    mesh,
    source.evaluated,
    task.example,
    functools.partial(predict, params, extra),
    label='Predicting boxes',
  )
  return results['boxes']


def kinds(boxes: np.ndarray) -> np.ndarray:
  """Sorts the boxes of `query_boxes` by form (figure 7), int64 [...].

  SMALL; WIDE, large and at least as wide as high; or TALL.
  """
  width, height = boxes[..., 2], boxes[..., 3]
  form = np.where(width >= height, WIDE, TALL)
  return np.where(width * height < LARGE, SMALL, form)
