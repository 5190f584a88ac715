"""Object detection as the prediction of a set (DETR, arXiv 2005.12872).

A fixed number of queries predict a class, or "no object", and a box each. The
loss matches predictions and objects at the least cost; it is computed after
each layer of the decoder.

Shapes: B images, Q queries, N objects of an image (padded), L layers of the
decoder, C classes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models, preprocess
from vit_jax.configs import models as model_configs, task_options
from vit_jax.data import records
from vit_jax.data.augmentation import canvases, geometry
from vit_jax.data.images import images as images_lib
from vit_jax.data.lazy import tf
from vit_jax.figures import grids, overlays
from vit_jax.inference import predictor as predictor_lib
from vit_jax.learning import optim
from vit_jax.run import config as run_config
from vit_jax.tasks import base, predict_flags
from vit_jax.tasks.detection import (
  attention_figures,
  average_precision as ap,
  boxes as boxes_lib,
  detectors,
  figures,
  matching,
)
from vit_jax.weights import fitting

_ROUNDING = 1e-3  # Share of an image by which a box may reach beyond it.
_MOST = 512  # Largest shorter side of an image in TensorBoard, in pixels.


class Task(base.Task):
  """Learns boxes and classes of the objects of images."""

  FEATURES: ClassVar[tuple[str, ...]] = (
    'image',
    'image/id?',
    'objects/bbox',
    'objects/label',
    'objects/area?',
    'objects/is_crowd?',
  )
  Options = task_options.Detect
  METADATA: ClassVar[tuple[str, ...]] = ('class_names',)
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ('class_head/',)
  DRAWS = True
  FIGURES = figures.FIGURES
  FLAGS = predict_flags.DETECTION.FLAGS
  CANVASES = True

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    self.model = models.make_model(config.model, num_classes=len(self.class_names))
    queries = self.model.num_queries
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
      sizes = [(None, tuple(image_size))]
      pp = pp.copy_and_resolve_references()
      with pp.ignore_type():
        pp.update(crop=tuple(image_size), resize=None)

    def example(
      record: dict[str, 'tf.Tensor'], seed: 'tf.Tensor | None', canvas: tuple[int, int]
    ) -> dict[str, 'tf.Tensor']:
      canvas_group = None if group is None else group._replace(canvas=canvas)
      return self._inputs(record, pp, canvas_group)

    return _parts(sizes, example)

  def _canvases(
    self, source: records.Source, group: canvases.Group
  ) -> list[tuple[np.ndarray | None, tuple[int, int]]]:
    """Returns (numbers of images or None for all, canvas), the largest first."""
    # A Vision Transformer needs whole patches.
    has_patches = model_configs.parts_of(self.config.model)
    multiple = self.config.pp.canvas_multiple if has_patches else 1
    step = math.lcm(self.options.tight, multiple)
    if not step:
      return [(None, group.canvas)]
    smallest = canvases.smallest(input_pipeline.image_shapes(source), group, step)
    sizes, size_of_image = np.unique(smallest, axis=0, return_inverse=True)
    size_of_image = size_of_image.reshape(-1)
    images_and_canvases = []
    for i in reversed(range(len(sizes))):
      canvas = tuple(sizes[i].tolist())
      images_and_canvases.append((np.flatnonzero(size_of_image == i), canvas))
    return images_and_canvases

  def example(
    self,
    record: dict[str, 'tf.Tensor'],
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
      **self._more_targets(record, inputs, transform, mask),
    }

  def _decode(
    self, record: dict[str, 'tf.Tensor'], seed: 'tf.Tensor'
  ) -> tuple[dict[str, 'tf.Tensor'], geometry.Geometry]:
    """Returns `image`, on canvases also `real`, of training, and their Geometry."""
    pp = self.config.pp
    if not pp.sides:
      image, transform = preprocess.decode_with_geometry(record['image'], seed, pp)
      return {'image': image}, transform
    step = seed[1] // self.config.batch  # `seed` holds the example's position.
    group = canvases.group_at(step, self.config.seed, pp)
    return preprocess.on_canvas_for_training(record['image'], seed, group, pp)

  def _more_targets(
    self,
    record: dict[str, 'tf.Tensor'],
    inputs: dict[str, 'tf.Tensor'],
    transform: geometry.Geometry,
    mask: 'tf.Tensor',
  ) -> dict[str, 'tf.Tensor']:
    """Returns further tensors of a training example, for subclasses."""
    return {}

  def inputs(
    self,
    record: dict[str, 'tf.Tensor'],
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
    record: dict[str, 'tf.Tensor'],
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
    self, record: dict[str, 'tf.Tensor'], canvas: tuple[int, int] | None
  ) -> dict[str, 'tf.Tensor']:
    """Returns an example for evaluation, see `example`."""
    inputs = self.inputs(record, canvas=canvas)
    crowd, boxes, label = is_crowd(record), _boxes(record), record['objects/label']
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
      f'an image has more objects than {_more_objects(max_objects)}',
    )
    missing = max_objects - tf.shape(x)[0]
    x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
    return tf.ensure_shape(x, [max_objects, *x.shape[1:]])

  def input_spec(
    self,
    image_size: tuple[int, int] | None = None,
    batch: Any = 1,
  ) -> dict[str, jax.ShapeDtypeStruct]:
    if image_size is None and self.config.pp.sides:
      image_size = canvases.evaluation(self.config.pp).canvas
    image = self.image_spec(batch, image_size)
    size = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
    if not self.config.pp.sides:
      return {'image': image, 'size': size}
    real = jax.ShapeDtypeStruct(image.shape[:3], jnp.bool_)
    return {'image': image, 'real': real, 'size': size}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
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

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the parameters, and the constants of a frozen batch norm, if any."""
    zeros = jnp.zeros(self.image_spec(1).shape)
    variables = self.model.init(rng, zeros, train=False)
    params = variables.pop('params')
    return params, {k: v for k, v in variables.items() if k == 'frozen'}

  def adapt_weights(self, weights: Any) -> Any:
    """Takes the rows of the class head by name, if it has all classes.

    So weights with COCO's 91 category ids fit data with its 80 classes.
    """
    return fitting.with_classes(weights, self.class_names)

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Sequence[str] | None,
  ) -> Sequence[str]:
    """Returns the heads that weights lack, or that are for other classes.

    With weights of only a backbone, everything else is new.
    """
    if 'query_embedding' not in weights:
      backbone = ('backbone/', 'frozen/')
      return [path for path in shapes if not path.startswith(backbone)]
    bias = 'class_head/bias'
    same_classes = bias in weights and weights[bias].shape == shapes[bias].shape
    if class_names is not None and tuple(class_names) != self.class_names:
      same_classes = False
    prefixes = []
    for prefix in self.NEW_PARAMS:
      is_missing = not any(path.startswith(prefix) for path in weights)
      if is_missing or (prefix == 'class_head/' and not same_classes):
        prefixes.append(prefix)
    return prefixes

  def check_weights(self, weights: Mapping[str, Any], params: Any) -> None:
    """Checks that weights include all frozen parameters: none stays random."""
    frozen = optim.frozen_sizes(self.config.lr_multipliers, params)
    missing = sorted(set(frozen) - set(weights))
    if missing:
      raise ValueError(
        f'pretrained={self.config.pretrained!r}: this config needs weights for its '
        f'frozen parameters (lr_multipliers), and {len(missing)} have none, such as '
        f"'{missing[0]}', and would stay random: pass --config.pretrained=FILE, of a "
        'detector with the same classes or, for its backbone, of a classifier; or train '
        'all parameters: --config.lr_multipliers="()", for a ResNet with '
        '--config.model.norm=group'
      )

  def _apply(
    self, params: Any, extra: Any, batch: dict[str, jax.Array], **kwargs: Any
  ) -> dict[str, jax.Array]:
    variables = {'params': params, **extra}
    return self.model.apply(variables, batch['image'], batch.get('real'), **kwargs)

  def augment(
    self, batch: dict[str, jax.Array], rng: jax.Array
  ) -> dict[str, jax.Array]:
    """Adds the factors of the losses, which depend on the global batch.

    The cross-entropy is divided by the sum of the class weights of all queries,
    and the losses of boxes by the number of objects, over all devices.
    """
    no_object = self.options.no_object_weight
    shares = matching.shares(batch['count'], self.model.num_queries, no_object)
    return {**batch, **shares}

  def _set_losses(
    self, outputs: dict[str, jax.Array], batch: dict[str, jax.Array]
  ) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the weighted losses of each image by name, [L, B], and the queries.

    The batch has the shares that `augment` adds.
    """
    sums = boxes_lib.losses(
      outputs['logits'],
      outputs['boxes'],
      batch['class'],
      batch['box'],
      batch['count'],
      self.options.class_weight,
      self.options.no_object_weight,
    )
    losses = {
      'class': self.options.class_weight * sums['class'] * batch['class_share'],
      'l1': boxes_lib.L1 * sums['l1'] * batch['target_share'],
      'giou': boxes_lib.GIOU * sums['giou'] * batch['target_share'],
    }
    return losses, sums['query']

  def loss(
    self, params: Any, extra: Any, batch: dict[str, jax.Array], rng: jax.Array
  ) -> tuple[base.WeightedSum, dict[str, base.WeightedSum]]:
    """Returns the sum over layers of the set loss, and the number of images."""
    losses = self._losses(params, extra, batch, train=True, rngs={'dropout': rng})
    count = jnp.float32(len(batch['count']))
    total = sum(x.sum() for x in losses.values())
    last_layer = {name: (x[-1].sum(), count) for name, x in losses.items()}
    return (total, count), last_layer

  def _losses(
    self, params: Any, extra: Any, batch: dict[str, jax.Array], **kwargs: Any
  ) -> dict[str, jax.Array]:
    """Returns all losses, see `_set_losses`; `kwargs` are for the model."""
    losses, _ = self._set_losses(self._apply(params, extra, batch, **kwargs), batch)
    return losses

  # --- Evaluation and prediction ---

  def outputs(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Computes `logits` [B, Q, C + 1] and `boxes` [B, Q, 4] (centre, size)."""
    layers = self._apply(params, extra, batch, train=False)
    return {name: x[-1] for name, x in layers.items()}

  def exported(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns `boxes` [B, Q, 4], corners x0, y0, x1, y1 as shares of the image.

    Also `probabilities` [B, Q, C] of the classes, which leave out "no object",
    and with a mask head the logits `masks` [B, Q, H / 4, W / 4].
    """
    outputs = self.outputs(params, extra, batch)
    logits = outputs.pop('logits')
    return {
      **outputs,
      'boxes': boxes_lib.corners(outputs['boxes']),
      'probabilities': jax.nn.softmax(logits)[..., :-1],
    }

  def detections(self, outputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the most probable object of each query.

    `boxes`, float32 [B, Q, 4], corners x0, y0, x1, y1 as shares of the image;
    `labels`, int32 [B, Q]; `scores`, float32 [B, Q].
    """
    probabilities = jax.nn.softmax(outputs['logits'])[..., :-1]
    return {
      'boxes': boxes_lib.corners(outputs['boxes']),
      'labels': probabilities.argmax(axis=-1),
      'scores': probabilities.max(axis=-1),
    }

  def measure(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, base.WeightedSum]:
    """Returns the sum of the losses of images, and the number of images."""
    count = batch['count'].astype(jnp.float32)
    weights = matching.class_weights(
      count, self.model.num_queries, self.options.no_object_weight
    )
    shares = {
      'class_share': 1 / weights,
      'target_share': 1 / jnp.maximum(count, 1.0),
    }
    losses = self._losses(params, extra, {**batch, **shares}, train=False)
    image_losses = sum(x[-1] for x in losses.values())  # [B]
    return {'loss': ((image_losses * batch['mask']).sum(), batch['mask'].sum())}

  def check_points(self, points: Any) -> np.ndarray:
    return attention_figures.check_points(points)

  def check_counts(self, source: records.Source) -> None:
    """Raises ValueError if an image of a source is known to have too many objects."""
    _check_counts(self.config, source)

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [*super().evaluators(config), ap.AveragePrecision]

  def describe(self) -> str:
    classes = console.pluralize(len(self.class_names), 'class')
    description = f'{classes}, {self.model.num_queries} queries'
    if self.config.pp.sides:
      sizes = ', '.join(f'{height}x{width}' for height, width in self.image_sizes)
      description += f', images on canvases of {sizes} pixels'
    return description

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return detectors.Detector(self, params, extra, step)

  def draw_evaluation(
    self, batch: dict[str, jax.Array], outputs: Any
  ) -> dict[str, np.ndarray]:
    """Draws test images: the objects, then the detections."""
    detections = jax.device_get(self.detections(outputs))
    shares = np.asarray(boxes_lib.filled(batch))
    pictures = []
    for i, image in enumerate(grids.to_pixels(batch['image'])):
      size = boxes_lib.shown_size(image.shape[:2], shares[i])
      is_object = batch['label'][i] >= 0
      names = [self.class_names[label] for label in batch['label'][i][is_object]]
      boxes = boxes_lib.to_pixels(batch['truth'][i][is_object], size)
      pictures.append(overlays.draw(image, boxes, names))
      scores = detections['scores'][i]
      is_detected = scores >= detectors.THRESHOLD
      labels = detections['labels'][i][is_detected]
      captions = []
      for label, score in zip(labels, scores[is_detected]):
        captions.append(f'{self.class_names[label]} {100 * score:.0f}')
      boxes = boxes_lib.to_pixels(detections['boxes'][i][is_detected], size)
      pictures.append(overlays.draw(image, boxes, captions))
    titles = ['objects', 'detected', 'objects', 'detected']
    return {'detections': grids.grid(np.stack(pictures), titles=titles, most=_MOST)}


def _parts(
  images_and_canvases: Sequence[tuple[np.ndarray | None, tuple[int, int]]],
  example: Callable[..., dict],
) -> list[input_pipeline.Part]:
  """Returns the parts of `Task._canvases`; `example` takes a `canvas` too."""
  parts = []
  for images, canvas in images_and_canvases:
    on_canvas = functools.partial(example, canvas=canvas)
    parts.append(input_pipeline.Part(images, on_canvas, canvas))
  return parts


def _image_id(record: dict[str, 'tf.Tensor']) -> 'tf.Tensor':
  """Returns COCO's number of an image in two halves, since JAX has no int64."""
  number = record.get('image/id', tf.constant(0, tf.int64))
  if number.dtype == tf.string:
    number = tf.constant(0, tf.int64)
  return tf.bitcast(tf.reshape(tf.cast(number, tf.int64), []), tf.int32)


def is_crowd(record: dict[str, 'tf.Tensor']) -> 'tf.Tensor':
  """Returns whether each object is a crowd, bool [n]."""
  if 'objects/is_crowd' in record:
    return tf.cast(record['objects/is_crowd'], tf.bool)
  return tf.zeros_like(record['objects/label'], tf.bool)


def _boxes(record: dict[str, 'tf.Tensor']) -> 'tf.Tensor':
  """Returns the boxes of a record [n, 4]; an error if they are not boxes."""
  boxes = tf.reshape(record['objects/bbox'], [-1, 4])
  low, high = boxes[:, :2], boxes[:, 2:]
  # False for NaN.
  is_box = (low <= high) & (low >= -_ROUNDING) & (high <= 1 + _ROUNDING)
  tf.debugging.assert_equal(
    tf.reduce_all(is_box),
    True,
    "objects/bbox must be (ymin, xmin, ymax, xmax), shares of the image's height "
    'and width from 0 to 1: correct the data',
  )
  return boxes


def _more_objects(max_objects: int) -> str:
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
      f'{counts.max()}, and {_more_objects(max_objects)}, to at least {counts.max()}'
    )
