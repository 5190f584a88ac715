"""Panoptic and instance segmentation with EoMT (arXiv 2503.19108).

The model of kind 'eomt' in the task `segment`. The targets of an image are its things, one
each, and its stuff, one per class, with their masks; there are no boxes.

Shapes: B images of H x W pixels, Q queries, N objects of an image (padded), C classes, h x w
cells of a mask.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.configs import models as model_configs
from vit_jax.data.augmentation import canvases
from vit_jax.inference import predictor as predictor_lib
from vit_jax.layers import position_kinds
from vit_jax.tasks import base
from vit_jax.tasks.detection import (
  boxes as boxes_lib,
  mask_average_precision as mask_ap,
  matching,
  segment,
  segments as segments_lib,
)
from vit_jax.tasks.segmentation import (
  encoders,
  eomt,
  postprocess,
  predicting_masks,
  set_losses,
)

_MOST = 100  # Candidates of an image in the average precision, as in COCO's rules.
_BLACK = -1.0  # The padding of canvases, as in the released code.


def targets(
  labels: jax.Array,
  segments: jax.Array,
  counts: jax.Array,
  stuff: Collection[int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the targets of images: objects with a visible pixel.

  Objects of the same class of stuff become one.

  Args:
    labels: classes of objects, int [B, N].
    segments: number of the object of each pixel, int [B, H, W], from 1, 0 for none.
    counts: number of objects, int [B], the first ones.
    stuff: classes of stuff.

  Returns:
    `labels`, `segments` and `counts` of the targets, int32, in the order of the objects.
  """
  numbers = jnp.arange(labels.shape[1])

  def with_zero(table: jax.Array) -> jax.Array:
    # Pixels of no object have the number 0.
    return jnp.concatenate([jnp.zeros(1, jnp.int32), table])

  def of_image(
    labels: jax.Array, segments: jax.Array, count: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    is_stuff = jnp.isin(labels, jnp.array(sorted(stuff), jnp.int32)) & (numbers < count)
    is_same = is_stuff & is_stuff[:, None] & (labels == labels[:, None])
    # Each object gets the number of the first one of the same stuff.
    first = jnp.where(is_stuff, is_same.argmax(axis=1), numbers)
    merged = with_zero(first + 1)[segments]  # [H, W]
    pixels = jnp.bincount(merged.ravel(), length=len(numbers) + 1)[1:]
    is_visible = pixels > 0
    target_numbers = jnp.where(is_visible, jnp.cumsum(is_visible), 0)
    order = jnp.argsort(~is_visible, stable=True)
    segments = with_zero(target_numbers)[merged].astype(jnp.int32)
    return labels[order], segments, is_visible.sum()

  return jax.vmap(of_image)(labels, segments, counts)


class Task(segment.Task):
  """Learns classes and masks of things and stuff."""

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    if config.pp.sides:
      _check_canvases(config, self.options.tight)
    is_stuff = ~np.array(self.is_thing, bool)
    self._stuff = frozenset(np.flatnonzero(is_stuff).tolist())
    self._loss_options = eomt.loss_options(self.options)

  # --- Training ---

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Sequence[str] | None,
  ) -> tuple[str, ...]:
    """Returns what weights lack, or have for other classes or numbers of queries."""
    prefixes = eomt.new_params(weights, shapes)
    if class_names is not None and tuple(class_names) != self.class_names:
      return tuple(dict.fromkeys((*prefixes, 'class_head/')))
    return prefixes

  def check_weights(self, weights: Mapping[str, Any], params: Any) -> None:
    encoders.check_frozen(self.config, weights, params)

  def augment(self, batch: base.Batch, rng: jax.Array) -> base.Batch:
    """Adds the targets of images, and factors of the global batch."""
    batch = self._with_targets(batch)
    factors = matching.loss_factors(
      batch['counts'], self.model.num_queries, self.options.no_object_weight
    )
    return {**batch, **factors}

  def _with_targets(self, batch: base.Batch) -> base.Batch:
    labels, segments, counts = targets(
      batch['class'], batch['segments'], batch['count'], self._stuff
    )
    return {**batch, 'labels': labels, 'segments': segments, 'counts': counts}

  def loss(  # type: ignore[override]
    self,
    params: Any,
    extra: Any,
    batch: base.Batch,
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the weighted sum of the losses of all layers, see eomt.loss."""
    batch = {**batch, 'image': _with_black_padding(batch)}
    progress = step, self.config.total_steps
    return eomt.loss(self.model, params, batch, rng, progress, self._loss_options)

  # --- Evaluation and prediction ---

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> dict[str, jax.Array]:
    """Computes `logits` [B, Q, C + 1] and `masks`, logits [B, Q, h, w]."""
    images = _with_black_padding(batch)
    outputs = self.model.apply({'params': params}, images, train=False)
    return {name: x[-1] for name, x in outputs.items()}

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `probabilities` [B, Q, C], without "no object", and logits `masks`."""
    outputs = self.outputs(params, extra, batch)
    probabilities = jax.nn.softmax(outputs['logits'])[..., :-1]
    return {'probabilities': probabilities, 'masks': outputs['masks']}

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the sum of the losses of images, and the number of images.

    The points at which masks are compared depend only on the number of the image.
    """
    batch = self._with_targets(batch)
    outputs = jax.tree.map(lambda x: x[None], self.outputs(params, extra, batch))
    key = jax.random.key(self.config.seed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch['index'])
    sums = set_losses.losses(
      outputs,
      batch['labels'],
      batch['segments'],
      batch['counts'],
      keys,
      self._loss_options,
    )
    factors = self.image_loss_factors(batch['counts'])
    losses = eomt.weighted(sums, factors, self._loss_options)
    image_losses = sum(x[-1] for x in losses.values())  # [B]
    return {'loss': ((image_losses * batch['mask']).sum(), batch['mask'].sum())}

  def masks(self, outputs: Any, batch: base.Batch) -> dict[str, jax.Array]:
    """Returns `logits` [B, Q, C + 1], `masks` and `extent`."""
    return {**outputs, 'extent': boxes_lib.filled(batch)}

  def assemble(
    self,
    masks: Mapping[str, np.ndarray],
    row: int,
    size: tuple[int, int],
    threshold: float = postprocess.THRESHOLD,
  ) -> segments_lib.Segments:
    """Returns the segments of an image, the best first; see postprocess.panoptic."""
    logits = masks['logits'][row]
    # Only masks that count are enlarged.
    queries = postprocess.confident(logits, threshold)
    large = _enlarged(masks, row, queries, size)
    segments = postprocess.panoptic(logits[queries], large, self._stuff, threshold)
    order = np.argsort(-segments.scores, kind='stable')
    number_of = np.zeros(len(order) + 1, np.int32)
    number_of[order + 1] = 1 + np.arange(len(order))
    return segments_lib.Segments(
      number_of[segments.numbers], segments.labels[order], segments.scores[order]
    )

  def instances(
    self,
    masks: Mapping[str, np.ndarray],
    row: int,
    size: tuple[int, int],
    threshold: float = postprocess.THRESHOLD,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the things of an image, the best first; see postprocess.instances."""
    logits = masks['logits'][row]
    probabilities = postprocess.softmax(logits)[:, :-1]
    is_thing = np.array(self.is_thing)[probabilities.argmax(axis=-1)]
    # A score is at most the probability of the class.
    queries = np.flatnonzero(is_thing & (probabilities.max(axis=-1) >= threshold))
    large = _enlarged(masks, row, queries, size)
    regions, labels, scores = postprocess.instances(logits[queries], large, threshold)
    order = np.argsort(-scores, kind='stable')
    return regions[order], labels[order], scores[order]

  def candidates(
    self, masks: Mapping[str, np.ndarray], row: int, size: tuple[int, int]
  ) -> Iterator[tuple[np.ndarray, int, float]]:
    """Yields mask bool [H, W], class and score of things, for the average precision.

    As in the released code, from the most probable pairs of a query and a class, so that a
    mask may come with several classes.
    """
    queries, labels, probabilities = postprocess.best_pairs(masks['logits'][row], _MOST)
    is_thing = np.array(self.is_thing)[labels]
    for query in np.unique(queries[is_thing]):
      [mask] = _enlarged(masks, row, np.array([query]), size)
      quality = postprocess.quality(mask)
      for k in np.flatnonzero(is_thing & (queries == query)):
        yield mask > 0, int(labels[k]), float(probabilities[k]) * quality

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    evaluators = super().evaluators(config)
    return [*evaluators, mask_ap.PanopticQualityAndPrecision]

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return predicting_masks.Segmenter(self, params, extra, step)


def _with_black_padding(batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the images of a batch [B, H, W, C], black where there is padding."""
  images = batch['image']
  real = batch.get('real')
  return images if real is None else jnp.where(real[..., None], images, _BLACK)


def _enlarged(
  masks: Mapping[str, np.ndarray], row: int, queries: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
  """Returns the masks of queries of an image at its size, float32 [n, H, W]."""
  small = masks['masks'][row][queries]
  large = segments_lib.enlarged(small, size, masks['extent'][row])
  return np.array([*large], np.float32).reshape(-1, *size)


def _check_canvases(config: ml_collections.ConfigDict, tight: int) -> None:
  """Raises ValueError if a model cannot read images on canvases of several sizes."""
  multiple = config.pp.canvas_multiple
  patch = config.model.patches.size
  if any(multiple % side for side in patch):
    raise ValueError(
      f'canvas_multiple={multiple} must be a multiple of the patches of {tuple(patch)} '
      'pixels (--config.pp.canvas_multiple)'
    )
  layers = model_configs.layers_of(config.model)
  kind = position_kinds.kind_of(layers)
  is_resizable = position_kinds.needs_grid(kind, layers.get('position_grid'))
  groups = [*canvases.groups(config.pp), canvases.evaluation(config.pp)]
  has_one_canvas = not tight and len({group.canvas for group in groups}) == 1
  if kind != 'none' and not is_resizable and not has_one_canvas:
    raise ValueError(
      f"position_embedding='{kind}' without a grid is for images of one size, and "
      f'pp.sides={config.pp.sides} makes several: set '
      '--config.model.transformer.position_grid to the grid of the weights, or leave out '
      '--config.pp.sides'
    )
