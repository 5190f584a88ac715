"""Object detection as the prediction of a set (DETR, arXiv 2005.12872).

A fixed number of queries predict a class, or "no object", and a box each. The
loss matches predictions and objects at the least cost; it is computed after
each layer of the decoder.

Shapes: B images, Q queries, N objects of an image (padded), L layers of the
decoder, C classes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from vit_jax import models
from vit_jax import preprocess
from vit_jax.augmentation import geometry
from vit_jax.configs import rules
from vit_jax.detection import average_precision as ap
from vit_jax.detection import drawing
from vit_jax.evaluators import captions
from vit_jax.evaluators import means
from vit_jax.files import images as images_lib
from vit_jax.learning import boxes as boxes_lib
from vit_jax.tasks import base

THRESHOLD = 0.7  # Least score of an object that is shown.


class Task(base.Task):
  """Learns boxes and classes of the objects of images."""

  FEATURES = (
    'image',
    'objects/bbox',
    'objects/label',
    'objects/area?',
    'objects/is_crowd?',
  )
  OPTIONS = {  # noqa: RUF012
    # Greatest number of objects of an image; at most the number of queries.
    'max_objects': 100,
  }
  OPTION_RULES = {'max_objects': rules.whole(1)}  # noqa: RUF012
  METRICS = (*ap.NAMES, 'loss')
  METADATA = ('class_names',)
  METADATA_RULES = {'class_names': rules.names}  # noqa: RUF012
  NEW_PARAMS = ('class_head/',)
  DRAWS = True
  NEXT = 'a picture of an image with boxes'

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    self.model = models.make_model(
      config.model, num_classes=len(self.class_names)
    )
    queries = self.model.num_queries
    if self.options.max_objects > queries:
      raise ValueError(
        f'max_objects={self.options.max_objects} objects cannot each have one of '
        f'num_queries={queries}: lower --config.task_options.max_objects or raise '
        '--config.model.num_queries'
      )

  # --- Data ---

  @classmethod
  def make_metadata(cls, config, source):
    """Returns the names of the classes."""
    del config
    return {'class_names': list(source.names['objects/label'])}

  @classmethod
  def planned_metadata(cls, config, num_classes):
    """Returns class names for a plan: '0', '1', ..."""
    del config
    return {'class_names': [str(i) for i in range(num_classes or 91)]}

  def example(self, record, seed):
    """Returns an image and its objects.

    Returns:
      `image`; `box` float32 [N, 4], centre and size, `label` int32 [N], and
      `count`, int32, the number of objects, which come first. In evaluation
      also `truth`, float32 [N, 4], corners x0, y0, x1, y1, `area` in pixels,
      `crowd`, and `size`, height and width of the original; `label` of padding
      is -1.
    """
    if seed is None:
      return self._for_evaluation(record)
    image, drawn = preprocess.decode_with_geometry(
      record['image'], seed, self.config.pp
    )
    found, kept = geometry.to_boxes(record['objects/bbox'], drawn)
    kept = tf.logical_and(kept, ~self._crowd(record))
    found = tf.boolean_mask(found, kept)
    label = tf.boolean_mask(record['objects/label'], kept)
    return {
      'image': image,
      **self._targets(found, label),
      **self._further(record, image, drawn, kept),
    }

  def _further(self, record, image, drawn, kept):
    """Returns further tensors of a training example, for subclasses.

    Args:
      record: see `example`.
      image: the augmented image.
      drawn: its geometry, a geometry.Geometry.
      kept: bool [n], which objects of the record are targets.
    """
    del record, image, drawn, kept
    return {}

  def _crowd(self, record):
    if 'objects/is_crowd' in record:
      return tf.cast(record['objects/is_crowd'], tf.bool)
    return tf.zeros_like(record['objects/label'], tf.bool)

  def inputs(self, record, seed=None):
    """Returns `image`, and `size`, height and width of the original."""
    del seed  # Training needs the objects too, see `example`.
    pixels = images_lib.decode(record['image'], self.config.pp.channels)
    image = preprocess.for_evaluation(pixels, self.config.pp)
    return {'image': image, 'size': tf.shape(pixels)[:2]}

  def _for_evaluation(self, record):
    inputs = self.inputs(record)
    crowd = self._crowd(record)
    found, label = record['objects/bbox'], record['objects/label']
    area = record.get('objects/area')
    if area is None:
      pixels = tf.cast(tf.reduce_prod(inputs['size']), tf.float32)
      area = _areas(found) * pixels
    y0, x0, y1, x1 = tf.unstack(tf.reshape(found, [-1, 4]), axis=-1)
    return {
      **inputs,
      **self._targets(
        tf.boolean_mask(found, ~crowd), tf.boolean_mask(label, ~crowd)
      ),
      'truth': self._padded(tf.stack([x0, y0, x1, y1], axis=-1)),
      'label': self._padded(tf.cast(label, tf.int32) + 1) - 1,
      'area': self._padded(tf.cast(area, tf.float32)),
      'crowd': self._padded(tf.cast(crowd, tf.int32)),
    }

  def _targets(self, found, label):
    """Returns `box`, `class` and `count` of objects (ymin, xmin, ymax, xmax)."""
    y0, x0, y1, x1 = tf.unstack(tf.reshape(found, [-1, 4]), axis=-1)
    box = tf.stack([x0 + x1, y0 + y1, 2 * (x1 - x0), 2 * (y1 - y0)], -1) / 2
    most = self.options.max_objects
    return {
      'box': self._padded(box),
      'class': self._padded(tf.cast(label, tf.int32)),
      'count': tf.minimum(tf.size(label), most),
    }

  def _padded(self, x):
    """Pads or cuts the first axis to `max_objects`."""
    most = self.options.max_objects
    x = x[:most]
    missing = most - tf.shape(x)[0]
    x = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
    return tf.ensure_shape(x, [most, *x.shape[1:]])

  def batch_spec(self, size):
    """Returns shapes and types of images and objects."""
    most = self.options.max_objects

    def spec(*shape, dtype=jnp.int32):
      return jax.ShapeDtypeStruct((size, *shape), dtype)

    return {
      'image': self.image_spec(size),
      'box': spec(most, 4, dtype=jnp.float32),
      'class': spec(most),
      'count': spec(),
    }

  # --- Training ---

  def init(self, rng):
    """Returns the parameters, and the constants of a frozen backbone."""
    image = self.image_spec(1)
    variables = self.model.init(
      rng, jnp.zeros(image.shape, image.dtype), train=False
    )
    params = variables.pop('params')
    return params, {'frozen': variables.get('frozen', {})}

  def _apply(self, params, extra, images, **kwargs):
    variables = {'params': params, 'frozen': extra['frozen']}
    return self.model.apply(variables, images, **kwargs)

  def augment(self, batch, rng):
    """Adds the shares of the losses, which depend on the global batch.

    The cross-entropy is divided by the sum of the class weights of all queries,
    and the losses of boxes by the number of objects, over all devices.
    """
    del rng
    count = batch['count'].astype(jnp.float32)  # [B]
    weight = boxes_lib.class_weight(count, self.model.num_queries)
    share = jnp.ones_like(count) * len(count)
    return {
      **batch,
      'class_share': share / weight.sum(),
      'box_share': share / jnp.maximum(count.sum(), 1.0),
    }

  def _sums(self, outputs, batch):
    """Returns the losses of each image by name, [L, B]."""
    return boxes_lib.losses(
      outputs['logits'],
      outputs['boxes'],
      batch['class'],
      batch['box'],
      batch['count'],
    )

  def loss(self, params, extra, batch, rng):
    """Returns the sum over layers of the set loss, and the number of images."""
    terms = self._terms(params, extra, batch, train=True, rngs={'dropout': rng})
    rows = jnp.float32(len(batch['count']))
    total = sum(x.sum() for x in terms.values())
    return (total, rows), {k: (x[-1].sum(), rows) for k, x in terms.items()}

  def _terms(self, params, extra, batch, **kwargs):
    """Returns the weighted losses of each image by name, [L, B].

    Args:
      params: the parameters.
      extra: see `init`.
      batch: has the shares that `augment` adds.
      **kwargs: arguments of the model.
    """
    outputs = self._apply(params, extra, batch['image'], **kwargs)
    return self._weighted(self._sums(outputs, batch), batch)

  def _weighted(self, sums, batch):
    return {
      'class': boxes_lib.CLASS * sums['class'] * batch['class_share'],
      'l1': boxes_lib.L1 * sums['l1'] * batch['box_share'],
      'giou': boxes_lib.GIOU * sums['giou'] * batch['box_share'],
    }

  # --- Evaluation and prediction ---

  def outputs(self, params, extra, batch):
    """Computes `logits` [B, Q, C + 1] and `boxes` [B, Q, 4] (centre, size)."""
    found = self._apply(params, extra, batch['image'], train=False)
    return {name: x[-1] for name, x in found.items()}

  def detections(self, outputs) -> dict:
    """Returns the most probable object of each query.

    Args:
      outputs: result of `outputs`.

    Returns:
      `boxes`, float32 [B, Q, 4], corners x0, y0, x1, y1 as shares of the image;
      `labels`, int32 [B, Q]; `scores`, float32 [B, Q].
    """
    probabilities = jax.nn.softmax(outputs['logits'])[..., :-1]
    return {
      'boxes': boxes_lib.corners(outputs['boxes']),
      'labels': probabilities.argmax(axis=-1),
      'scores': probabilities.max(axis=-1),
    }

  def measure(self, params, extra, batch):
    """Returns the sum of the losses of images, and the number of images."""
    count = batch['count'].astype(jnp.float32)
    weight = boxes_lib.class_weight(count, self.model.num_queries)
    shares = {
      'class_share': 1 / weight,
      'box_share': 1 / jnp.maximum(count, 1.0),
    }
    terms = self._terms(params, extra, {**batch, **shares}, train=False)
    each = sum(x[-1] for x in terms.values())  # [B]
    return {'loss': ((each * batch['mask']).sum(), batch['mask'].sum())}

  def evaluators(self, mesh, split, open_split):
    """Returns the mean of the loss, and COCO's average precision."""
    source = open_split(split)
    return [
      means.Means(self, mesh, source),
      ap.AveragePrecision(self, mesh, source),
    ]

  def describe(self):
    """Returns the number of classes and of queries, in words."""
    return (
      f'{len(self.class_names):,} classes, {self.model.num_queries} queries'
    )

  def predictor(self, params, extra, step):
    """Returns a predictor of objects."""
    return Predictor(self, params, extra, step)

  def draw_evaluation(self, batch, outputs):
    """Draws test images: the objects, then the detections."""
    found = jax.device_get(self.detections(outputs))
    pixels = captions.to_pixels(batch['image'])
    drawn = []
    for i, image in enumerate(pixels):
      exists = batch['label'][i] >= 0
      drawn.append(
        drawing.draw(
          image,
          batch['truth'][i][exists],
          [self.class_names[k] for k in batch['label'][i][exists]],
        )
      )
      kept = found['scores'][i] >= THRESHOLD
      drawn.append(
        drawing.draw(
          image,
          found['boxes'][i][kept],
          [
            f'{self.class_names[k]} {100 * score:.0f}'
            for k, score in zip(
              found['labels'][i][kept], found['scores'][i][kept]
            )
          ],
        )
      )
    titles = 2 * ('objects', 'detected')
    return {'detections': captions.grid(np.stack(drawn), titles=titles)}


