"""Weight files of image and text towers in the published format, with random values."""

import pathlib

import jax

from tests import tiny_models
from vit_jax import checkpoint, models
from vit_jax.configs import models as model_configs
from vit_jax.data.texts import tokenizers

WIDTH = 64  # Of one head, which shapes do not show.


def write(path: pathlib.Path, vocabulary: pathlib.Path | None = None):
  """Writes the weights of a small LiT-B16B for 8x8 pixels, and its vocabulary.

  Args:
    path: a .npz.
    vocabulary: a .txt; by default next to the weights, under the same name.
  """
  texts = 'a photo of the small number', 'a cat on a sofa, two dogs'
  words = tokenizers.word_vocabulary([*texts, *'0123456789'])
  config = model_configs.get_config('LiT-B16B')
  config.image.patches.size = (4, 4)
  config.image.hidden_size = WIDTH
  config.image.transformer.update(num_layers=1, mlp_dim=32, num_heads=1)
  with config.ignore_type():
    config.text = {
      'config': dict(
        width=WIDTH, num_layers=1, num_heads=1, mlp_dim=32, num_positions=16,
        vocab_size=len(words),
      )
    }  # fmt: skip
  config.out_dim = (None, WIDTH)
  model = models.make_model(config)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), 'float32')
  tokens = jax.ShapeDtypeStruct((1, config.pp.max_len), 'int32')
  init = lambda x, y: model.init(jax.random.key(0), images=x, tokens=y)
  shapes = jax.eval_shape(init, images, tokens)['params']
  params = tiny_models.drawn(shapes)
  # Anything shared by all images or texts would hide their differences.
  tables = params['txt']['BertEncoder_0']['embedder']
  tables['embedders_token_ids']['embedding'] *= 10
  params['img']['embedding']['kernel'] *= 10
  params['img']['cls'] *= 0
  params['img']['Transformer']['posembed_input']['pos_embedding'] *= 0
  checkpoint.save(params, str(path))
  tokenizers.write_vocabulary(vocabulary or path.with_suffix('.txt'), words)
