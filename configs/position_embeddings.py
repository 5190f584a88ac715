r"""Compares position embeddings (arXiv 2010.11929, D.4, table 8) in small.

  python -m vit_jax.main --config=configs/position_embeddings.py \
    --workdir=/tmp/positions

The argument, if any, selects some of VARIANTS, or another data set, or both:
--config=configs/position_embeddings.py:none,1d,fashion_mnist. On the digits, all take
about 14 minutes of processor time. Expected over three seeds, in percent:

  none                88.15 ± 0.64
  1d                  96.20 ± 0.70   every layer 95.83 ± 0.83   shared 96.85 ± 0.85
  2d                  90.65 ± 2.08   every layer 94.26 ± 0.64   shared 93.33 ± 1.21
  relative                           every layer 91.39 ± 2.68   shared 90.19 ± 2.25
  sines and cosines   96.48 ± 0.70

As in the paper (ViT-B/16, 5-shot ImageNet: none .614, all others .640 to .643), no
embeddings are worst by far. Unlike there, 2-D and relative embeddings trail 1-D ones;
on Fashion-MNIST (docs/benchmarks.md; a variant takes 10 minutes) they do not.
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
