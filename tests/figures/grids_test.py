"""Tests of grids of images with captions."""

import numpy as np
from PIL import ImageColor
import pytest

from vit_jax.figures import grids


def images(*shape, seed=0):
  rng = np.random.RandomState(seed)
  return rng.randint(0, 256, (*shape, 3), dtype=np.uint8)


def test_to_pixels_returns_uint8_rgb():
  got = grids.to_pixels(np.array([-1, 0, 1, np.nan]).reshape(1, 2, 2, 1))
  assert got.shape == (1, 2, 2, 3)
  np.testing.assert_array_equal(got[0, ..., 0], [[0, 128], [255, 128]])
  np.testing.assert_array_equal(got[..., 0], got[..., 2])


def test_small_images_are_enlarged_by_an_integer_factor():
  small = images(5, 8, 16)
  picture = grids.grid(small, columns=4, titles=('a', 'b', 'c', 'd'))
  assert picture.shape == (2 * (96 + 8) + 20, 4 * (192 + 8) + 8, 3)
  for i in range(5):
    top, left = 20 + i // 4 * 104, 8 + i % 4 * 200
    cell = picture[top : top + 96, left : left + 192]
    for y in range(0, 12, 11):
      np.testing.assert_array_equal(cell[y::12, y::12], small[i])
  assert (picture[20 + 104 :, 8 + 200 :] == 255).all()


@pytest.mark.parametrize(
  'size, most, cell',
  [
    ((300, 200), None, (300, 200)),
    ((300, 200), 128, (192, 128)),
  ],
)
def test_large_images_are_shrunk_on_request(size, most, cell):
  picture = grids.grid(images(1, *size), columns=1, most=most)
  assert picture.shape == (cell[0] + 16, cell[1] + 16, 3)


def test_captions_have_colours_and_stay_below_their_image():
  black = np.zeros((3, 96, 96, 3), np.uint8)
  texts = ('bee: 97 %', 'cow: 61 %\nis bee', 'a name that is far too long ' * 9)
  colors = (grids.RIGHT, grids.WRONG, 'black')
  picture = grids.grid(black, list(map(grids.Caption, texts, colors)))
  assert picture.shape[0] == 96 + 2 * 8 + 5 * 15
  for i, color in enumerate(colors):
    below = picture[8 + 96 :, 8 + i * 104 : 8 + i * 104 + 96]
    assert (below == ImageColor.getrgb(color)).all(axis=-1).any()
    # A letter may begin a pixel further left.
    between = picture[:, 8 + i * 104 + 96 : 8 + (i + 1) * 104 - 1]
    assert (between == 255).all()


@pytest.mark.parametrize('name', ['狗', '$x$'])
def test_any_name_can_be_written(name, recwarn):
  black = np.zeros((1, 96, 96, 3), np.uint8)
  picture = grids.grid(black, [grids.Caption(f'{name}: 5 %')], 1)
  assert (picture[8 + 96 :] != 255).any()
  assert not recwarn


def test_heat_is_relative_to_the_largest_value_of_each_map():
  maps = np.array([[[0, 1], [2, 4]], [[0, 0], [0, 0]]], np.float32)
  got = grids.heat(maps, (4, 6))
  assert got.shape == (2, 4, 6, 3)
  dark, yellow = (68, 1, 84), (253, 231, 37)  # The ends of viridis.
  np.testing.assert_array_equal(got[0, 0, 0], dark)
  np.testing.assert_allclose(got[0, 2:, 3:], np.full((2, 3, 3), yellow), atol=1)
  np.testing.assert_allclose(got[0, 2, 0], (33, 145, 140), atol=1)  # Its middle.
  assert (got[1] == dark).all()
