r"""Compares position embeddings (arXiv 2010.11929, D.4, table 8) in small.

  python -m vit_jax.main --config=configs/position_embeddings.py \
    --workdir=/tmp/positions

The argument, if any, selects some of VARIANTS:
--config=configs/position_embeddings.py:none,1d,relative. Takes about 14 minutes of
processor time for all. Expected over three seeds, in percent:

  none                87.50 ± 1.67
  1d                  95.56 ± 1.21   every layer 96.39 ± 0.73   shared 95.93 ± 0.70
  2d                  92.59 ± 1.25   every layer 94.63 ± 1.28   shared 94.17 ± 0.73
  relative                           every layer 92.04 ± 1.85   shared 91.76 ± 0.42
  sines and cosines   96.67 ± 0.73

As in the paper (ViT-B/16, 5-shot ImageNet: none .614, all others .640 to .643), no
embeddings are worst by far. Unlike there, 2-D and relative embeddings trail 1-D ones.
"""

from vit_jax.configs import studies

# Name -> (position_embedding, position_layers), in the order of table 8; the
# last two are not in the table.
VARIANTS = {
  'none': ('none', 'stem'),
  '1d': ('learned_1d', 'stem'),
  '1d_every': ('learned_1d', 'every'),
  '1d_shared': ('learned_1d', 'shared'),
  '2d': ('learned_2d', 'stem'),
  '2d_every': ('learned_2d', 'every'),
  '2d_shared': ('learned_2d', 'shared'),
  'relative': ('relative', 'every'),
  'relative_shared': ('relative', 'shared'),
  'sincos2d': ('sincos2d', 'stem'),
}


def get_config(names: str = ''):
  """Returns the config of the study of some variants, separated by commas."""
  transformer = 'model.transformer.position'
  return studies.get_config(
    'Position embeddings (table 8 in small)',
    tuple(
      (
        name,
        {
          f'{transformer}_embedding': VARIANTS[name][0],
          f'{transformer}_layers': VARIANTS[name][1],
        },
      )
      for name in studies.select(VARIANTS, names)
    ),
  )
