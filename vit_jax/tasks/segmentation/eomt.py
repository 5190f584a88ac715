"""EoMT's training, and its semantic segmentation (arXiv 2503.19108, sections 3 and 4.1).

In training, masked attention is switched off layer by layer (`mask_rates`), so that
prediction needs none. For semantic segmentation, the targets of an image are the classes
that occur in it, each with the mask of all its pixels.

Shapes: B images of H x W pixels, Q queries, N targets of an image (padded), C classes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from vit_jax import models
from vit_jax.tasks import base
from vit_jax.tasks.detection import matching
from vit_jax.tasks.segmentation import encoders, postprocess, set_losses

_POWER = 0.9  # Exponent of the schedule of masked attention, as in the released code.


def mask_rates(step: jax.Array | int, total_steps: int, num_layers: int) -> jax.Array:
  """Returns the probabilities of masked attention by layer, float32 [num_layers].

  They decrease from 1 to 0, one layer after the other, each in the same number of steps
  after the layer before; the first and the last such period have no change.
  """
  periods = step / total_steps * (num_layers + 2)
  progress = jnp.clip(periods - 1 - jnp.arange(num_layers), 0.0, 1.0)
  return (1 - progress) ** _POWER


def targets(
  segmentation: jax.Array, num_classes: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the targets of images: the classes that occur in them.

  Args:
    segmentation: classes of pixels, int32 [B, H, W], negative for none.
    num_classes: C.
    most: largest number of targets of an image, N; of more classes those with most
      pixels are taken.

  Returns:
    Classes, int32 [B, N], the most frequent one first; the number of the target of each
    pixel, from 1, or 0 for none, int32 [B, H, W]; and the number of targets, int32 [B].
  """

  def of_image(classes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    numbers = jnp.where(classes < 0, num_classes, classes)
    pixels = jnp.bincount(numbers.ravel(), length=num_classes + 1)[:-1]
    labels = jnp.argsort(-pixels)[:most]
    number_of = jnp.zeros(num_classes + 1, jnp.int32)
    number_of = number_of.at[labels].set(1 + jnp.arange(len(labels)))
    number_of = number_of.at[num_classes].set(0)
    return labels, number_of[numbers], (pixels[labels] > 0).sum()

  return jax.vmap(of_image)(segmentation)


def loss_options(options: ml_collections.ConfigDict) -> set_losses.Options:
  """Returns the loss options of `config.task_options`; None there: as published."""
  values = {}
  for name in set_losses.Options._fields:
    if options[name] is not None:
      values[name] = options[name]
  return set_losses.Options(**values)


def new_params(
  weights: Mapping[str, Any], shapes: Mapping[str, Any]
) -> tuple[str, ...]:
  """Returns what weights lack or have for other classes or numbers of queries."""
  prefixes = [*encoders.new_params(weights)]
  for prefix in encoders.QUERIES_AND_MASKS:
    paths = [path for path in shapes if path.startswith(prefix)]
    if any(
      path not in weights or weights[path].shape != shapes[path].shape for path in paths
    ):
      prefixes.append(prefix)
  return tuple(prefixes)


def weighted(
  sums: Mapping[str, jax.Array],
  factors: Mapping[str, jax.Array],
  options: set_losses.Options,
) -> dict[str, jax.Array]:
  """Returns the results of set_losses.losses with their weights, float32 [L, B].

  `factors` are those of the images, see matching.loss_factors.
  """
  return {
    'class': options.class_weight * sums['class'] * factors['class_factor'],
    'mask': options.mask_weight * sums['mask'] * factors['target_factor'],
    'dice': options.dice_weight * sums['dice'] * factors['target_factor'],
  }


def loss(
  model: Any,
  params: Any,
  batch: Mapping[str, jax.Array],
  rng: jax.Array,
  progress: tuple[jax.Array | int, int],
  options: set_losses.Options,
) -> tuple[base.WeightedSum, base.WeightedSums]:
  """Computes the loss of a training batch.

  Args:
    model: a vit_jax.models_eomt.Eomt.
    params: its parameters.
    batch: `image`, and `labels`, `segments` and `counts` as set_losses.losses takes them,
      with the results of matching.loss_factors.
    rng: random key.
    progress: numbers of updates before this one, and in all.
    options: of the losses.

  Returns:
    The sum over layers of the set loss, and the number of images. The metrics are the
    losses of the last layer, with their weights, and `mask_rate`, the mean probability of
    masked attention.
  """
  points_key, dropout_key = jax.random.split(rng)
  rates = mask_rates(*progress, model.num_query_layers)
  outputs = model.apply(
    {'params': params},
    batch['image'],
    train=True,
    mask_rates=rates,
    rngs={'dropout': dropout_key},
  )
  sums = set_losses.losses(
    outputs, batch['labels'], batch['segments'], batch['counts'], points_key, options
  )
  losses = weighted(sums, batch, options)
  count = jnp.float32(len(batch['image']))
  metrics = {name: (x[-1].sum(), count) for name, x in losses.items()}
  metrics['mask_rate'] = rates.mean() * count, count
  total = sum(x.sum() for x in losses.values())
  return (total, count), metrics


class Eomt:
  """The head of a model of the kind 'eomt', see heads.Head."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    num_classes: int,
    class_weights: jax.Array | None,
  ) -> None:
    if class_weights is not None:
      raise ValueError(
        "class_weights weight pixels, but a model of kind='eomt' learns masks, all of "
        'which count the same: leave them out (--config.class_weights)'
      )
    self.model = models.make_model(config.model, num_classes=num_classes)
    self._total_steps = config.total_steps
    options = config.task_options
    self._options = loss_options(options)
    self._num_classes = num_classes
    self._num_targets = min(num_classes, options.max_classes)
    if self._num_targets > self.model.num_queries:
      raise ValueError(
        f'max_classes={options.max_classes} classes of an image cannot each have one of '
        f'{self.model.num_queries} queries: lower --config.task_options.max_classes, or '
        'raise --config.model.num_queries'
      )

  def init(self, rng: jax.Array, images: jax.Array) -> tuple[Any, Any]:
    """Returns parameters, and an empty extra state."""
    return self.model.init(rng, images, train=False)['params'], {}

  def new_params(
    self, weights: Mapping[str, Any], shapes: Mapping[str, Any]
  ) -> tuple[str, ...]:
    """Returns the prefixes of paths that do not come from weights."""
    return new_params(weights, shapes)

  def augment(self, batch: base.Batch) -> base.Batch:
    """Adds the targets of images, and factors of the global batch."""
    labels, segments, counts = targets(
      batch['segmentation'], self._num_classes, self._num_targets
    )
    factors = matching.loss_factors(
      counts, self.model.num_queries, self._options.no_object_weight
    )
    return {
      **batch,
      **factors,
      'labels': labels,
      'segments': segments,
      'counts': counts,
    }

  def loss(
    self,
    params: Any,
    extra: Any,
    batch: base.Batch,
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the weighted sum of the losses of all layers, see `loss`."""
    progress = step, self._total_steps
    return loss(self.model, params, batch, rng, progress, self._options)

  def update_extra(self, extra: Any, means: dict[str, jax.Array]) -> Any:
    """Returns the extra state, which does not change."""
    return extra

  def outputs(self, params: Any, extra: Any, images: jax.Array) -> dict[str, jax.Array]:
    """Returns `logits` [B, Q, C + 1] and `masks` [B, Q, h, w] of the last layer."""
    outputs = self.model.apply({'params': params}, images, train=False)
    return {name: x[-1] for name, x in outputs.items()}

  def scores(self, outputs: dict[str, jax.Array], size: tuple[int, int]) -> jax.Array:
    """Returns the scores of the classes of each pixel, see postprocess.

    As in the released code, the logits of the masks are resized before they become
    probabilities.
    """
    masks = outputs['masks']
    shape = (*masks.shape[:2], *size)
    masks = jax.image.resize(masks, shape, 'bilinear', antialias=False)
    return postprocess.class_scores(outputs['logits'], masks)

  def logits(self, scores: jax.Array) -> jax.Array:
    """Returns logits whose softmax is the fraction of each class in the scores."""
    return jnp.log(scores + 1e-6)