class Predictor(base.Predictor):
  """Detects the objects of images."""

  def detect(
    self, images: Sequence[Any], threshold: float = THRESHOLD
  ) -> list[list[tuple[str, float, tuple[float, float, float, float]]]]:
    """Detects objects.

    Args:
      images: see `outputs`.
      threshold: least score of an object, from 0 to 1.

    Returns:
      For each image a list of (class name, score, (x0, y0, x1, y1)), the best
      first; the box is in pixels of the original image.

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be
        read, or the threshold is not between 0 and 1.
    """
    rules.check('threshold', threshold, rules.number(0, 1))
    inputs, outputs = self.run(images)
    found = jax.device_get(self.task.detections(outputs))
    results = []
    for i, (height, width) in enumerate(inputs['size']):
      pixels = np.array([width, height, width, height])
      best = np.argsort(-found['scores'][i], kind='stable')
      results.append(
        [
          (
            self.class_names[found['labels'][i][k]],
            float(found['scores'][i][k]),
            tuple(float(x) for x in (found['boxes'][i][k].clip(0, 1) * pixels)),
          )
          for k in best
          if found['scores'][i][k] >= threshold
        ]
      )
    return results

  def predict(self, images: Sequence[Any]) -> list:
    """Returns the result of `detect`."""
    return self.detect(images)

  def report(self, images, args):
    """Writes a picture to `args.out`; returns the objects as lines."""
    lines, drawn = [], []
    for path, found in zip(images, self.detect(images)):
      lines.append(path)
      lines += [
        f'  {100 * score:6.2f} %  {name}  '
        + ' '.join(f'{value:.0f}' for value in box)
        for name, score, box in found
      ]
      if args.out is not None:
        drawn.append(drawing.draw_file(path, found))
    if drawn:
      drawing.save(drawn, args.out)
      lines.append(f'picture: {args.out}')
    return lines


def _areas(boxes):
  """Returns the areas [n] of boxes (ymin, xmin, ymax, xmax) [n, 4]."""
  size = tf.reshape(boxes, [-1, 2, 2])
  return tf.reduce_prod(size[:, 1] - size[:, 0], axis=-1)
