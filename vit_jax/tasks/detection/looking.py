"""Looks inside a detector: attention, and where the boxes of each query lie.

The arrays behind figures 3, 6 and 7 of arXiv 2005.12872:

  seen = looking.look(task, params, extra, batch)
  looking.at_points(seen, points)  # Encoder self-attention, [B, P, h, w].
  seen.decoder  # Attention of each query over the image, [B, Q, h, w].
  boxes = looking.query_boxes(task, mesh, source, params, extra)  # [n, Q, 4]
  looking.kinds(boxes)  # SMALL, WIDE or TALL, [n, Q].

Shapes: B images, h x w cells of the feature map, Q queries, P points, n images
of a data set.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.inference import engine

SMALL, WIDE, TALL = range(3)
# Least area of a large box, as a share of the image. The paper gives none.
LARGE = 0.1
# Maximum memory of a layer's attention weights of a batch, in bytes.
_BYTES = 2**29
_BATCH = 32  # Maximum batch size for the boxes of a split.
# The module whose output has the cells of the feature map.
_MAP = 'input_proj'


class Seen(NamedTuple):
  """Predictions and attention of a detector; attention averaged over the heads.

  Attributes:
    boxes: float32 [B, Q, 4], corners x0, y0, x1, y1 as shares of the image.
    labels: most probable class of each query but "no object", int32 [B, Q].
    scores: probability of that class, float32 [B, Q].
    encoder: self-attention of the encoder, float32 [B, h, w, h, w]: how much
      the cell of the first two indices attends to that of the last two.
    decoder: cross-attention of the decoder, float32 [B, Q, h, w].
    filled: share of the canvas that the image fills, down and across, float32
      [B, 2]; 1 without padding.
  """

  boxes: np.ndarray
  labels: np.ndarray
  scores: np.ndarray
  encoder: np.ndarray
  decoder: np.ndarray
  filled: np.ndarray


def look(task, params, extra, batch, layer: int = -1) -> Seen:
  """Computes predictions and attention for images.

  Args:
    task: a vit_jax.tasks.detection.detect.Task.
    params: the parameters.
    extra: other state of the task, with the constants `frozen`.
    batch: `image`, float32 [B, H, W, 3] in [-1, 1], and, if there is padding,
      `real`, bool [B, H, W].
    layer: layer of the encoder and of the decoder, the last by default.

  Raises:
    ValueError: if encoder or decoder have no such layer.
  """
  model = task.model
  for what in ('num_encoder_layers', 'num_decoder_layers'):
    count = getattr(model, what)
    if not -count <= layer < count:
      raise ValueError(
        f'layer={layer} is no layer of a model with {what}={count}: choose one '
        f'from {-count} to {count - 1}'
      )
  images = {k: batch[k] for k in ('image', 'real') if k in batch}

  @jax.jit
  def compute(params, extra, images):
    return _look(task, params, extra, images, layer)

  one = {name: x[:1] for name, x in images.items()}
  cells = jax.eval_shape(compute, params, extra, one).encoder.size
  count = len(images['image'])
  size = min(count, max(1, _BYTES // (4 * cells * model.num_heads)))
  parts = []
  for start in range(0, count, size):
    # The last batch has the shape of the others, so that one is compiled.
    rows = np.arange(start, start + size).clip(max=count - 1)
    part = compute(params, extra, {k: x[rows] for k, x in images.items()})
    kept = min(size, count - start)
    parts.append(jax.tree.map(lambda x, n=kept: np.asarray(x)[:n], part))
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _look(task, params, extra, images, layer) -> Seen:
  """Does the work of `look`; `jax.jit` can trace it."""
  model = task.model
  outputs, seen = model.apply(
    {'params': params, 'frozen': extra.get('frozen', {})},
    images['image'],
    images.get('real'),
    train=False,
    mutable='intermediates',
    capture_intermediates=lambda module, _: module.name == _MAP,
  )
  seen = seen['intermediates']
  grid = seen[_MAP]['__call__'][0].shape[1:3]
  encoder = seen[f'encoder_layer_{layer % model.num_encoder_layers}']
  decoder = seen[f'decoder_layer_{layer % model.num_decoder_layers}']
  found = task.detections({name: x[-1] for name, x in outputs.items()})

  def means(attention):  # [B, K, ..., S] -> [B, ..., S]
    [weights] = attention['attention_weights']
    return weights.astype(jnp.float32).mean(axis=1)

  of_cells = means(encoder['self_attention'])  # [B, S, S]
  of_queries = means(decoder['cross_attention'])  # [B, Q, S]
  real = images.get('real', jnp.ones(images['image'].shape[:3], bool))
  sides = [real.any(axis=axis).mean(axis=-1) for axis in (2, 1)]
  return Seen(
    found['boxes'],
    found['labels'],
    found['scores'],
    of_cells.reshape(-1, *grid, *grid),
    of_queries.reshape(*of_queries.shape[:2], *grid),
    jnp.stack(sides, axis=-1),
  )


def at_points(seen: Seen, points: np.ndarray) -> np.ndarray:
  """Returns the self-attention of the cells in which points lie.

  Args:
    seen: result of `look`.
    points: float [B, P, 2], x and y as shares of the image's width and height.

  Returns:
    float32 [B, P, h, w].

  Raises:
    ValueError: if a point lies outside of the image.
  """
  points = check_points(points)
  grid = np.array(seen.encoder.shape[1:3])
  places = points[..., ::-1] * seen.filled[:, None] * grid  # [B, P, 2]
  cells = np.minimum(places.astype(int), grid - 1)
  rows = np.arange(len(points))[:, None]
  return seen.encoder[rows, cells[..., 0], cells[..., 1]]


def check_points(points) -> np.ndarray:
  """Returns points as float64 [..., 2]; raises ValueError if one is outside."""
  points = np.asarray(points, np.float64)
  wrong = ~((points >= 0) & (points <= 1)).all(axis=-1)
  if wrong.any():
    x, y = points[wrong][0]
    raise ValueError(
      f'point {x:g},{y:g} lies outside of the image: give x and y as shares of '
      'its width and height, from 0 to 1 (--points)'
    )
  return points


def best_queries(
  seen: Seen, index: int, threshold: float, most: int
) -> np.ndarray:
  """Returns the queries of an image that detect an object, the best first.

  Args:
    seen: result of `look`.
    index: number of the image.
    threshold: least score of an object.
    most: maximum number of queries.

  Returns:
    int64 [n]; if no score reaches the threshold, the best query alone.
  """
  scores = seen.scores[index]
  order = np.argsort(-scores, kind='stable')
  count = max(1, int((scores >= threshold).sum()))
  return order[: min(count, most)]


def query_boxes(
  task,
  mesh,
  source,
  params,
  extra,
  stop: Callable[[], bool] = engine.never,
) -> np.ndarray:
  """Predicts the box of each query for all images of a split.

  Args:
    task: a vit_jax.tasks.detection.detect.Task.
    mesh: the mesh; all of its processes must call it.
    source: the split.
    params: the parameters.
    extra: other state of the task.
    stop: called between batches; returns whether to stop.

  Returns:
    float32 [n, Q, 4], centre x and y, width and height, as shares of the image;
    boxes of all queries, also of those that see no object.

  Raises:
    engine.Stopped: if `stop` became true.
  """

  def compute(params, extra, batch):
    boxes = task.outputs(params, extra, batch)['boxes']
    return {'index': batch['index'], 'mask': batch['mask'], 'boxes': boxes}

  whole = sharding.replicated(mesh)
  compute = jax.jit(compute, out_shardings=whole)
  config = task.config.copy_and_resolve_references()
  shards = sharding.batch_shards(mesh)
  config.batch_eval = shards * max(1, min(config.batch_eval, _BATCH) // shards)
  found = engine.collect(
    config,
    mesh,
    source.evaluated,
    task.example,
    lambda batch: compute(params, extra, batch),
    stop,
    'Predicting boxes',
  )
  return found['boxes']


def kinds(boxes: np.ndarray, large: float = LARGE) -> np.ndarray:
  """Tells small, large wide and large tall boxes apart (figure 7).

  Args:
    boxes: float [..., 4], centre x and y, width and height, as shares of the
      image.
    large: least area of a large box, as a share of the image.

  Returns:
    int64 [...]: SMALL; WIDE, large and no higher than wide; or TALL.
  """
  width, height = boxes[..., 2], boxes[..., 3]
  form = np.where(width >= height, WIDE, TALL)
  return np.where(width * height < large, SMALL, form)
