r"""Semantic segmentation: the class of each pixel.

  vit_jax train --config=configs/vit.py:b16,/path/to/folder \
    --config.pretrained=ViT-B_16.npz --config.task=segment_semantic \
    --config.best_metric=miou_test --workdir=/tmp/segmentation

The data have images and masks, see vit_jax/data/masks.py. The kind of the model decides on
the head: HEADS. Measures are of the masks at their height and width.

Shapes: B images of H x W pixels, scores on a grid of h x w cells, C classes.
"""

from collections.abc import Mapping
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
from vit_jax.data.images import images as images_lib, orientation
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.tasks import base
from vit_jax.tasks.segmentation import class_maps, losses, scores as scores_lib


class Head(Protocol):
  """What the kind of a model brings: its parameters, its loss and its scores.

  The constructor gets the config, the number of classes, and weights of the classes,
  float32 [C], or None.

  Attributes:
    NEW_PARAMS: prefixes of the paths of parameters that do not come from
      `config.pretrained`.
    model: the Flax module.
  """

  NEW_PARAMS: ClassVar[tuple[str, ...]]
  model: Any

  def init(self, rng: jax.Array, images: jax.Array) -> tuple[Any, Any]:
    """Returns parameters and extra state, see Task.init; images are zeros [1, H, W, 3]."""

  def loss(
    self,
    params: Any,
    extra: Any,
    batch: dict[str, jax.Array],
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, dict[str, base.WeightedSum]]:
    """Returns the loss of a training batch, see Task.loss.

    `batch` has `image`, float32 [B, H, W, 3], and `segmentation`, int32 [B, H, W]: classes
    of the pixels, negative for pixels that do not count.
    """

  def update_extra(self, extra: Any, means: dict[str, jax.Array]) -> Any:
    """Returns the extra state after an update, see Task.update_extra."""

  def scores(self, params: Any, extra: Any, images: jax.Array) -> jax.Array:
    """Returns scores of the classes, float32 [B, h, w, C], on any grid over the images.

    The class of a pixel is that of the greatest score after bilinear resizing.
    """


# Kind of the model (config.model.kind) -> 'module:class' of its head.
HEADS = {
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
  OWN_PARAMS = ('head',)
  REPORT = scores_lib.Iou

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    if config.pp.resize is not None:
      raise ValueError(
        f'resize={config.pp.resize} crops the centre of images in evaluation, and every '
        f"pixel counts with task='{config.task}': set --config.pp.resize=None"
      )
    classes = [masks.MaskClass(**fields) for fields in metadata['mask_classes']]
    self.classes = masks.learned(classes)
    self._reader = masks.reader(config, classes)
    self.head = _make_head(config, len(self.classes), None)
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
    """Returns the images of each canvas, see `tight` of the options."""
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
    return self.head.NEW_PARAMS

  def loss(
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
    return jnp.stack(sums(scores, batch['segmentation']), axis=-1)

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

  def describe(self) -> str:
    return f'{console.pluralize(len(self.classes), "class")} of pixels'


def _metadata(classes: tuple[masks.MaskClass, ...]) -> dict[str, Any]:
  """Returns METADATA of the classes of masks."""
  fields = []
  for x in classes:
    color = None if x.color is None else list(x.color)
    fields.append({'name': x.name, 'id': x.id, 'color': color, 'ignore': x.ignore})
  return {
    'class_names': [x.name for x in masks.learned(classes)],
    'mask_classes': fields,
  }


def _shape(record: dict[str, 'tf.Tensor'], upright: bool) -> 'tf.Tensor':
  """Returns height and width of the image of a record, int32 [2]."""
  shape = tf.cast(images_lib.shape_of(record['image']), tf.int32)
  turned = orientation.read(record['image']) if upright else None
  return orientation.turn_shape(shape, turned)
