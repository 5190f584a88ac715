"""Tests of study plots: bars, lines and their values."""

import numpy as np
import pytest

from vit_jax.figures import studies


def heights(axes):
  return [patch.get_height() for patch in axes.patches]


def test_one_bar_per_label_with_its_deviation():
  values = {'learned': [60.0, 62.0, 64.0], 'none': [50.0], 'lost': []}
  fig = studies.bars(values, 'accuracy (%)', 'Positions')
  [axes] = fig.axes
  assert heights(axes) == [62, 50]
  labels = [label.get_text() for label in axes.get_xticklabels()]
  assert labels == ['learned', 'none', 'lost']
  [bar] = axes.containers[1].lines[2]  # The line of the standard deviation.
  np.testing.assert_allclose(bar.get_segments()[0][:, 1], [60, 64])
  assert axes.get_ylabel() == 'accuracy (%)'
  assert not fig.legends
  # Bars of similar length are cut off at the bottom to show their difference.
  [axes] = studies.bars({'a': [99.0], 'b': [99.2]}, '', '').axes
  assert axes.get_ylim()[0] == pytest.approx(99 - 0.992)


def test_lines_run_through_means_with_bands(tmp_path):
  lines = {
    'ViT': ((1000, 10, 100), ([3.0, 5.0], [1.0, 1.0], [])),
    'BiT': ((10, 1000), ([2.0], [2.5])),
  }
  path = tmp_path / 'curves.png'
  fig = studies.curves(lines, 'images', 'accuracy (%)', 'Data', log_x=True, path=path)
  [axes] = fig.axes
  first, second = axes.lines
  np.testing.assert_array_equal(first.get_xdata(), [10, 1000])
  np.testing.assert_array_equal(first.get_ydata(), [1, 4])
  np.testing.assert_array_equal(second.get_ydata(), [2, 2.5])
  band, *dots = axes.collections  # Single values have neither.
  ys = band.get_paths()[0].vertices[:, 1]
  assert (ys.min(), ys.max()) == (1, pytest.approx(4 + np.sqrt(2)))
  assert [len(d.get_offsets()) for d in dots] == [2, 2]
  assert (axes.get_xscale(), axes.get_yscale()) == ('log', 'linear')
  assert path.read_bytes().startswith(b'\x89PNG')
