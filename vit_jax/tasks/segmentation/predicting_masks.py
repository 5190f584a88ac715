"""Predicts the segments and the instances of any images; see `Segmenter`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from vit_jax.data.coco import segmentations
from vit_jax.figures import overlays
from vit_jax.inference import tables
from vit_jax.tasks.detection import detectors
from vit_jax.tasks.segmentation import postprocess

Instance = tuple[str, float, tuple[float, float, float, float], int]


class Segmenter(detectors.Segmenter):
  """Finds the segments of images, or the instances of things."""

  MIN_SCORE = postprocess.THRESHOLD

  def instances(
    self,
    images: Sequence[Any],
    threshold: float | None = None,
    image_size: int | tuple[int, int] | None = None,
  ) -> list[tuple[np.ndarray, list[Instance]]]:
    """Finds the instances of things, whose masks may overlap.

    For the arguments and errors see `segment`.

    Returns:
      For each image (masks, instances), the best first: masks, bool [n, height, width] of
      the original image, and for each (class name, score, (x0, y0, x1, y1), area), in
      pixels.
    """
    return self._instances.segment(images, threshold, image_size)  # type: ignore

  @functools.cached_property
  def _instances(self) -> '_Instances':
    """The predictor of instances of the same model."""
    predictor = _Instances(self.task, self.params, self.extra, self.step)
    predictor.workdir, predictor.origin = self.workdir, self.origin
    return predictor

  def parse_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
    return dict(flags)

  def _columns(
    self,
    threshold: float | None = None,
    image_size: int | tuple[int, int] | None = None,
    instances: bool = False,
  ) -> tables.Columns:
    if instances:
      return self._instances.columns(threshold=threshold, image_size=image_size)
    return super()._columns(threshold, image_size)

  def report(
    self, images: Sequence[str], *, instances: bool = False, **options: Any
  ) -> Iterable[str]:
    """Returns the segments, or the instances, as lines; see Detector.report."""
    if instances:
      return self._instances.report(images, **options)
    return super().report(images, **options)

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows segments or instances above a score."""
    from vit_jax.tasks.detection import page  # Late: imports Gradio.

    return page.segmentation_page(self, self._instances)


class _Instances(detectors.Segmenter):
  """Finds the instances of things."""

  NOUN = 'instance'
  MIN_SCORE = postprocess.THRESHOLD
  TYPES = {  # noqa: RUF012
    'classes': [str],
    'scores': [float],
    'boxes': [(float, 4)],
    'areas': [int],
    'masks': [str],
    'size': (int, 2),
  }

  def postprocess(
    self, inputs: Mapping[str, np.ndarray], outputs: Any, threshold: float
  ) -> tuple[np.ndarray, list]:
    """Returns masks and instances of one image, see Segmenter.instances."""
    batch = jax.tree.map(lambda x: x[None], (outputs, inputs))
    masks = jax.device_get(self.task.masks(*batch))
    size = tuple(inputs['size'].tolist())
    regions, labels, scores = self.task.instances(masks, 0, size, threshold)
    predictions = []
    for mask, label, score in zip(regions, labels, scores):
      box = segmentations.box(mask)
      area = int(mask.sum())
      predictions.append((self.class_names[label], float(score), box, area))
    return regions, predictions

  def _masks(self, regions: np.ndarray, count: int) -> Iterator[np.ndarray]:
    yield from regions

  def _describe(self, *details: Any) -> str:
    box, area = details
    edges = ' '.join(f'{value:.0f}' for value in box)
    return f'{edges}  {area:,} pixels'

  def draw(
    self, image: np.ndarray, regions: np.ndarray, instances: Sequence[tuple]
  ) -> np.ndarray:
    """Colours the instances of an image, uint8 [H, W, 3], the best on top."""
    numbers = np.zeros(image.shape[:2], int)
    for i in reversed(range(len(regions))):
      numbers[regions[i]] = i + 1
    names = [f'{name} {100 * score:.0f}' for name, score, *_ in instances]
    return overlays.overlay(image, numbers, names)
