"""A linear head on the patches of a Vision Transformer, for semantic segmentation.

As in the evaluations of DINOv2 (arXiv 2304.07193, section 7.4): the tokens of one layer,
or of several side by side, are normalised over the batch, and a linear map predicts the
classes of each patch. The logits are enlarged to the image, bilinearly.

Shapes: B images of H x W pixels, h x w patches, N tokens, D width of a token, C classes.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from vit_jax import models, models_vit
from vit_jax.layers import dtypes, patches as patches_lib
from vit_jax.tasks import base
from vit_jax.tasks.segmentation import encoders, losses

_STATISTICS = 'batch_stats'  # Flax's collection of the norm's means and variances.


class LinearSegmenter(models_vit.VisionTransformer):
  """A Vision Transformer with a head that predicts the classes of each patch.

  The model itself, as others call it, returns the tokens; `segment` applies the head.
  """

  num_pixel_classes: int = 1  # C.
  side_by_side: tuple[int, ...] = ()  # See vit_jax.layers.encoder.Encoder.

  def setup(self) -> None:
    """Creates the norm and the head in addition."""
    super().setup()
    self.head_norm = nn.BatchNorm(momentum=0.9, epsilon=1e-5, dtype=jnp.float32)
    types = dtypes.of(self)
    self.head = patches_lib.make_head(self.num_pixel_classes, 0.0, **types)

  def segment(self, images: jax.Array, *, train: bool) -> jax.Array:
    """Predicts the classes of each patch of images [B, H, W, 3].

    Returns logits, float32 [B, h, w, C]. `train` turns dropout on, and normalises by the
    batch, whose statistics go to the collection `batch_stats`.
    """
    grid = self.embed(images, flat=False)  # [B, h, w, D]
    tokens = self.encode(grid, train=train, side_by_side=self.side_by_side)
    b, h, w, _ = grid.shape
    patches = tokens[:, -h * w :]  # Without the class token.
    logits = self.head(self.head_norm(patches, use_running_average=not train))
    return logits.reshape(b, h, w, self.num_pixel_classes)


class Linear:
  """The head of a model of the kind 'vit', see heads.Head."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    num_classes: int,
    class_weights: jax.Array | None,
  ) -> None:
    layers = tuple(config.task_options.layers)
    _check_layers(layers, config.model.transformer)
    self.model = models.make_model(
      config.model,
      cls=LinearSegmenter,
      num_classes=None,
      classifier=_unpooled(config.model),
      representation_size=None,
      num_pixel_classes=num_classes,
      side_by_side=layers,
    )
    self._class_weights = class_weights
    self._dice_weight = config.task_options.dice_weight or 0.0

  def init(self, rng: jax.Array, images: jax.Array) -> tuple[Any, Any]:
    """Returns parameters, and the statistics of the norm as extra state."""
    variables = self.model.init(rng, images, train=False, method='segment')
    return variables['params'], {_STATISTICS: variables[_STATISTICS]}

  def new_params(
    self, weights: Mapping[str, Any], shapes: Mapping[str, Any]
  ) -> tuple[str, ...]:
    """Returns the prefixes of paths that do not come from weights."""
    return encoders.new_params(weights)

  def augment(self, batch: base.Batch) -> base.Batch:
    """Adds `pixel_factor`, the images per pixel of the global batch, by weight."""
    if not self._dice_weight:
      return batch
    weights = losses.pixel_weights(batch['segmentation'], self._class_weights)
    count = len(weights)
    factor = count / jnp.maximum(weights.sum(), 1e-6)
    return {**batch, 'pixel_factor': jnp.full(count, factor)}

  def loss(
    self,
    params: Any,
    extra: Any,
    batch: base.Batch,
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the cross-entropy summed over pixels, and the new statistics.

    With a Dice loss it is the sum over images of both losses, which are also metrics.
    """
    scores, updated = self.model.apply(
      {'params': params, **extra},
      batch['image'],
      train=True,
      rngs={'dropout': rng},
      mutable=[_STATISTICS],
      method='segment',
    )
    sums = losses.cross_entropy(scores, batch['segmentation'], self._class_weights)
    count = jnp.float32(len(batch['image']))
    statistics = updated[_STATISTICS]['head_norm']
    metrics = {name: (x * count, count) for name, x in statistics.items()}
    if not self._dice_weight:
      return sums, metrics
    dice = losses.dice(scores, batch['segmentation']).sum()
    metrics |= {'cross_entropy': sums, 'dice': (dice, count)}
    total = sums[0] * batch['pixel_factor'].mean() + self._dice_weight * dice
    return (total, count), metrics

  def update_extra(self, extra: Any, means: dict[str, jax.Array]) -> Any:
    """Returns the new statistics of the norm, the means over the mesh."""
    return {_STATISTICS: {'head_norm': {name: means[name] for name in ('mean', 'var')}}}

  def outputs(self, params: Any, extra: Any, images: jax.Array) -> jax.Array:
    """Returns logits of the classes, float32 [B, h, w, C]."""
    variables = {'params': params, **extra}
    return self.model.apply(variables, images, train=False, method='segment')

  def scores(self, outputs: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Returns `outputs`, float32 [B, h, w, C]."""
    return outputs

  def logits(self, scores: jax.Array) -> jax.Array:
    """Returns `scores`, which are logits."""
    return scores


def _unpooled(model: ml_collections.ConfigDict) -> str:
  """Returns the classifier without pooling that keeps the class token of a model."""
  if model.get('distilled'):
    return 'token'
  return 'token_unpooled' if model.classifier.startswith('token') else 'unpooled'


def _check_layers(layers: tuple[int, ...], transformer: Any) -> None:
  """Raises ValueError if a model lacks one of some layers, or is no Transformer."""
  count = transformer.num_layers
  if layers and max(layers) > count:
    raise ValueError(
      f'layers={layers}: the model has the layers 1 to {count} '
      '(config.task_options.layers)'
    )
