"""Tests of palettes."""

import json

import numpy as np
import pytest

from vit_jax.tasks.pixels import palette as palette_lib

COLORS = np.array([[-0.9, -0.8, -1], [0, 0.1, -0.3], [0.9, 0.7, 1]], 'f')


def pixels_near(colors, count=4_000, noise=0.02):
  """Pixels near some colours, in random order, and the index of each colour."""
  rng = np.random.RandomState(0)
  numbers = rng.randint(len(colors), size=count)
  noise = noise * rng.uniform(-1, 1, (count, colors.shape[1]))
  return (colors[numbers] + noise).clip(-1, 1).astype('f'), numbers


def test_pixels_map_to_the_nearest_colour():
  rng = np.random.RandomState(0)
  palette = rng.uniform(-1, 1, (50, 3)).astype('f')
  images = rng.uniform(-1, 1, (4, 5, 6, 3)).astype('f')
  found = palette_lib.quantise(images, palette)
  distances = np.linalg.norm(
    images[..., None, :].astype(float) - palette.astype(float), axis=-1
  )
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, distances.argmin(axis=-1))


def test_k_means_finds_the_colours():
  pixels, numbers = pixels_near(COLORS)
  palette = palette_lib.fit(pixels, 3, seed=1)
  assert palette.dtype == np.float32
  np.testing.assert_allclose(palette, COLORS, atol=0.02)
  np.testing.assert_array_equal(palette_lib.quantise(pixels, palette), numbers)
  np.testing.assert_array_equal(palette_lib.fit(pixels, 3, seed=1), palette)


def test_as_many_or_fewer_distinct_colours():
  pixels, _ = pixels_near(COLORS, noise=0)
  np.testing.assert_array_equal(palette_lib.fit(pixels, 3), COLORS)
  with pytest.raises(ValueError, match='num_colors=4 .* 3 colours'):
    palette_lib.fit(pixels, 4)


def test_pixels_are_taken_from_every_image():
  images = np.arange(2 * 6 * 4 * 4 * 3).reshape(2, 6, 4, 4, 3) / 1_000
  found = palette_lib.sample(images, 5, seed=0)
  assert found.shape == (2 * 6 * 5, 3)
  rows = images.reshape(12, 16, 3)
  for pixels, image in zip(found.reshape(12, 5, 3), rows):
    assert len(np.unique(pixels, axis=0)) == 5
    for pixel in pixels:
      assert np.isclose(image, pixel).all(axis=-1).any()
  whole = palette_lib.sample(images, 99, seed=0)
  np.testing.assert_array_equal(whole, images.reshape(-1, 3).astype('f'))


def test_loads_palettes_from_files_and_next_to_weights(tmp_path):
  np.save(tmp_path / 'centers.npy', COLORS)
  found = [palette_lib.load(str(tmp_path / 'centers.npy'))]
  hugging_face = tmp_path / 'hf'
  hugging_face.mkdir()
  (hugging_face / 'preprocessor_config.json').write_text(
    json.dumps({'clusters': COLORS.tolist()})
  )
  (hugging_face / 'model.safetensors').touch()
  found.append(palette_lib.load(str(hugging_face)))
  found.append(palette_lib.load(str(hugging_face / 'model.safetensors')))
  (tmp_path / 'palette.json').write_text(json.dumps(COLORS.tolist()))
  found.append(palette_lib.load(str(tmp_path)))
  for palette in found:
    assert palette.dtype == np.float32
    np.testing.assert_array_equal(palette, COLORS)


def test_invalid_palettes_are_named(tmp_path):
  path = tmp_path / 'centers.npy'
  for array in (np.zeros((5, 2)), np.full((5, 3), 200.0)):
    np.save(path, array)
    with pytest.raises(ValueError, match="centers.npy'.*palette"):
      palette_lib.load(str(path))
  path.write_text('not an array')
  with pytest.raises(ValueError, match="centers.npy'.*palette"):
    palette_lib.load(str(path))
  with pytest.raises(FileNotFoundError, match='gone.npy'):
    palette_lib.load('gone.npy')
  (tmp_path / 'run').mkdir()
  with pytest.raises(FileNotFoundError, match="run' has no palette"):
    palette_lib.load(str(tmp_path / 'run'))
