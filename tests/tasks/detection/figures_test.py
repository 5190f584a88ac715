"""Tests of the figures of detectors: contents and positions."""

import functools
import types

import numpy as np
import pytest

from tests.tasks.detection import attention_figures_test
from vit_jax.commands import visualize as visualize_command
from vit_jax.figures import gallery, results
from vit_jax.tasks import classify
from vit_jax.tasks.detection import detect, figures as detectors

NAMES = ('ant', 'bee')


@pytest.fixture
def seen():
  """Two images: one with two objects, and a padded one with none."""
  found = attention_figures_test.made(
    scores=[[0.1, 0.8, 0.9], [0.2, 0.1, 0.1]], filled=[(1, 1), (0.5, 0.5)]
  )
  found.boxes[0, 1:] = [(0.25, 0.5, 0.75, 1), (0, 0, 0.5, 0.5)]
  return found._replace(labels=np.array([[0, 1, 0], [1, 0, 0]]))


IMAGES = np.zeros((2, 100, 200, 3), np.float32)


def shown(fig):
  """Title and image shape of each Axes that shows an image."""
  return [
    (axes.get_title(), axes.images[0].get_array().shape[:2])
    for axes in fig.axes
    if axes.images
  ]


def test_attention_of_points(seen):
  fig = detectors.encoder_attention(IMAGES, seen, ['a.png', 'b.png'])
  # Without padding, the second image has 50 x 100 pixels, drawn as 150 x 300.
  assert shown(fig) == [
    ('a.png', (200, 400)),
    ('point 1', (200, 400)),
    ('point 2', (200, 400)),
    ('b.png', (150, 300)),
    ('point 1', (150, 300)),
  ]
  [centre] = fig.axes[2].lines  # The centre of the second best box.
  np.testing.assert_allclose(centre.get_xydata(), [(199.5, 149.5)])
  points = [(0.0, 0.0), (1.0, 0.5), (0.2, 0.2)]
  fig = detectors.encoder_attention(IMAGES[:1], seen, ['a'], np.array(points))
  assert [title for title, _ in shown(fig)] == ['a', *(f'point {i}' for i in (1, 2, 3))]  # fmt: skip


def test_attention_of_queries_has_boxes_and_names(seen):
  fig = detectors.query_attention(IMAGES, seen, ['a', 'b'], NAMES)
  titles = [title for title, _ in shown(fig)]
  assert titles == ['a', 'ant, 90 %', 'bee, 80 %', 'b', 'bee, 20 %']
  boxes = [[p.get_bbox().bounds for p in axes.patches] for axes in fig.axes]
  assert boxes[2] == [(99.5, 99.5, 200, 100)]
  assert boxes[0] == [*boxes[1], *boxes[2]]


def model(kind=detect.Task):
  task = types.SimpleNamespace(
    FIGURES=kind.FIGURES,
    check_points=functools.partial(kind.check_points, None),
    model=None,
  )
  return types.SimpleNamespace(
    task=task,
    params={},
    extra={},
    class_names=NAMES,
    workdir='',
    inputs=lambda images: {'image': IMAGES[: len(images)]},
  )


def test_wrong_points():
  with pytest.raises(ValueError, match='are for the attention of a detector'):
    results.Subject(model(classify.Task), ['a.png'], points=[(0.5, 0.5)])
  with pytest.raises(ValueError, match='point 2,0.5 lies outside'):
    results.Subject(model(), ['a.png'], points=[(2, 0.5)])
  with pytest.raises(ValueError, match='there is no data set'):
    gallery.choose(results.Subject(model(), ['a.png']), ['query_boxes'])
  subject = results.Subject(model(classify.Task), ['a'])
  with pytest.raises(ValueError, match='encoder_attention.* not among'):
    gallery.choose(subject, ['encoder_attention'])
  argv = '--workdir=/tmp/run --out=/tmp/out --points 0.5,0.5 0.3'
  with pytest.raises(ValueError, match="--points: '0.3' is not a point"):
    visualize_command.main(argv.split())
