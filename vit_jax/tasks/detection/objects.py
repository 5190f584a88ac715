"""Images with annotated objects: the data of detectors and panoptic segmenters.

Shapes: N objects of an image (padded).
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models, preprocess
from vit_jax.configs import models as model_configs
from vit_jax.data import records
from vit_jax.data.augmentation import canvases, geometry
from vit_jax.data.images import images as images_lib
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.run import config as run_config
from vit_jax.tasks import base
from vit_jax.tasks.detection import matching
from vit_jax.weights import fitting

_ROUNDING = 1e-3  # Share of an image by which a box may reach beyond it.


class Task(base.Task):
  """Learns from the objects of images; subclasses have the model and its loss."""

  FEATURES: ClassVar[tuple[str, ...]] = (
    'image',
    'image/id?',
    'objects/bbox',
    'objects/label',
    'objects/area?',
    'objects/is_crowd?',
  )
  METADATA: ClassVar[tuple[str, ...]] = ('class_names',)
  DRAWS = True
  CANVASES = True

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    self.model = models.make_model(config.model, num_classes=len(self.class_names))
    queries = getattr(self.model, 'num_queries', 0)
    if not queries:
      raise ValueError(
        f"task='{config.task}' is for models with queries, such as kind='detr', not "
        f"kind='{models.kind_of(config.model)}': use another task or model "
        '(config.task, config.model)'
      )
    if self.options.max_objects > queries:
      raise ValueError(
        f'max_objects={self.options.max_objects} objects cannot each have one of '
        f'num_queries={queries}: lower --config.task_options.max_objects or raise '
        '--config.model.num_queries'
      )

  # --- Data ---

  @classmethod
  def class_names_of(cls, source: records.Source) -> tuple[str, ...]:
    """Returns the names of the classes of objects, or of segments."""
    return source.names[_labels_of(source.names)]

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the names of the classes; checks the numbers of objects."""
    _check_counts(config, source)
    return {'class_names': list(cls.class_names_of(source))}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    return {'class_names': [str(i) for i in range(num_classes or 91)]}

  def parts(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns the images of each canvas, the largest canvas first."""
    if not self.config.pp.sides:
      return super().parts(source)
    sizes = self._canvases(source, canvases.evaluation(self.config.pp))
    return _parts(sizes, self.example)

  def parts_at(
    self, source: records.Source, image_size: int | tuple[int, int] | None
  ) -> list[input_pipeline.Part]:
    """Returns parts of images without objects, whose examples are `inputs`.

    For `image_size` see Detector.detect.
    """
    pp = self.config.pp
    if image_size is None:
      image_size = pp.eval_side if pp.sides else preprocess.crop_size(pp)
    group: canvases.Group | None = None
    if isinstance(image_size, int):
      group = canvases.evaluation(pp, image_size)
      sizes = self._canvases(source, group)
    else:
      sizes = [(tuple(image_size), None)]
      pp = pp.copy_and_resolve_references()
      with pp.ignore_type():
        pp.update(crop=tuple(image_size), resize=None)

    @no_autograph
    def example(
      record: records.Record, seed: 'tf.Tensor | None', canvas: tuple[int, int]
    ) -> dict[str, 'tf.Tensor']:
      canvas_group = None if group is None else group._replace(canvas=canvas)
      return self._inputs(record, pp, canvas_group)

    return _parts(sizes, example)

  def _canvases(
    self, source: records.Source, group: canvases.Group
  ) -> list[tuple[tuple[int, int], np.ndarray | None]]:
    """Returns (canvas, numbers of images or None for all), the largest first."""
    # A Vision Transformer needs whole patches.
    has_patches = 'patches' in model_configs.vit_of(self.config.model)
    multiple = self.config.pp.canvas_multiple if has_patches else 1
    step = math.lcm(self.options.tight, multiple)
    if not step:
      return [(group.canvas, None)]
    smallest = canvases.smallest(input_pipeline.image_shapes(source), group, step)
    return list(canvases.by_size(smallest))

  @no_autograph
  def example(
    self,
    record: records.Record,
    seed: 'tf.Tensor | None',
    canvas: tuple[int, int] | None = None,
  ) -> dict[str, 'tf.Tensor']:
    """Returns an image and its objects.

    In evaluation on canvases the image lies on `canvas`, (height, width), by
    default on the square that holds any image.

    Returns:
      `image`, and on canvases `real`, bool [height, width], False for padding; `box`
      float32 [N, 4], centre and size, as shares of the image without padding,
      `class` int32 [N], and `count`, int32, the number of objects, which come first.
      In evaluation also `truth`, float32 [N, 4], corners x0, y0, x1, y1, `label`, -1
      for padding, `area` in pixels, `crowd`, `size`, height and width of the
      original, and `image_id`, int32 [2], see `_image_id`.
    """
    if seed is None:
      return self._for_evaluation(record, canvas)
    inputs, transform = self._decode(record, seed)
    boxes, mask = geometry.to_boxes(_boxes(record), transform)
    mask &= ~is_crowd(record)
    return {
      **inputs,
      **self._targets(boxes, record['objects/label'], mask),
      **self._extra_targets(record, inputs, transform, mask),
    }

  def _decode(
    self, record: records.Record, seed: 'tf.Tensor'
  ) -> tuple[dict[str, 'tf.Tensor'], geometry.Geometry]:
    """Returns `image`, on canvases also `real`, of training, and their Geometry."""
    pp = self.config.pp
    if not pp.sides:
      image, transform = preprocess.decode_with_geometry(record['image'], seed, pp)
      return {'image': image}, transform
    step = seed[1] // self.config.batch  # `seed` holds the example's position.
    group = canvases.group_at(step, self.config.seed, pp)
    return preprocess.on_canvas_for_training(record['image'], seed, group, pp)

  def _extra_targets(
    self,
    record: records.Record,
    inputs: dict[str, 'tf.Tensor'],
    transform: geometry.Geometry,
    mask: 'tf.Tensor',
  ) -> dict[str, 'tf.Tensor']:
    """Returns more tensors of a training example; a hook for subclasses."""
    return {}

  @no_autograph
  def inputs(
    self,
    record: records.Record,
    seed: 'tf.Tensor | None' = None,
    canvas: tuple[int, int] | None = None,
  ) -> dict[str, 'tf.Tensor']:
    """Returns `image`, on canvases also `real`, and `size`, int32 [2].

    `size` is the original height and width. An image without boxes is rotated as
    its EXIF orientation says; boxes belong to the stored pixels. For `canvas` see
    `example`.
    """
    del seed  # Training needs the objects too, see `example`.
    pp = self.config.pp
    if not pp.sides:
      return self._inputs(record, pp, None)
    group = canvases.evaluation(pp)
    if canvas is not None:
      group = group._replace(canvas=canvas)
    return self._inputs(record, pp, group)

  def _inputs(
    self,
    record: records.Record,
    pp: ml_collections.ConfigDict,
    group: canvases.Group | None,
  ) -> dict[str, 'tf.Tensor']:
    """Returns the inputs of an image on the canvas of a group, or resized."""
    upright = 'objects/bbox' not in record
    if group is None:
      pixels = images_lib.decode(record['image'], pp.channels, upright=upright)
      image = preprocess.for_evaluation(pixels, pp)
      return {'image': image, 'size': tf.shape(pixels)[:2]}
    inputs, transform = preprocess.on_canvas_for_evaluation(
      record['image'], group, pp, upright=upright
    )
    return {**inputs, 'size': transform.shape}

  def _for_evaluation(
    self, record: records.Record, canvas: tuple[int, int] | None
  ) -> dict[str, 'tf.Tensor']:
    """Returns an example for evaluation, see `example`."""
    inputs = self.inputs(record, canvas=canvas)
    crowd = is_crowd(record)
    boxes = _boxes(record)
    label = record['objects/label']
    area = record.get('objects/area')
    if area is None:
      pixels = tf.cast(tf.reduce_prod(inputs['size']), tf.float32)
      area = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=-1) * pixels
    return {
      **inputs,
      **self._targets(boxes, label, ~crowd),
      'truth': self._padded(tf.gather(boxes, [1, 0, 3, 2], axis=-1)),
      'label': self._padded(tf.cast(label, tf.int32) + 1) - 1,
      'area': self._padded(tf.cast(area, tf.float32)),
      'crowd': self._padded(tf.cast(crowd, tf.int32)),
      'image_id': _image_id(record),
    }

  def _targets(
    self, boxes: 'tf.Tensor', label: 'tf.Tensor', mask: 'tf.Tensor'
  ) -> dict[str, 'tf.Tensor']:
    """Returns `box`, `class` and `count` of the objects in a mask.

    Boxes are (ymin, xmin, ymax, xmax).
    """
    boxes, label = tf.boolean_mask(boxes, mask), tf.boolean_mask(label, mask)
    y0, x0, y1, x1 = tf.unstack(tf.reshape(boxes, [-1, 4]), axis=-1)
    box = tf.stack([x0 + x1, y0 + y1, 2 * (x1 - x0), 2 * (y1 - y0)], -1) / 2
    return {
      'box': self._padded(box),
      'class': self._padded(tf.cast(label, tf.int32)),
      'count': tf.size(label),
    }

  def _padded(self, x: 'tf.Tensor') -> 'tf.Tensor':
    """Pads the first axis to `max_objects`."""
    max_objects = self.options.max_objects
    tf.debugging.assert_less_equal(
      tf.shape(x)[0],
      max_objects,
      f'an image has more objects than {_objects_remedy(max_objects)}',
    )
    num_padding = max_objects - tf.shape(x)[0]
    x = tf.pad(x, [[0, num_padding]] + [[0, 0]] * (x.shape.rank - 1))
    return tf.ensure_shape(x, [max_objects, *x.shape[1:]])

  def input_spec(
    self,
    image_size: tuple[int, int] | None = None,
    batch: Any = 1,
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `image` and `size`, int32 [batch, 2]; on canvases also `real`, bool."""
    if image_size is None and self.config.pp.sides:
      image_size = canvases.evaluation(self.config.pp).canvas
    image = self.image_spec(batch, image_size)
    size = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
    if not self.config.pp.sides:
      return {'image': image, 'size': size}
    real = jax.ShapeDtypeStruct(image.shape[:3], jnp.bool_)
    return {'image': image, 'real': real, 'size': size}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the inputs, and `max_objects` boxes and classes with their `count`."""
    max_objects = self.options.max_objects
    inputs = self.input_spec(self.image_size, size)
    del inputs['size']  # Training has no use for it.
    return {
      **inputs,
      'box': jax.ShapeDtypeStruct((size, max_objects, 4), jnp.float32),
      'class': jax.ShapeDtypeStruct((size, max_objects), jnp.int32),
      'count': jax.ShapeDtypeStruct((size,), jnp.int32),
    }

  # --- Training ---

  def adapt_weights(self, weights: Any) -> Any:
    """Takes the rows of the class head by name, if it has all classes.

    So weights with COCO's 91 category ids fit data with its 80 classes.
    """
    if 'class_head' not in weights.params:
      return weights
    return fitting.with_classes(weights, self.class_names)

  def augment(self, batch: base.Batch, rng: jax.Array) -> base.Batch:
    """Adds the factors of the losses, which depend on the global batch.

    The cross-entropy is divided by the sum of the class weights of all queries,
    and the losses of boxes by the number of objects, over all devices.
    """
    no_object = self.options.no_object_weight
    factors = matching.loss_factors(batch['count'], self.model.num_queries, no_object)
    return {**batch, **factors}

  def image_loss_factors(self, counts: jax.Array) -> dict[str, jax.Array]:
    """Returns the factors of the losses of single images, for numbers of objects [B]."""
    counts = counts.astype(jnp.float32)
    weights = matching.class_weights(
      counts, self.model.num_queries, self.options.no_object_weight
    )
    return {'class_factor': 1 / weights, 'target_factor': 1 / jnp.maximum(counts, 1.0)}

  def check_counts(self, source: records.Source) -> None:
    """Raises ValueError if an image of a source is known to have too many objects."""
    _check_counts(self.config, source)

  def describe(self) -> str:
    classes = console.pluralize(len(self.class_names), 'class')
    description = f'{classes}, {self.model.num_queries} queries'
    if self.config.pp.sides:
      sizes = ', '.join(f'{height}x{width}' for height, width in self.image_sizes)
      description += f', images on canvases of {sizes} pixels'
    return description


def _parts(
  sizes: Sequence[tuple[tuple[int, int], np.ndarray | None]],
  example: Callable[..., dict],
) -> list[input_pipeline.Part]:
  """Returns the parts of `Task._canvases`; `example` takes a `canvas` too."""
  parts = []
  for canvas, numbers in sizes:
    on_canvas = functools.partial(example, canvas=canvas)
    parts.append(input_pipeline.Part(numbers, on_canvas, canvas))
  return parts


def _image_id(record: records.Record) -> 'tf.Tensor':
  """Returns COCO's number of an image in two halves, since JAX has no int64."""
  number = record.get('image/id', tf.constant(0, tf.int64))
  if number.dtype == tf.string:
    number = tf.constant(0, tf.int64)
  return tf.bitcast(tf.reshape(tf.cast(number, tf.int64), []), tf.int32)


def is_crowd(record: records.Record) -> 'tf.Tensor':
  """Returns whether each object is a crowd, bool [n]."""
  if 'objects/is_crowd' in record:
    return tf.cast(record['objects/is_crowd'], tf.bool)
  return tf.zeros_like(record['objects/label'], tf.bool)


def _boxes(record: records.Record) -> 'tf.Tensor':
  """Returns the boxes of a record, [n, 4]; raises an error if they are invalid."""
  boxes = tf.reshape(record['objects/bbox'], [-1, 4])
  low, high = boxes[:, :2], boxes[:, 2:]
  # False for NaN.
  is_valid = (low <= high) & (low >= -_ROUNDING) & (high <= 1 + _ROUNDING)
  tf.debugging.assert_equal(
    tf.reduce_all(is_valid),
    True,
    "objects/bbox must be (ymin, xmin, ymax, xmax), shares of the image's height "
    'and width from 0 to 1: correct the data',
  )
  return boxes


def _objects_remedy(max_objects: int) -> str:
  """Returns how to allow more objects of an image."""
  return (
    f'max_objects={max_objects}: raise --config.task_options.max_objects, and with it '
    '--config.model.num_queries'
  )


def _labels_of(names: Iterable[str]) -> str:
  """Returns the feature that holds the classes of objects."""
  [label] = [name for name in names if name.endswith('objects/label')]
  return label


def _check_counts(config: ml_collections.ConfigDict, source: records.Source) -> None:
  """Raises ValueError if a source knows an image with too many objects."""
  counts = source.lengths(_labels_of(source.features))
  if counts is None or not len(counts):
    return
  max_objects = run_config.options_of_task(config).max_objects
  if counts.max() > max_objects:
    raise ValueError(
      f'{np.sum(counts > max_objects):,} of {len(counts):,} images have more objects '
      f"than the model can find; most are in '{source.name(int(counts.argmax()))}': "
      f'{counts.max()}, and {_objects_remedy(max_objects)}, to at least {counts.max()}'
    )
