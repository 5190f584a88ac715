"""Panoptic segmentation (arXiv 1801.00868) of COCO's data.

Each pixel belongs to one segment: a thing, such as a person, or all stuff of a class,
such as the sky. The kind of the model decides how segments are learned: MODULES. The data
have the features of TFDS's coco/2017_panoptic.

Shapes: B images, Q queries, N objects of an image (padded), H x W pixels.
"""

import abc
from collections.abc import Mapping, Sequence
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.configs import models as model_configs, task_options
from vit_jax.data import records
from vit_jax.data.augmentation import canvases, geometry
from vit_jax.data.coco import panoptic
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.figures import grids, overlays
from vit_jax.tasks import predict_flags
from vit_jax.tasks.detection import (
  boxes as boxes_lib,
  objects,
  segments as segments_lib,
)

_OBJECTS = 'panoptic_objects/'

# Kind of the model (config.model.kind) -> module of its task; others are detectors.
MODULES = {
  'detr': 'vit_jax.tasks.detection.segment_detr',
  'eomt': 'vit_jax.tasks.segmentation.segment_masks',
}


class Task(objects.Task):
  """Learns things and stuff; an instance is of the class for the kind of its model."""

  FEATURES = (
    'image',
    'image/id?',
    'panoptic_image',
    *(_OBJECTS + name for name in ('id', 'bbox', 'label', 'area?', 'is_crowd?')),
  )
  Options = task_options.Segment
  METADATA = (*objects.Task.METADATA, 'isthing')
  FLAGS = predict_flags.SEGMENT.FLAGS

  def __new__(cls, config: Any = None, metadata: Any = None) -> 'Task':
    task_class = _class_for(config) if cls is Task else cls
    return super().__new__(task_class)

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    self.is_thing = tuple(metadata['isthing'])

  # --- Data ---

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the names of the classes, and which are things."""
    names = list(cls.class_names_of(source))
    return {'class_names': names, 'isthing': _thing_flags(config, source, names)}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    names = super().planned_metadata(config, num_classes or 133)['class_names']
    return {'class_names': names, 'isthing': [True] * len(names)}

  @no_autograph
  def example(
    self,
    record: records.Record,
    seed: 'tf.Tensor | None',
    canvas: tuple[int, int] | None = None,
  ) -> dict[str, 'tf.Tensor']:
    """Returns the tensors of objects, and `segments`, uint8 [H, W].

    `segments` has the number of the object of each pixel, from 1, or 0 for none.
    In evaluation also `truth_size`, height and width of the original, at most the
    option of this name, and `truth_segments`, uint8, like `segments` for the
    original, padded, with crowds, in the order of `label`.
    """
    renamed = {k.replace(_OBJECTS, 'objects/'): x for k, x in record.items()}
    return super().example(renamed, seed, canvas)

  def _extra_targets(
    self,
    record: records.Record,
    inputs: dict[str, 'tf.Tensor'],
    transform: geometry.Geometry,
    mask: 'tf.Tensor',
  ) -> dict[str, 'tf.Tensor']:
    ids = tf.boolean_mask(record['objects/id'], mask)
    numbers = panoptic.read(record['panoptic_image'], ids, transform.shape)
    numbers = geometry.to_masks(numbers[None], transform)[0]
    return {'segments': _padded(numbers, inputs['image'])}

  def _for_evaluation(
    self, record: records.Record, canvas: tuple[int, int] | None
  ) -> dict[str, 'tf.Tensor']:
    example = super()._for_evaluation(record, canvas)
    largest = self.options.truth_size
    ids = record['objects/id']
    truth = panoptic.read(record['panoptic_image'], ids, example['size'])
    is_target = tf.cast(~objects.is_crowd(record), tf.uint8)
    number_of = tf.concat([[0], tf.cumsum(is_target) * is_target], axis=0)
    numbers = tf.gather(number_of, tf.cast(truth, tf.int32))
    size = tf.cast(example['size'], tf.float32)
    size = tf.round(size * tf.minimum(1.0, largest / tf.reduce_max(size)))
    size = tf.cast(tf.maximum(1.0, size), tf.int32)
    return {
      **example,
      'segments': _padded(panoptic.resize(numbers, _shown(example)), example['image']),
      'truth_size': size,
      'truth_segments': _padded(
        panoptic.resize(truth, size), tf.zeros([largest, largest])
      ),
    }

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `segments` too, uint8 [size, H, W]."""
    spec = super().batch_spec(size)
    shape = spec['image'].shape[:3]
    return {**spec, 'segments': jax.ShapeDtypeStruct(shape, jnp.uint8)}

  # --- Evaluation and prediction ---

  @abc.abstractmethod
  def masks(self, outputs: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns what `assemble` makes segments of, arrays [B, ...].

    `masks` are logits [B, Q, h, w]; `extent`, float32 [B, 2], are the shares of their
    height and width that show the image; the rest is padding.
    """

  @abc.abstractmethod
  def assemble(
    self, masks: Mapping[str, np.ndarray], row: int, size: tuple[int, int]
  ) -> segments_lib.Segments:
    """Returns the segments of image `row` of the result of `masks` in NumPy.

    A further argument `threshold` is the least score of a segment; `size` is the height
    and width of their map.
    """

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    if cls is Task:
      return _class_for(config).evaluators(config)
    return super().evaluators(config)

  def describe(self) -> str:
    num_things = sum(self.is_thing)
    num_stuff = len(self.is_thing) - num_things
    return f'{super().describe()}; {num_things} things, {num_stuff} stuff'

  def draw_evaluation(
    self, batch: dict[str, jax.Array], outputs: Any
  ) -> dict[str, np.ndarray]:
    """Draws test images: the segments, then the predicted ones."""
    masks = jax.device_get(self.masks(outputs, batch))
    pictures = []
    for i, image in enumerate(grids.to_pixels(batch['image'])):
      labels = batch['class'][i][: batch['count'][i]]
      names = [self.class_names[label] for label in labels]
      pictures.append(overlays.overlay(image, batch['segments'][i], names))
      height, width = boxes_lib.shown_size(image.shape[:2], masks['extent'][i])
      segments = self.assemble(masks, i, (height, width))
      numbers = np.zeros(image.shape[:2], np.int32)
      numbers[:height, :width] = segments.numbers
      names = [self.class_names[label] for label in segments.labels]
      pictures.append(overlays.overlay(image, numbers, names))
    titles = ['segments', 'predicted', 'segments', 'predicted']
    return {'segments': grids.grid(np.stack(pictures), titles=titles)}


def _class_for(config: ml_collections.ConfigDict) -> type[Task]:
  """Returns the class of the task for the model of a config."""
  module = MODULES.get(model_configs.kind_of(config.model), MODULES['detr'])
  return importlib.import_module(module).Task


def _thing_flags(
  config: ml_collections.ConfigDict, source: records.Source, names: Sequence[str]
) -> list[bool]:
  """Returns whether each class is a class of things."""
  stuff_names = set((config.get('task_options') or {}).get('stuff', ()))
  if unknown := sorted(stuff_names - set(names)):
    raise ValueError(
      f'stuff={unknown} are not classes of the data, which has {", ".join(names)} '
      '(config.task_options.stuff)'
    )
  if stuff_names:
    return [name not in stuff_names for name in names]
  if source.stuff:
    return [number not in source.stuff for number in range(len(names))]
  dataset = source.origin.get('dataset', '').rsplit('/', 1)[0]
  num_things = panoptic.THINGS.get(dataset, len(names))
  return [number < num_things for number in range(len(names))]


def _padded(numbers: 'tf.Tensor', image: 'tf.Tensor') -> 'tf.Tensor':
  """Pads a map to the height and width of an image."""
  padded = canvases.pad(numbers, tf.unstack(tf.shape(image)[:2]))
  return tf.ensure_shape(padded, image.shape[:2])


def _shown(example: dict[str, 'tf.Tensor']) -> 'tf.Tensor':
  """Returns the height and width of an image without its padding, int32 [2]."""
  if 'real' not in example:
    return tf.shape(example['image'])[:2]
  real = tf.cast(example['real'], tf.int32)
  height = tf.reduce_sum(tf.reduce_max(real, axis=1))
  width = tf.reduce_sum(tf.reduce_max(real, axis=0))
  return tf.stack([height, width])
