r"""Semantic segmentation: the class of each pixel.

  vit_jax train --config=configs/vit.py:b16,/path/to/folder \
    --config.pretrained=ViT-B_16.npz --config.task=segment_semantic \
    --config.best_metric=miou_test --workdir=/tmp/segmentation

The data have images and masks, see vit_jax/data/masks.py. The kind of the model decides on
the head: HEADS. Measures are of the masks at their height and width.

Shapes: B images of H x W pixels, scores on a grid of h x w cells, C classes.
"""

from collections.abc import Mapping, Sequence
import functools
import importlib
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models, preprocess
from vit_jax.configs import task_options
from vit_jax.data import masks, records
from vit_jax.data.augmentation import canvases, geometry
from vit_jax.data.images import false_colours, images as images_lib, orientation
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.figures import grids, overlays
from vit_jax.inference import predictor as predictor_lib
from vit_jax.learning import losses as losses_lib
from vit_jax.tasks import base
from vit_jax.tasks.segmentation import (
  class_maps,
  losses,
  predicting,
  scores as scores_lib,
)

_ERROR = np.array([255, 0, 0])  # Colour of pixels of a wrong class.


class Head(Protocol):
  """What the kind of a model brings: its parameters, its loss and its scores.

  The constructor gets the config, the number of classes, and weights of the classes,
  float32 [C], or None.

  Attributes:
    model: the Flax module.
  """

  model: Any

  def init(self, rng: jax.Array, images: jax.Array) -> tuple[Any, Any]:
    """Returns parameters and extra state, see Task.init; images are zeros [1, H, W, 3]."""

  def new_params(
    self, weights: Mapping[str, Any], shapes: Mapping[str, Any]
  ) -> tuple[str, ...]:
    """Returns what does not come from `config.pretrained`, see Task.new_params."""

  def augment(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds to a global batch what the loss needs, see Task.augment."""

  def loss(
    self,
    params: Any,
    extra: Any,
    batch: dict[str, jax.Array],
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, dict[str, base.WeightedSum]]:
    """Returns the loss of a training batch, see Task.loss.

    `batch` has `image`, float32 [B, H, W, 3], `segmentation`, int32 [B, H, W]: classes of
    the pixels, negative for pixels that do not count; and what `augment` adds.
    """

  def update_extra(self, extra: Any, means: dict[str, jax.Array]) -> Any:
    """Returns the extra state after an update, see Task.update_extra."""

  def scores(self, params: Any, extra: Any, images: jax.Array) -> jax.Array:
    """Returns scores of the classes, float32 [B, h, w, C], on any grid over the images.

    The class of a pixel is that of the greatest score after bilinear resizing.
    """

  def logits(self, scores: jax.Array) -> jax.Array:
    """Returns logits of the classes, whose cross-entropy is the loss of evaluation."""


# Kind of the model (config.model.kind) -> 'module:class' of its head.
HEADS = {
  'eomt': 'vit_jax.tasks.segmentation.eomt:Eomt',
  'vit': 'vit_jax.tasks.segmentation.linear:Linear',
}


def _make_head(
  config: ml_collections.ConfigDict, num_classes: int, class_weights: jax.Array | None
) -> Any:
  kind = models.kind_of(config.model)
  if kind not in HEADS:
    raise ValueError(
      f"task='{config.task}' has no head for a model of kind='{kind}': use one of "
      f'{sorted(HEADS)} (config.model)'
    )
  module, name = HEADS[kind].split(':')
  cls = getattr(importlib.import_module(module), name)
  return cls(config, num_classes, class_weights)


class Task(base.Task):
  """Learns the class of each pixel."""

  FEATURES: ClassVar[tuple[str, ...]] = ('image', masks.FEATURE)
  METRICS: ClassVar = {'loss': scores_lib.METRICS['loss']}
  METADATA: ClassVar[tuple[str, ...]] = ('class_names', 'mask_classes')
  Options = task_options.SegmentSemantic
  MULTICHANNEL = True
  CLASS_WEIGHTS = True
  OWN_PARAMS = ('head',)
  REPORT = scores_lib.Iou
  DRAWS = True
  FLAGS = predicting.FLAGS

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    self._mask_classes = masks.from_json(metadata['mask_classes'])
    self.classes = masks.learned(self._mask_classes)
    self._reader = masks.reader(config, self._mask_classes)
    self.ids = self._reader.ids  # Numbers of the classes in masks.
    _check_keys(config)
    weights = None
    if config.class_weights is not None:
      weights = losses_lib.named_weights(
        config.class_weights.to_dict(), self.class_names
      )
    self.head = _make_head(config, len(self.classes), weights)
    self.model = self.head.model

  # --- Data ---

  @classmethod
  def class_names_of(cls, source: records.Source) -> tuple[str, ...]:
    return source.names.get(masks.FEATURE, ())

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    return _metadata(masks.classes_of(source))

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    return _metadata(masks.numbered([str(i) for i in range(num_classes or 150)]))

  def example(
    self,
    record: dict[str, 'tf.Tensor'],
    seed: 'tf.Tensor | None',
    canvas: tuple[int, int] | None = None,
  ) -> dict[str, 'tf.Tensor']:
    """Returns an image and the classes of its pixels.

    Returns:
      `image`, and `segmentation`, int32 [H, W], IGNORED for pixels that do not count. On a
      `canvas`, in evaluation, also `size`, int32 [2], height and width of the stored image,
      and `truth`, int32 [*canvas], its classes, padded.
    """
    if seed is not None:
      image, transform = preprocess.decode_with_geometry(
        record['image'], seed, self.config.pp
      )
    else:
      image = preprocess.prepare(record['image'], None, self.config.pp, upright=False)
      transform = geometry.whole(_shape(record, upright=False), self.image_size)
    classes = self._reader.read(record[masks.FEATURE], transform.shape)
    # Rotation brings in zeros.
    segmentation = geometry.to_masks(classes[None] + 1, transform)[0] - 1
    example = {
      'image': image,
      'segmentation': tf.ensure_shape(segmentation, self.image_size),
    }
    if canvas is None:
      return example
    truth = canvases.pad(classes + 1, canvas) - 1
    return {
      **example,
      'size': transform.shape,
      'truth': tf.ensure_shape(truth, canvas),
    }

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    segmentation = jax.ShapeDtypeStruct((size, *self.image_size), jnp.int32)
    return {'image': self.image_spec(size), 'segmentation': segmentation}

  def parts(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns the images of each canvas, see `tight` of the options.

    Raises ValueError if the masks have other classes, numbers or colours than those that
    the model has learned.
    """
    if masks.classes_of(source) != self._mask_classes:
      raise ValueError(
        f"the masks have other classes, numbers or colours ('{masks.CLASSES}') than those "
        'of the training data: evaluate on masks of the same classes'
      )
    return self._by_canvas(source, self.example)

  def parts_to_predict(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns parts of images without masks, whose examples are `inputs`.

    They also have `size`, and `canvas`, bool [*canvas], whose shape is the canvas.
    """

    def example(
      record: dict[str, 'tf.Tensor'], seed: 'tf.Tensor | None', canvas: tuple[int, int]
    ) -> dict[str, 'tf.Tensor']:
      size = _shape(record, upright=True)
      return {**self.inputs(record), 'size': size, 'canvas': tf.zeros(canvas, tf.bool)}

    return self._by_canvas(source, example)

  def _by_canvas(
    self, source: records.Source, example: Any
  ) -> list[input_pipeline.Part]:
    """Groups images by canvases, the largest first; `example` takes a `canvas`."""
    shapes = input_pipeline.image_shapes(source)
    sizes = canvases.round_up(shapes, self.options.tight)
    sizes, size_of_image = np.unique(sizes, axis=0, return_inverse=True)
    size_of_image = size_of_image.reshape(-1)
    parts = []
    for i in reversed(range(len(sizes))):
      canvas = tuple(sizes[i].tolist())
      on_canvas = no_autograph(functools.partial(example, canvas=canvas))
      numbers = np.flatnonzero(size_of_image == i)
      parts.append(input_pipeline.Part(numbers, on_canvas, canvas))
    return parts

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    return self.head.init(rng, jnp.zeros(self.image_spec(1).shape))

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Any,
  ) -> tuple[str, ...]:
    return self.head.new_params(weights, shapes)

  def augment(
    self, batch: dict[str, jax.Array], rng: jax.Array
  ) -> dict[str, jax.Array]:
    return self.head.augment(batch)

  def loss(  # type: ignore[override]
    self,
    params: Any,
    extra: Any,
    batch: dict[str, jax.Array],
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, dict[str, base.WeightedSum]]:
    return self.head.loss(params, extra, batch, rng, step)

  def update_extra(self, extra: Any, params: Any, metrics: dict[str, Any]) -> Any:
    return self.head.update_extra(extra, metrics)

  # --- Evaluation and prediction ---

  def outputs(self, params: Any, extra: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns scores of the classes, float32 [B, h, w, C], see Head.scores."""
    return self.head.scores(params, extra, batch['image'])

  def class_maps(
    self, scores: jax.Array, size: jax.Array, canvas: tuple[int, int]
  ) -> jax.Array:
    """Returns the class of each pixel of images on a canvas, see class_maps.py.

    As in training, scores are first resized to the model's input.
    """
    scores = losses.resized(scores, self.image_size)
    return class_maps.class_maps(scores, size, canvas)

  def pixel_losses(self, scores: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns sum and weight of the cross-entropy of each image, float32 [B, 2]."""
    sums = jax.vmap(lambda x, y: losses.cross_entropy(x[None], y[None]))
    logits = self.head.logits(scores)
    return jnp.stack(sums(logits, batch['segmentation']), axis=-1)

  def measure(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, base.WeightedSum]:
    sums = self.pixel_losses(self.outputs(params, extra, batch), batch)
    total, weight = (sums * batch['mask'][:, None]).sum(axis=0)
    return {'loss': (total, weight)}

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [scores_lib.Iou]

  def exported(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns `scores`, float32 [B, H, W, C], the scores of the classes of each pixel."""
    scores = self.outputs(params, extra, batch)
    return {'scores': losses.resized(scores, batch['image'].shape[1:3])}

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return predicting.Predictor(self, params, extra, step)

  def draw_training(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    images = self._pixels(batch)
    if images is None:
      return {}
    return {'training_images': self._draw_maps(images, [batch['segmentation']])}

  def draw_evaluation(
    self, batch: dict[str, Any], outputs: Any
  ) -> dict[str, np.ndarray]:
    """Draws test images with the true classes, the predicted ones, and the errors."""
    images = self._pixels(batch)
    if images is None:
      return {}
    true = np.asarray(batch['segmentation'])
    predicted = np.asarray(losses.resized(outputs, true.shape[1:])).argmax(axis=-1)
    return {'segmentation': self._draw_maps(images, [true, predicted])}

  def _pixels(self, batch: dict[str, Any]) -> np.ndarray | None:
    """Returns the images of a batch, uint8 [B, H, W, 3]; None if they have no colours."""
    images = false_colours.of_inputs(batch['image'], self.config.pp)
    return grids.to_pixels(images) if images.shape[-1] in (1, 3) else None

  def _draw_maps(self, images: np.ndarray, maps: Sequence[np.ndarray]) -> np.ndarray:
    """Draws each image next to its classes, true and perhaps predicted, and the errors."""
    titles = ['image', 'classes']
    if len(maps) == 2:
      titles += ['predicted', 'errors']
    tints = predicting.tints(self)
    pictures = []
    for i, image in enumerate(images):
      blank = np.zeros(image.shape[:2], int)
      pictures.append(overlays.overlay(image, blank, ()))
      for class_map in maps:
        pictures.append(
          overlays.overlay(image, class_map[i] + 1, self.class_names, tints)
        )
      if len(maps) == 2:
        is_wrong = (maps[0][i] >= 0) & (maps[0][i] != maps[1][i])
        pictures.append(
          overlays.overlay(image, is_wrong.astype(int), [''], _ERROR[None])
        )
    return grids.grid(np.stack(pictures), (), len(titles), titles, grids.MOST)

  def describe(self) -> str:
    return f'{console.pluralize(len(self.classes), "class")} of pixels'


def _check_keys(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if keys are set that have no effect on pixels."""
  if config.pp.resize is not None:
    raise ValueError(
      f'resize={config.pp.resize} crops the centre of images in evaluation, and every '
      f"pixel counts with task='{config.task}': set --config.pp.resize=None"
    )
  for key, default in (('loss', 'softmax'), ('label_smoothing', 0)):
    if config[key] != default:
      raise ValueError(
        f"{key}={config[key]} is for classes of images, not for task='{config.task}': set "
        f'--config.{key}={default}'
      )
  if config.class_weights == 'balanced':
    raise ValueError(
      "class_weights='balanced' counts the images of each class, and "
      f"task='{config.task}' has classes of pixels: set weights by name, as in "
      '--config.class_weights="{\'road\': 0.5}"'
    )


def _metadata(classes: tuple[masks.MaskClass, ...]) -> dict[str, Any]:
  """Returns METADATA of the classes of masks."""
  names = [x.name for x in masks.learned(classes)]
  return {'class_names': names, 'mask_classes': masks.to_json(classes)}


def _shape(record: dict[str, 'tf.Tensor'], upright: bool) -> 'tf.Tensor':
  """Returns height and width of the image of a record, int32 [2]."""
  shape = tf.cast(images_lib.shape_of(record['image']), tf.int32)
  turned = orientation.read(record['image']) if upright else None
  return orientation.turn_shape(shape, turned)
