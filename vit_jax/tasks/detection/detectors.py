"""Predictors of detectors: the objects and the segments of any images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import math
from typing import Any

from etils import epath
import jax
import numpy as np

from vit_jax import input_pipeline, preprocess
from vit_jax.configs import schema
from vit_jax.data.coco import segmentations
from vit_jax.data.images import images as images_lib
from vit_jax.figures import overlays
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.tasks.detection import (
  boxes as boxes_lib,
  segments as segments_lib,
)

THRESHOLD = 0.7  # Minimum score of an object that is shown.


class Detector(predictor_lib.Predictor):
  """Detects the objects of images."""

  PIXELS = 2**22  # Largest number of pixels in a batch of several images.
  NOUN = 'object'
  MIN_SCORE = THRESHOLD
  TYPES = {'classes': [str], 'scores': [float], 'boxes': [(float, 4)]}  # noqa: RUF012

  def _inputs_to_keep(self) -> tuple[str, ...]:
    """Returns the inputs that `postprocess` reads."""
    return ('size',)

  def batch_size(self, part: input_pipeline.Part) -> int:
    """Returns as many images as fit in PIXELS, at most BATCH."""
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
    boxes = functools.partial(Detector.postprocess, self)
    results = self._predict_all(images, threshold, image_size, boxes)
    return [objects for _, objects in results]

  def segment(
    self,
    images: Sequence[Any],
    threshold: float = segments_lib.THRESHOLD,
    image_size: int | tuple[int, int] | None = None,
  ) -> Any:
    """Raises ValueError: the model of a Segmenter has a mask head."""
    raise ValueError(
      f"the model of '{self.origin}' has no mask head: train one with "
      '--config.model.mask_head=True --config.pretrained='
      f'{self.origin or "WORKDIR"}, or use `detect`'
    )

  def _predict_all(
    self,
    images: Sequence[Any],
    threshold: float | None,
    image_size: int | tuple[int, int] | None,
    postprocess: Callable[..., Any],
  ) -> list:
    """Returns the result of `postprocess` for each image."""
    columns = self._columns(threshold=threshold, image_size=image_size)
    threshold = self.MIN_SCORE if threshold is None else threshold
    results = {}
    for number, inputs, outputs in self.stream(
      images, keep=columns.keep, parts=columns.parts
    ):
      results[number] = postprocess(inputs, outputs, threshold)
    return [results[number] for number in range(len(images))]

  def postprocess(
    self, inputs: Mapping[str, np.ndarray], outputs: Any, threshold: float
  ) -> tuple[Any, list]:
    """Returns None and the objects of one image, see `detect`."""
    detections = self._detections(_batch_of_one(outputs))
    detections = jax.tree.map(lambda x: np.asarray(x)[0], detections)
    return None, self.objects(inputs, detections, threshold)

  def objects(
    self,
    inputs: Mapping[str, np.ndarray],
    detections: Mapping[str, np.ndarray],
    threshold: float,
  ) -> list[tuple]:
    """Lists the objects of one image among its `boxes`, `labels`, `scores` [Q]."""
    labels, scores = detections['labels'], detections['scores']
    boxes = boxes_lib.to_pixels(detections['boxes'].clip(0, 1), inputs['size'])
    objects = []
    for k in np.argsort(-scores, kind='stable'):
      if scores[k] >= threshold:
        name = self.class_names[labels[k]]
        objects.append((name, float(scores[k]), tuple(boxes[k].tolist())))
    return objects

  @functools.cached_property
  def _detections(self) -> Callable[..., dict[str, jax.Array]]:
    return jax.jit(self.task.detections)

  def _columns(
    self,
    threshold: float | None = None,
    image_size: int | tuple[int, int] | None = None,
  ) -> tables.Columns:
    threshold = self.MIN_SCORE if threshold is None else threshold
    schema.check('threshold', threshold, schema.Probability, '--')
    schema.check('image_size', image_size, schema.Size | None, '--')

    def row(inputs: Mapping[str, np.ndarray], outputs: Any) -> dict[str, Any]:
      return self._row(*self.postprocess(inputs, outputs, threshold))

    parts = functools.partial(self.task.parts_at, image_size=image_size)
    return tables.Columns(self.TYPES, row, keep=self._inputs_to_keep(), parts=parts)

  def _row(self, regions: Any, predictions: Sequence[tuple]) -> dict[str, Any]:
    """Returns the row of a table for the result of `postprocess`."""
    columns = zip(*predictions) if predictions else [()] * len(self.TYPES)
    return dict(zip(self.TYPES, columns))

  def predict(self, images: Sequence[Any], **options: Any) -> list[Any]:
    """Returns the objects of each image, see `detect`."""
    self._refuse(options)
    return self.detect(images)

  def report(
    self,
    images: Sequence[str],
    *,
    out: epath.PathLike | None = None,
    threshold: float | None = None,
    image_size: int | tuple[int, int] | None = None,
  ) -> Iterable[str]:
    """Returns the predictions as lines; draws them if `out` is a path."""
    threshold = self.MIN_SCORE if threshold is None else threshold
    results = self._predict_all(images, threshold, image_size, self.postprocess)
    lines, pictures = [], []
    for path, (regions, predictions) in zip(images, results):
      lines.append(path)
      for name, score, *details in predictions:
        lines.append(f'  {100 * score:6.2f} %  {name}  {self._describe(*details)}')
      if not predictions:
        lines.append(
          f'  no {self.NOUN} with a score of at least {100 * threshold:g} % (lower it: '
          '--threshold)'
        )
      if out is not None:
        image = preprocess.from_user(path, images_lib.decode).numpy()
        pictures.append(self.draw(image, regions, predictions))
    if pictures:
      overlays.save(pictures, out)
      lines.append(f'picture: {out}')
    return lines

  def _describe(self, *details: Any) -> str:
    """Describes an object, in addition to its name and score."""
    [box] = details
    return ' '.join(f'{value:.0f}' for value in box)

  def draw(
    self, image: np.ndarray, regions: Any, objects: Sequence[tuple]
  ) -> np.ndarray:
    """Draws what `postprocess` returns on an image, uint8 [H, W, 3]."""
    names = [f'{name} {100 * score:.0f}' for name, score, _ in objects]
    return overlays.draw(image, [box for *_, box in objects], names)

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows boxes above a score, and the attention of a box that is clicked."""
    from vit_jax.tasks.detection import page  # Late: imports Gradio.

    return page.detection_page(self)


