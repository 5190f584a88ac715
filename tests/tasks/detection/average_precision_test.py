"""Tests of COCO's average precision against pycocotools."""

import numpy as np
from pycocotools import coco, cocoeval
import pytest

from vit_jax.tasks.detection import (
  average_precision as ap,
  mask_average_precision as mask_ap,
)

CLASSES = 3


def make_image(rng, objects, detections):
  """Returns the objects of an image, some of them crowds, and its detections."""

  def boxes(count):
    corner, size = (rng.uniform(0, 300, (count, 2)), rng.uniform(5, 200, (count, 2)))
    return np.concatenate([corner, corner + size], axis=1)

  true = boxes(objects)
  near = true[: detections // 2] + rng.normal(0, 4, true[: detections // 2].shape)
  found = np.concatenate([near, boxes(detections - len(near))])
  labels = rng.randint(0, CLASSES, objects)
  return {
    'boxes': true,
    'labels': labels,
    'areas': np.prod(true[:, 2:] - true[:, :2], axis=1) * 0.7,
    'crowd': rng.randint(0, 8, objects) == 0,
  }, {
    'boxes': found,
    'labels': np.concatenate(
      [labels[: len(near)], rng.randint(0, CLASSES, detections - len(near))]
    ),
    'scores': rng.uniform(size=detections),
  }


def by_pycocotools(truth, found):
  """Computes the metrics with the original library."""

  def rows(images):
    for image, row in enumerate(images):
      for i, (box, label) in enumerate(zip(row['boxes'], row['labels'])):
        bbox = [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()]
        yield i, row, {'image_id': image, 'category_id': int(label), 'bbox': bbox}

  reference = coco.COCO()
  reference.dataset = {
    'info': {},
    'images': [{'id': i} for i in range(len(truth))],
    'categories': [{'id': i} for i in range(CLASSES)],
    'annotations': [
      {
        **line, 'id': number, 'area': float(row['areas'][i]),
        'iscrowd': int(row['crowd'][i]),
      }
      for number, (i, row, line) in enumerate(rows(truth), start=1)
    ],
  }  # fmt: skip
  reference.createIndex()
  results = reference.loadRes(
    [{**line, 'score': float(row['scores'][i])} for i, row, line in rows(found)]
  )
  evaluation = cocoeval.COCOeval(reference, results, 'bbox')
  evaluation.evaluate()
  evaluation.accumulate()
  evaluation.summarize()
  return evaluation.stats[: len(ap.NAMES)]


def test_metrics_match_pycocotools():
  rng = np.random.RandomState(0)
  # Images without objects, without detections, and with more than are evaluated.
  counts = [(0, 5), (4, 0), (3, 120), *rng.randint(1, 12, (40, 2))]
  truth, found = zip(*(make_image(rng, *count) for count in counts))
  got = ap.average_precision(truth, found, CLASSES)
  want = by_pycocotools(truth, found)
  assert 0.05 < want[0] < 0.95
  np.testing.assert_allclose([got[name] for name in ap.NAMES], want, rtol=1e-12)


def test_no_detections_and_no_objects():
  truth, found = make_image(np.random.RandomState(0), 3, 0)
  got = ap.average_precision([truth], [found], CLASSES)
  assert got['AP'] == got['AP50'] == 0
  truth, found = make_image(np.random.RandomState(0), 0, 3)
  got = ap.average_precision([truth], [found], CLASSES)
  assert got == {name: pytest.approx(np.nan, nan_ok=True) for name in ap.NAMES}


def test_masks_at_half_the_size_keep_the_areas_of_the_original():
  row = {
    'image_id': np.array([7, 1]),
    'size': np.array([4, 4]),
    'truth_size': np.array([2, 2]),
    'truth_segments': np.array([[1, 2, 0], [3, 0, 0], [0, 0, 0]]),  # Padded.
    'label': np.array([0, 1, 2, 0, -1]),  # The fourth has no pixel left.
    'area': np.array([4.0, 5.0, 3.0, 1.0, 0.0]),
    'crowd': np.array([0, 1, 0, 0, 0]),
  }
  masks = np.array([[[1, 1], [0, 0]], [[0, 0], [0, 0]]], bool)
  candidates = [(masks[0], 0, 0.5), (masks[1], 1, 0.4)]
  # Class 2 is stuff. Of the crowd, half of the candidate is inside.
  assert mask_ap.compare(row, (True, True, False), candidates) == {
    'image_id': 2**32 + 7,
    'truth': {'labels': [0, 1], 'areas': [4.0, 5.0], 'crowd': [False, True]},
    'detections': {'labels': [0], 'scores': [0.5], 'areas': [8.0]},
    'overlaps': [[0.5, 0.5]],
  }
