"""Tests of drawings of model internals: labels and pixel values."""

import numpy as np
import pytest

from vit_jax.figures import drawing


def texts(ticks):
  return [tick.get_text() for tick in ticks]


def test_overlay_of_a_map_on_an_image():
  grey = np.full((40, 60, 3), 0.5, np.float32)
  flat = drawing.overlay(grey, np.full((2, 3), 0.1))
  assert flat.shape == (40, 60, 3)
  assert np.ptp(flat, axis=(0, 1)).max() < 1e-6
  peak = drawing.overlay(grey, np.array([[0, 0, 0], [0, 0, 1]]))
  np.testing.assert_allclose(peak[-1, -1], flat[0, 0], atol=1e-6)
  assert peak[0, 0].sum() < peak[-1, -1].sum()  # Viridis: dark to bright.
  assert np.isfinite(drawing.overlay(grey, np.zeros((2, 3)))).all()


def test_filters():
  components = np.random.RandomState(0).randn(28, 4, 4, 3)
  fig = drawing.filters(components, np.full(28, 0.03))
  assert '28 principal components' in fig.get_suptitle()
  assert '84 %' in fig.get_suptitle()
  # All filters share one scale.
  shown, most = fig.axes[0].get_images()[0].get_array(), np.abs(components).max()
  np.testing.assert_allclose(
    shown[0, 0], components[0, 0, 0] / most / 2 + 0.5, rtol=1e-5
  )


@pytest.mark.parametrize(
  'grid, rows, columns',
  [((2, 3), '1 2', '1 2 3'), ((5, 37), '3', '1 6 11 16 21 26 31 36')],
)
def test_large_grids_are_thinned_out(grid, rows, columns):
  similarity = np.random.RandomState(0).rand(*grid, *grid)
  fig = drawing.position_similarity(similarity)
  axes = fig.axes[0]
  assert texts(axes.get_yticklabels()) == rows.split()
  assert texts(axes.get_xticklabels()) == columns.split()
  assert ('every' in fig.get_suptitle()) == (max(grid) > 8)
  first = similarity[int(rows.split()[0]) - 1, int(columns.split()[0]) - 1]
  sheet = np.asarray(axes.get_images()[0].get_array())
  assert sheet[0, 0] == first[0, 0]


def test_attention_maps_show_at_most_twelve_layers():
  images, rng = np.zeros((2, 16, 16, 3)), np.random.RandomState(0)
  labels = ['ant, 90 %', 'bee, 80 %']
  fig = drawing.attention_maps(images, rng.rand(24, 2, 4, 6), labels, 'class')
  axes = fig.axes[0]
  columns = texts(axes.get_xticklabels())
  assert columns[:2] == ['image', '1']
  assert columns[-1] == '24'
  assert len(columns) == 13
  assert '12 of 24' in fig.get_suptitle()
  assert texts(axes.get_yticklabels()) == labels
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('layer', 'class')
  few = drawing.attention_maps(
    images.repeat(4, 0), rng.rand(3, 8, 4, 6), labels * 4, ''
  ).axes[0]
  assert texts(few.get_yticklabels()) == ['image', '1', '2', '3']
  assert few.get_ylabel() == 'layer'
