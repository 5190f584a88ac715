"""Tests of boxes: valid ones are normalised, others reported, skipped or clipped."""

import math

import numpy as np
import pytest

from tests.data.coco import drawn
from vit_jax.data.coco import annotation_files, box_checks

# Images are 60 x 40 pixels. A box, and its clipped version (ymin, xmin, ymax, xmax in
# pixels).
WRONG = [
  ((50, 10, 20, 10), (10, 50, 20, 60)),
  ((-5, -4, 20, 10), (0, 0, 6, 15)),
  ((0, 0, 600, 400), (0, 0, 40, 60)),
  ((10, 10, 0, 10), None),
]
FINE = (6, 4, 30, 20)


def found(tmp_path, *rows):
  things = [drawn.thing(50 + i, 0, box) for i, box in enumerate(rows)]
  path = drawn.write(tmp_path / 'a.json', drawn.content(2, things))
  return annotation_files.read(path)


def test_valid_boxes_are_normalised(tmp_path):
  kept, shares = box_checks.check(found(tmp_path, FINE, (0, 0, 60, 40)))
  np.testing.assert_allclose(shares, [[0.1, 0.1, 0.6, 0.6], [0, 0, 1, 1]])
  assert shares.dtype == np.float32
  assert kept.ids.tolist() == [50, 51]


def test_rounding_errors_are_accepted(tmp_path):
  rows = (-0.5, 0, 61, 40.7), (59, 39, 1.01, 1.01)
  _, shares = box_checks.check(found(tmp_path, *rows))
  np.testing.assert_allclose(
    shares, [[0, 0, 1, 1], [39 / 40, 59 / 60, 1, 1]], rtol=1e-6
  )


@pytest.mark.parametrize(('box', 'left'), WRONG)
def test_wrong_box_is_reported_skipped_or_clipped(tmp_path, capsys, box, left):
  things = found(tmp_path, FINE, box)
  with pytest.raises(
    ValueError, match='(?s)1 of 2 .*--config.broken_boxes=skip'
  ) as error:
    box_checks.check(things)
  for part in ('a.json', "annotation 51 of image '0.jpg'", str(list(box)), '60 x 40'):
    assert part in str(error.value)
  kept, shares = box_checks.check(things, 'skip')
  assert kept.ids.tolist() == [50]
  assert kept.counts.tolist() == [1, 0]
  assert '1 of 2 left out, 0 clipped' in capsys.readouterr().out
  kept, shares = box_checks.check(things, 'clip')
  assert kept.ids.tolist() == ([50] if left is None else [50, 51])
  if left is not None:
    np.testing.assert_allclose(shares[1] * [40, 60, 40, 60], left, rtol=1e-6)
  assert len(shares) == len(kept.ids)
  message = '1 of 2 left out, 0' if left is None else '0 of 2 left out, 1'
  assert message in capsys.readouterr().out


NO_BOXES = None, (), (1, 2, 3), (1, 2, math.nan, 4), (1, 2, 3, math.inf), (*FINE, 0.5)


@pytest.mark.parametrize('box', NO_BOXES)
def test_objects_without_a_box_are_reported_or_left_out(tmp_path, capsys, box):
  without = drawn.thing(51, 1, () if box is None else box, area=math.nan)
  if box is None:
    del without['bbox']  # As in annotations of keypoints.
  classes = [{'id': 3, 'name': '"NaN", \\NaN'}]
  content = drawn.content(2, [drawn.thing(50, 0, FINE), without], classes)
  annotations = annotation_files.read(drawn.write(tmp_path / 'a.json', content))
  assert annotations.classes == ('"NaN", \\NaN',)
  with pytest.raises(ValueError, match="1 of 2 .*\n.* 51 of image '1.png': .*no bbox"):
    box_checks.check(annotations)
  for broken in ('skip', 'clip'):
    usable, shares = box_checks.check(annotations, broken)
    assert usable.ids.tolist() == [50]
    assert np.isfinite(shares).all()
    assert np.isfinite(usable.area).all()
    assert f'1 of 2 left out, 0 clipped (broken_boxes={broken})' in (
      capsys.readouterr().out
    )


def test_normalised_boxes_are_recognised(tmp_path):
  with pytest.raises(ValueError, match='a.json.*shares of the image'):
    box_checks.check(found(tmp_path, (0.1, 0.2, 0.5, 0.5)))
