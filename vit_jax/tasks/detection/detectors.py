"""Predictors of detectors: the objects and the segments of any images."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import numpy as np

from vit_jax import preprocess
from vit_jax.configs import rules
from vit_jax.data.images import images as images_lib
from vit_jax.inference import predictor as predictor_lib
from vit_jax.inference import tables
from vit_jax.tasks.detection import drawing
from vit_jax.tasks.detection import segments as segments_lib

THRESHOLD = 0.7  # Least score of an object that is shown.


class Detector(predictor_lib.Predictor):
  """Detects the objects of images."""

  FLAGS = ('threshold', 'image_size')
  PIXELS = 2**22  # At most in a batch of several images.

  def batch_size(self, part):
    """Returns the number of images of a batch of a part."""
    pixels = math.prod(part.image_size or self.task.image_size)
    return max(1, min(self.BATCH, self.PIXELS // pixels))

  def detect(
    self,
    images: Sequence[Any],
    threshold: float = THRESHOLD,
    image_size: int | tuple[int, int] | None = None,
  ) -> list[list[tuple[str, float, tuple[float, float, float, float]]]]:
    """Detects objects.

    Args:
      images: see `outputs`; they may have different sizes.
      threshold: least score of an object, from 0 to 1.
      image_size: size in pixels of the images that the network sees. A number
        is the length of the shorter side; images keep their height / width,
        and the model is compiled for each of the canvases on which they lie,
        see `tight` in vit_jax/tasks/detection/detect.py. (height, width) is the size to
        which all images are resized. None: as in the evaluation of the run.

    Returns:
      For each image a list of (class name, score, (x0, y0, x1, y1)), the best
      first; the box is in pixels of the original image.

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be
        read, the threshold is not between 0 and 1, or `image_size` is neither
        a positive int nor a pair of them.
    """
    rules.check('threshold', threshold, rules.number(0, 1))
    rules.check('image_size', image_size, rules.optional(rules.size))
    parts = functools.partial(self.task.parts_at, image_size=image_size)
    found = {
      number: self._objects(outputs, inputs['size'], threshold)
      for number, inputs, outputs in self.stream(
        images, keep=('size',), parts=parts
      )
    }
    return [found[number] for number in range(len(images))]

  def _objects(self, outputs, size, threshold):
    """Returns the objects of one image, see `detect`."""
    outputs = jax.tree.map(lambda x: x[None], outputs)
    found = jax.device_get(self._detections(outputs))
    boxes, labels, scores = (
      found[name][0] for name in ('boxes', 'labels', 'scores')
    )
    height, width = size
    boxes = boxes.clip(0, 1) * np.array([width, height, width, height])
    best = np.argsort(-scores, kind='stable')
    return [
      (self.class_names[labels[k]], float(scores[k]), tuple(boxes[k].tolist()))
      for k in best[scores[best] >= threshold]
    ]

  @functools.cached_property
  def _detections(self):
    return jax.jit(self.task.detections)

  def _columns(self, top, threshold, image_size):
    """Returns columns of the objects: classes, scores, and boxes in pixels."""
    del top
    threshold = THRESHOLD if threshold is None else threshold
    rules.check('threshold', threshold, rules.number(0, 1))
    rules.check('image_size', image_size, rules.optional(rules.size))

    def row(inputs, outputs):
      found = self._objects(outputs, inputs['size'], threshold)
      columns = zip(*found) if found else ((), (), ())
      return dict(zip(('classes', 'scores', 'boxes'), columns))

    return tables.Columns(
      {'classes': [str], 'scores': [float], 'boxes': [(float, 4)]},
      row,
      keep=('size',),
      parts=functools.partial(self.task.parts_at, image_size=image_size),
    )

  def predict(self, images: Sequence[Any]) -> list:
    """Returns the result of `detect`."""
    return self.detect(images)

  def report(self, images, args):
    """Returns the objects as lines; draws them if `args.out` is a path."""
    threshold = THRESHOLD if args.threshold is None else args.threshold
    lines, drawn = [], []
    results = self.detect(images, threshold, args.image_size)
    for path, found in zip(images, results):
      lines.append(path)
      lines += [
        f'  {100 * score:6.2f} %  {name}  '
        + ' '.join(f'{value:.0f}' for value in box)
        for name, score, box in found
      ] or [
        f'  no object with a score of at least {100 * threshold:g} % '
        '(lower it: --threshold)'
      ]
      if args.out is not None:
        drawn.append(drawing.draw_file(path, found))
    if drawn:
      drawing.save(drawn, args.out)
      lines.append(f'picture: {args.out}')
    return lines


class Segmenter(Detector):
  """Finds the segments of images."""

  BATCH = 8  # Masks of all queries of many images take much memory.

  def segment(
    self,
    images: Sequence[Any],
    threshold: float = segments_lib.THRESHOLD,
    image_size: int | tuple[int, int] | None = None,
  ) -> list[tuple[np.ndarray, list[tuple[str, float, bool, int]]]]:
    """Finds the segments of images.

    Args:
      images: see `outputs`.
      threshold: least score of a segment, from 0 to 1.
      image_size: see `detect`.

    Returns:
      For each image (map, segments). The map, int32 [height, width] of the
      original image, has the number of the segment of each pixel, from 1, and 0
      for pixels of none. The segments, from number 1 on, are (class name, score,
      whether it is a thing, area in pixels).

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be
        read, the threshold is not between 0 and 1, `image_size` is no size,
        or the model has no mask head.
    """
    rules.check('threshold', threshold, rules.number(0, 1))
    if not self.task.model.mask_head:
      raise ValueError(
        f"the model of '{self.workdir}' has no mask head: train one with "
        '--config.model.mask_head=True --config.pretrained='
        f'{self.workdir or "WORKDIR"}, or use `detect`'
      )
    rules.check('image_size', image_size, rules.optional(rules.size))
    parts = functools.partial(self.task.parts_at, image_size=image_size)
    found = {
      number: self._segments(*both, threshold)
      for number, *both in self.stream(
        images, keep=self.task.input_spec(), parts=parts
      )
    }
    return [found[number] for number in range(len(images))]

  def _segments(self, inputs, outputs, threshold):
    """Returns the map and the segments of one image, see `segment`."""
    both = jax.tree.map(lambda x: x[None], (outputs, inputs))
    found = jax.device_get(self.task.masks(*both))
    size = tuple(inputs['size'].tolist())
    made = self.task.assemble(found, 0, size, threshold=threshold)
    return made.numbers, self._described(made)

  def _columns(self, top, threshold, image_size):
    """Returns columns of the segments, as in `segment` but for the maps."""
    if not self.task.model.mask_head:
      return super()._columns(top, threshold, image_size)
    if threshold is None:
      threshold = segments_lib.THRESHOLD
    names = ('classes', 'scores', 'things', 'areas')

    def row(inputs, outputs):
      _, found = self._segments(inputs, outputs, threshold)
      return dict(zip(names, zip(*found) if found else ((),) * len(names)))

    return (
      super()
      ._columns(top, threshold, image_size)
      ._replace(
        types=dict(zip(names, ([str], [float], [bool], [int]))),
        row=row,
        keep=tuple(self.task.input_spec()),
      )
    )

  def _described(self, made):
    areas = np.bincount(made.numbers.ravel(), minlength=len(made.labels) + 1)
    return [
      (
        self.class_names[label],
        float(score),
        self.task.is_thing[label],
        int(area),
      )
      for label, score, area in zip(made.labels, made.scores, areas[1:])
    ]

  def predict(self, images):
    """Returns the result of `segment`, or of `detect` without a mask head."""
    has_masks = self.task.model.mask_head
    return self.segment(images) if has_masks else self.detect(images)

  def report(self, images, args):
    """Writes a picture to `args.out`; returns the segments as lines."""
    if not self.task.model.mask_head:
      return super().report(images, args)
    threshold = args.threshold
    threshold = segments_lib.THRESHOLD if threshold is None else threshold
    results = self.segment(images, threshold, args.image_size)
    lines, drawn = [], []
    for path, (numbers, found) in zip(images, results):
      lines.append(path)
      lines += [
        f'  {100 * score:6.2f} %  {name}  {"thing" if is_thing else "stuff"}  '
        f'{area:,} pixels'
        for name, score, is_thing, area in found
      ] or [
        f'  no segment with a score of at least {100 * threshold:g} % '
        '(lower it: --threshold)'
      ]
      if args.out is not None:
        image = preprocess.from_user(path, images_lib.decode).numpy()
        names = [name for name, *_ in found]
        drawn.append(drawing.overlay(image, numbers, names))
    if drawn:
      drawing.save(drawn, args.out)
      lines.append(f'picture: {args.out}')
    return lines