class Segmenter(Detector):
  """Finds the segments of images."""

  BATCH = 8  # Masks of all queries of many images take much memory.
  NOUN = 'segment'
  MIN_SCORE = segments_lib.THRESHOLD
  TYPES = {  # noqa: RUF012
    'classes': [str],
    'scores': [float],
    'things': [bool],
    'areas': [int],
    'boxes': [(float, 4)],
    'masks': [str],
    'size': (int, 2),
  }

  def _inputs_to_keep(self) -> tuple[str, ...]:
    """Returns all inputs, since the masks cover the whole canvas."""
    return tuple(self.task.input_spec())

  def segment(
    self,
    images: Sequence[Any],
    threshold: float | None = None,
    image_size: int | tuple[int, int] | None = None,
  ) -> list[tuple[np.ndarray, list[tuple[str, float, bool, int]]]]:
    """Finds the segments of images.

    Args:
      images, image_size: see `detect`, also for errors.
      threshold: minimum score of a segment, from 0 to 1; None: the model's MIN_SCORE.

    Returns:
      For each image (map, segments). The map, int32 [height, width] of the
      original image, has the number of the segment of each pixel, from 1, and 0
      for pixels of none. The segments 1, 2, ... are (class name, score, whether it
      is a thing, area in pixels).
    """
    return self._predict_all(images, threshold, image_size, self.postprocess)

  def postprocess(
    self, inputs: Mapping[str, np.ndarray], outputs: Any, threshold: float
  ) -> tuple[np.ndarray, list]:
    """Returns the map and the segments of one image, see `segment`."""
    masks = self.task.masks(_batch_of_one(outputs), _batch_of_one(inputs))
    size = tuple(inputs['size'].tolist())
    segments = self.task.assemble(jax.device_get(masks), 0, size, threshold=threshold)
    num_segments = len(segments.labels)
    areas = np.bincount(segments.numbers.ravel(), minlength=num_segments + 1)[1:]
    predictions = []
    for label, score, area in zip(segments.labels, segments.scores, areas):
      is_thing = self.task.is_thing[label]
      predictions.append((self.class_names[label], float(score), is_thing, int(area)))
    return segments.numbers, predictions

  def predict(self, images: Sequence[Any], **options: Any) -> list[Any]:
    """Returns the segments of each image, see `segment`."""
    self._refuse(options)
    return self.segment(images)

  def parse_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of flags; ValueError for --instances."""
    if 'instances' in flags:
      raise ValueError(
        f"instances are for a model of kind='eomt', whose masks overlap; the things of "
        f"'{self.origin}' are among its segments: leave out --instances"
      )
    return dict(flags)

  def _row(self, regions: Any, predictions: Sequence[tuple]) -> dict[str, Any]:
    """Returns the row of a table; masks are COCO's compressed run lengths."""
    boxes, masks = [], []
    for mask in self._masks(regions, len(predictions)):
      boxes.append(segmentations.box(mask))
      masks.append(segmentations.encode(mask))
    row = super()._row(regions, predictions)
    return {**row, 'boxes': boxes, 'masks': masks, 'size': regions.shape[-2:]}

  def _masks(self, numbers: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yields the mask, bool [H, W], of each prediction of `postprocess`."""
    for number in range(1, count + 1):
      yield numbers == number

  def _describe(self, *details: Any) -> str:
    is_thing, area = details
    return f'{"thing" if is_thing else "stuff"}  {area:,} pixels'

  def draw(
    self, image: np.ndarray, numbers: np.ndarray, segments: Sequence[tuple]
  ) -> np.ndarray:
    """Draws what `postprocess` returns for this size of an image, uint8 [H, W, 3]."""
    return overlays.overlay(image, numbers, [name for name, *_ in segments])

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows segments above a score."""
    from vit_jax.tasks.detection import page

    return page.segmentation_page(self)


def _batch_of_one(tree: Any) -> Any:
  """Returns arrays [1, ...]."""
  return jax.tree.map(lambda x: x[None], tree)
