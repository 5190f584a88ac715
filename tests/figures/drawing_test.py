"""Tests of what is drawn of the inside of a model: labels, and numbers in pixels."""

import sys

import numpy as np
import pytest

from vit_jax.figures import drawing


def texts(ticks):
  return [tick.get_text() for tick in ticks]


def test_pixels_are_enlarged_and_grey_is_a_colour():
  images = np.array([[[-1.0], [0.0]], [[1.0], [2.0]]])[None]  # [1, 2, 2, 1]
  pixels = drawing.as_pixels(images)
  assert pixels.shape == (1, 128, 128, 3)
  corners = pixels[0, [0, 0, -1, -1], [0, -1, 0, -1]]
  np.testing.assert_array_equal(corners, np.repeat([[0], [0.5], [1], [1]], 3, 1))
  assert drawing.as_pixels(np.zeros((224, 300, 3))).shape == (224, 300, 3)
  assert drawing.as_pixels(np.zeros((224, 300, 4))).shape == (224, 300, 3)


def test_narrow_pictures_are_enlarged_to_a_limit():
  assert drawing.as_pixels(np.zeros((1, 600, 3))).shape == (3, 1_800, 3)
  assert drawing.as_pixels(np.zeros((60_000, 1, 3))).shape == (60_000, 1, 3)


def test_a_map_over_a_picture():
  grey = np.full((40, 60, 3), 0.5, np.float32)
  flat = drawing.overlay(grey, np.full((2, 3), 0.1))
  assert flat.shape == (40, 60, 3)
  assert np.ptp(flat, axis=(0, 1)).max() < 1e-6
  peak = drawing.overlay(grey, np.array([[0, 0, 0], [0, 0, 1]]))
  np.testing.assert_allclose(peak[-1, -1], flat[0, 0], atol=1e-6)
  assert peak[0, 0].sum() < peak[-1, -1].sum()  # Viridis: dark to bright.
  assert np.isfinite(drawing.overlay(grey, np.zeros((2, 3)))).all()


def test_pictures_side_by_side():
  pictures = np.arange(6.0).reshape(2, 3, 1, 1).repeat(32, 2).repeat(64, 3)
  axes = drawing.new_figure(3.0, '').subplots()
  shown = drawing.show_tiles(axes, pictures, 'abc', 'de', gap=0.25, fill=-1, vmin=0)
  sheet, x, y = shown.get_array(), axes.get_xticks(), axes.get_yticks()
  assert sheet.shape == (2 * 32 + 8, 3 * 64 + 2 * 8)
  middles = sheet[np.ix_(np.round(y).astype(int), np.round(x).astype(int))]
  np.testing.assert_array_equal(middles, pictures[:, :, 0, 0])
  assert (sheet[32:40] == -1).all()


@pytest.mark.parametrize('channels', [1, 3])
def test_filters(channels):
  components = np.random.RandomState(0).randn(28, 4, 4, channels)
  fig = drawing.filters(components, np.full(28, 0.03))
  assert '28 principal components' in fig.get_suptitle()
  assert '84 %' in fig.get_suptitle()
  axes = fig.axes[0]
  assert texts(axes.get_yticklabels()) == ['1', '8', '15', '22']
  [image] = axes.get_images()
  # All on one scale.
  shown, most = np.asarray(image.get_array()), np.abs(components).max()
  np.testing.assert_allclose(
    shown[0, 0], np.broadcast_to(components[0, 0, 0] / most / 2 + 0.5, 3),
    rtol=1e-5,
  )  # fmt: skip


@pytest.mark.parametrize(
  'grid, rows, columns',
  [
    ((2, 3), '1 2', '1 2 3'),
    ((14, 14), '1 3 5 7 9 11 13', '1 3 5 7 9 11 13'),
    ((5, 37), '3', '1 6 11 16 21 26 31 36'),
  ],
)
def test_large_grids_are_thinned_out(grid, rows, columns):
  similarity = np.random.RandomState(0).rand(*grid, *grid)
  fig = drawing.position_similarity(similarity)
  axes, bar = fig.axes
  assert texts(axes.get_yticklabels()) == rows.split()
  assert texts(axes.get_xticklabels()) == columns.split()
  assert ('every' in fig.get_suptitle()) == (max(grid) > 8)
  assert bar.get_ylabel() == 'cosine similarity'
  first = similarity[int(rows.split()[0]) - 1, int(columns.split()[0]) - 1]
  sheet = np.asarray(axes.get_images()[0].get_array())
  assert sheet[0, 0] == first[0, 0]


def test_layers_lie_where_the_maps_are_larger_and_are_at_most_twelve():
  images, rng = np.zeros((2, 16, 16, 3)), np.random.RandomState(0)
  labels = ['ant, 90 %', 'bee, 80 %']
  fig = drawing.attention_maps(images, rng.rand(24, 2, 4, 6), labels, 'class')
  axes, bar = fig.axes
  columns = texts(axes.get_xticklabels())
  assert columns[:2] == ['image', '1']
  assert columns[-1] == '24'
  assert len(columns) == 13
  assert '12 of 24' in fig.get_suptitle()
  assert texts(axes.get_yticklabels()) == labels
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('layer', 'class')
  assert 'attention' in bar.get_ylabel()
  few = drawing.attention_maps(
    images.repeat(4, 0), rng.rand(3, 8, 4, 6), labels * 4, ''
  ).axes[0]
  assert texts(few.get_yticklabels()) == ['image', '1', '2', '3']
  assert few.get_ylabel() == 'layer'


def test_long_names_are_cut_in_the_middle():
  assert drawing.shorten('cat') == 'cat'
  cut = drawing.shorten('a very long name of a class', 11)
  assert cut == 'a ver…class'
  assert len(cut) == 11


def test_wrapped_labels_keep_their_end():
  text = 'sulphur-crested cockatoo, Kakatoe galerita: 97 %\ntrue: bee'
  assert drawing.wrapped(text, 60) == text
  assert drawing.wrapped(text, 15) == (
    'sulphur-crested\ncockatoo,…\ngalerita: 97 %\ntrue: bee'
  )


def test_no_matplotlib(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
    drawing.filters(np.zeros((2, 2, 2, 1)), np.zeros(2))
