"""Predictors of detectors: the objects and the segments of any images."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import numpy as np

from vit_jax import preprocess
from vit_jax.configs import schema
from vit_jax.data.images import images as images_lib
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.tasks.detection import (
  boxes as boxes_lib,
  overlays,
  segments as segments_lib,
)

THRESHOLD = 0.7  # Minimum score of an object that is shown.


class Detector(predictor_lib.Predictor):
  """Detects the objects of images."""

  FLAGS = ('threshold', 'image_size')
  PIXELS = 2**22  # At most in a batch of several images.
  WHAT = 'object'
  LEAST = THRESHOLD
  KEEP = ('size',)
  TYPES = {'classes': [str], 'scores': [float], 'boxes': [(float, 4)]}  # noqa: RUF012

  def batch_size(self, part):
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
      images: see `outputs`, also for errors; they may have different sizes.
      threshold: minimum score of an object, from 0 to 1.
      image_size: size in pixels of the model's input. A number is the length of
        the shorter side; images keep their aspect ratio, and the model is
        compiled for each of the canvases on which they lie, see `tight` in
        vit_jax/tasks/detection/detect.py. (height, width) is the size to which
        all images are resized. None: as in the evaluation of the run.

    Returns:
      For each image a list of (class name, score, (x0, y0, x1, y1)), most
      confident first; the box is in pixels of the original image.
    """
    make = functools.partial(Detector.make, self)
    return [x for _, x in self._find(images, threshold, image_size, make)]

  def segment(self, images, threshold=None, image_size=None):
    """Raises ValueError: the model of a Segmenter has a mask head."""
    raise ValueError(
      f"the model of '{self.origin}' has no mask head: train one with "
      '--config.model.mask_head=True --config.pretrained='
      f'{self.origin or "WORKDIR"}, or use `detect`'
    )

  def _find(self, images, threshold, image_size, make) -> list:
    """Returns the result of `make`, such as Detector.make, for each image."""
    how = self._columns(threshold=threshold, image_size=image_size)
    threshold = self.LEAST if threshold is None else threshold
    found = {
      number: make(inputs, outputs, threshold)
      for number, inputs, outputs in self.stream(images, keep=how.keep, parts=how.parts)
    }
    return [found[number] for number in range(len(images))]

  def make(self, inputs, outputs, threshold):
    """Returns None and the objects of one image, see `detect`."""
    found = self._detections(jax.tree.map(lambda x: x[None], outputs))
    found = jax.tree.map(lambda x: np.asarray(x)[0], found)
    return None, self.objects(inputs, found, threshold)

  def objects(self, inputs, found, threshold):
    """Lists the objects of one image among its `boxes`, `labels`, `scores` [Q]."""
    boxes, labels, scores = (found[k] for k in ('boxes', 'labels', 'scores'))
    boxes = boxes_lib.to_pixels(boxes.clip(0, 1), inputs['size'])
    best = np.argsort(-scores, kind='stable')
    return [
      (self.class_names[labels[k]], float(scores[k]), tuple(boxes[k].tolist()))
      for k in best[scores[best] >= threshold]
    ]

  @functools.cached_property
  def _detections(self):
    return jax.jit(self.task.detections)

  def _columns(self, top=5, threshold=None, image_size=None):
    threshold = self.LEAST if threshold is None else threshold
    schema.check('threshold', threshold, schema.Probability, '--')
    schema.check('image_size', image_size, schema.Size | None, '--')

    def row(inputs, outputs):
      _, found = self.make(inputs, outputs, threshold)
      return dict(zip(self.TYPES, zip(*found) if found else ((),) * 4))

    parts = functools.partial(self.task.parts_at, image_size=image_size)
    return tables.Columns(self.TYPES, row, keep=self.KEEP, parts=parts)

  def predict(self, images: Sequence[Any], **others) -> list:
    self._refuse(others)
    return self.detect(images)

  def report(self, images, args):
    """Returns the predictions as lines; draws them if `args.out` is a path."""
    threshold = self.LEAST if args.threshold is None else args.threshold
    results = self._find(images, threshold, args.image_size, self.make)
    lines, drawn = [], []
    for path, (numbers, found) in zip(images, results):
      lines.append(path)
      lines += [
        f'  {100 * score:6.2f} %  {name}  {self._rest(*rest)}'
        for name, score, *rest in found
      ] or [
        f'  no {self.WHAT} with a score of at least {100 * threshold:g} % '
        '(lower it: --threshold)'
      ]
      if args.out is not None:
        image = preprocess.from_user(path, images_lib.decode).numpy()
        drawn.append(self.draw(image, numbers, found))
    if drawn:
      overlays.save(drawn, args.out)
      lines.append(f'picture: {args.out}')
    return lines

  def _rest(self, box) -> str:
    return ' '.join(f'{value:.0f}' for value in box)

  def draw(self, image, _, found):
    """Draws what `make` returns on an image, uint8 [H, W, 3]."""
    names = [f'{name} {100 * score:.0f}' for name, score, _ in found]
    return overlays.draw(image, [box for *_, box in found], names)

  def page(self):
    """Shows boxes above a score, and the attention of a box that is clicked."""
    from vit_jax.tasks.detection import page  # Late: imports Gradio.

    return page.of_objects(self)


class Segmenter(Detector):
  """Finds the segments of images."""

  BATCH = 8  # Masks of all queries of many images take much memory.
  WHAT = 'segment'
  LEAST = segments_lib.THRESHOLD
  TYPES = {  # noqa: RUF012
    'classes': [str], 'scores': [float], 'things': [bool], 'areas': [int],
  }  # fmt: skip

  @property
  def KEEP(self):
    """All inputs: the masks cover the whole canvas."""
    return tuple(self.task.input_spec())

  def segment(
    self,
    images: Sequence[Any],
    threshold: float = segments_lib.THRESHOLD,
    image_size: int | tuple[int, int] | None = None,
  ) -> list[tuple[np.ndarray, list[tuple[str, float, bool, int]]]]:
    """Finds the segments of images.

    Args:
      images, image_size: see `detect`, also for errors.
      threshold: minimum score of a segment, from 0 to 1.

    Returns:
      For each image (map, segments). The map, int32 [height, width] of the
      original image, has the number of the segment of each pixel, from 1, and 0
      for pixels of none. The segments 1, 2, ... are (class name, score, whether it
      is a thing, area in pixels).
    """
    return self._find(images, threshold, image_size, self.make)

  def make(self, inputs, outputs, threshold):
    """Returns the map and the segments of one image, see `segment`."""
    both = jax.tree.map(lambda x: x[None], (outputs, inputs))
    found = jax.device_get(self.task.masks(*both))
    size = tuple(inputs['size'].tolist())
    made = self.task.assemble(found, 0, size, threshold=threshold)
    areas = np.bincount(made.numbers.ravel(), minlength=len(made.labels) + 1)
    return made.numbers, [
      (self.class_names[k], float(score), self.task.is_thing[k], int(area))
      for k, score, area in zip(made.labels, made.scores, areas[1:])
    ]

  def predict(self, images, **others):
    self._refuse(others)
    return self.segment(images)

  def _rest(self, is_thing, area) -> str:
    return f'{"thing" if is_thing else "stuff"}  {area:,} pixels'

  def draw(self, image, numbers, found):
    """Draws what `make` returns for this size of an image, uint8 [H, W, 3]."""
    return overlays.overlay(image, numbers, [name for name, *_ in found])

  def page(self):
    """Shows segments above a score."""
    from vit_jax.tasks.detection import page

    return page.of_segments(self)
