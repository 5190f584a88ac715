"""Tests of weights with position embeddings other than the paper's."""

import numpy as np
import pytest
from scipy import ndimage

from tests import tiny_models, trees
from vit_jax import checkpoint, models, predict
from vit_jax.figures import visualize
from vit_jax.weights import convert, identify


def make_config(kind, layers='stem', **fields):
  config = tiny_models.config()
  config.patches.size = (4, 4)
  config.transformer.num_layers = 2
  config.transformer.position_embedding = kind
  config.transformer.position_layers = layers
  with config.ignore_type():
    config.update(fields)
  return config


def numbers(config, size=(16, 16), seed=0):
  model = models.make_model(config, num_classes=3)
  return tiny_models.numbers(model, size, seed)


def save(params, path):
  checkpoint.save(params, str(path))
  return str(path)


@pytest.mark.parametrize('kind', ['learned_1d', 'learned_2d'])
def test_every_table_is_resized(tmp_path, kind):
  config = make_config(kind, 'every')
  params = numbers(config)
  init = numbers(config, (20, 24), seed=1)
  got = checkpoint.load_pretrained(
    pretrained_path=save(params, tmp_path / 'a.npz'), init_params=init,
    model_config=config, new_grid=(5, 6),
  )  # fmt: skip
  for i in range(2):
    old, new = (p['Transformer'][f'posembed_{i}'] for p in (params, got))
    if kind == 'learned_2d':
      for leaf, zoom in (('x_embedding', 6 / 4), ('y_embedding', 5 / 4)):
        want = ndimage.zoom(old[leaf], (zoom, 1), order=1)
        np.testing.assert_allclose(new[leaf], want, atol=1e-5)
      continue
    old, new = old['pos_embedding'][0], new['pos_embedding'][0]
    np.testing.assert_array_equal(new[0], old[0])
    zoom = (5 / 4, 6 / 4, 1)
    want = ndimage.zoom(old[1:].reshape(4, 4, -1), zoom, order=1)
    np.testing.assert_allclose(new[1:].reshape(want.shape), want, atol=1e-5)


@pytest.mark.parametrize('kind', ['relative', 'relative_bias'])
def test_relative_embeddings_cannot_be_resized(tmp_path, kind):
  config = make_config(kind, 'shared')
  params = numbers(config)
  path = save(params, tmp_path / 'a.npz')

  def load(size, new_grid, **fields):
    return checkpoint.load_pretrained(
      pretrained_path=path, init_params=numbers(config, size, seed=1),
      model_config=config, new_grid=new_grid, **fields,
    )  # fmt: skip

  got = load((16, 16), (4, 4))
  trees.assert_same(got['Transformer'], params['Transformer'])
  message = 'relative .* cannot be resized to another grid: use images of the'
  with pytest.raises(ValueError, match=message):
    load((20, 24), (5, 6))
  with pytest.raises(ValueError, match=message):  # The same number of patches.
    load((8, 32), (2, 8), grid=(4, 4))


@pytest.mark.parametrize(
  'kind, layers',
  [
    ('learned_1d', 'every'),
    ('learned_2d', 'stem'),
    ('relative', 'shared'),
    ('relative_bias', 'every'),
  ],
)
def test_parameters_reveal_their_position_embeddings(kind, layers):
  params = numbers(make_config(kind, layers))
  encoder = identify.model_config(params).transformer
  assert (encoder.position_embedding, encoder.position_layers) == (kind, layers)


def test_factorised_tables_become_the_published_table(tmp_path):
  config = make_config('learned_2d')
  params = numbers(config, (8, 12))
  source, there = save(params, tmp_path / 'a.npz'), str(tmp_path / 'b.npz')
  _, [note] = convert.convert(source, there, image_size=(8, 12))
  assert "position_embedding='learned_2d' is written as the table" in note
  got = checkpoint.load(there)
  table = got['Transformer'].pop('posembed_input')['pos_embedding'][0]
  old = params['Transformer'].pop('posembed_input')
  trees.assert_same(got, params)
  np.testing.assert_array_equal(table[0], np.zeros(16))
  for i, (row, column) in enumerate(np.ndindex(2, 3)):
    want = *old['x_embedding'][column], *old['y_embedding'][row]
    np.testing.assert_array_equal(table[1 + i], want)


def test_rejects_embeddings_that_timm_lacks(tmp_path):
  source = save(numbers(make_config('learned_1d', 'every')), tmp_path / 'a.npz')
  message = "'learned_1d' with position_layers='every' cannot be written as timm"
  with pytest.raises(ValueError, match=f'{message}.*--to=workdir'):
    convert.convert(source, str(tmp_path / 'b'), 'timm', image_size=(16, 16))
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a.npz']


def test_position_similarity_rejects_relative_embeddings(tmp_path):
  path = save(numbers(make_config('relative', 'every')), tmp_path / 'b.npz')
  loaded = predict.load_weights(path, image_size=(16, 16))
  with pytest.raises(ValueError, match='offsets, not to patches'):
    visualize.figures(loaded, names=['position_similarity'])
