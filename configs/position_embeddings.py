r"""Compares position embeddings (arXiv 2010.11929, D.4, table 8) in small.

  python -m vit_jax.main --config=configs/position_embeddings.py \
    --workdir=/tmp/positions

The argument, if any, selects some of VARIANTS, or another data set, or both:
--config=configs/position_embeddings.py:none,1d,fashion_mnist. On the digits, all take
about 14 minutes of processor time. Expected over three seeds, in percent:

  none                88.89 ± 1.67
  1d                  95.56 ± 0.73   every layer 97.22 ± 1.67   shared 96.02 ± 0.42
  2d                  91.57 ± 2.58   every layer 95.74 ± 2.08   shared 92.59 ± 1.25
  relative                           every layer 91.48 ± 1.12   shared 91.48 ± 0.85
  sines and cosines   96.30 ± 1.43

As in the paper (ViT-B/16, 5-shot ImageNet: none .614, all others .640 to .643), no
embeddings are worst. Unlike there, relative embeddings and 2-D ones at the stem trail
1-D ones; on Fashion-MNIST (docs/benchmarks.md; a variant takes 10 minutes) they do not.
"""

import ml_collections

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


def get_config(names: str = '') -> ml_collections.ConfigDict:
  """Returns the config of the study of some variants, separated by commas."""
  position = 'model.transformer.position'
  variant_names, dataset = studies.select(VARIANTS, names)
  variants = []
  for name in variant_names:
    embedding, layers = VARIANTS[name]
    settings = {f'{position}_embedding': embedding, f'{position}_layers': layers}
    variants.append((name, settings))
  return studies.get_config(
    'Position embeddings (table 8 in small)', tuple(variants), dataset
  )
