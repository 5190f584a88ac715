"""Tests of letters in pictures: those of many languages are no boxes."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont
import pytest

from vit_jax.figures import fonts, grids


def draw(text, font):
  canvas = Image.new('L', (40, 40), 255)
  ImageDraw.Draw(canvas).text((5, 5), text, 0, font)
  return np.asarray(canvas)


@pytest.mark.parametrize('text', ['Käfer', 'Öl', 'été', 'Łódź', 'жук', 'Straße'])
def test_letters_are_drawn_and_not_boxes(text):
  found, font = fonts.drawable(text, 12)
  assert found == text
  box = draw('\U0010ffff', font)
  assert not any(np.array_equal(draw(c, font), box) for c in text)


@pytest.fixture
def without_matplotlib(monkeypatch):
  monkeypatch.setattr(fonts, '_dejavu', lambda: None)


@pytest.mark.parametrize(
  'text, want',
  [
    ('Käfer', 'Kafer'),
    ('Straße Łódź', 'Stra?e ?odz'),
    ('日本', '??'),
    ('fly', 'fly'),
    ('a\ud800', 'a?'),
  ],
)
def test_other_letters_are_replaced(without_matplotlib, text, want):
  found, font = fonts.drawable(text, 12)
  assert found == want
  assert font.getname()[0] == ImageFont.load_default(12).getname()[0]


def test_captions_of_images_show_all_letters():
  image = np.zeros((1, 100, 100, 3), np.uint8)
  umlaut, letter = (grids.grid(image, [grids.Caption(text)], 1) for text in 'äa')
  below = 100 + 12  # Where the letters are.
  # An ä has the body of DejaVu's a and two dots, not a frame.
  rows = (umlaut[below:, :30] < 128).all(axis=-1).any(axis=1)
  assert rows.any()
  found, font = fonts.drawable('ä', 12)
  want = Image.new('RGB', (30, 15), 'white')
  ImageDraw.Draw(want).text((8, 1), found, 'black', font)
  got = umlaut[108 : 108 + 15, :30]
  np.testing.assert_array_equal(got, np.asarray(want))
  assert (got != letter[108 : 108 + 15, :30]).any()
