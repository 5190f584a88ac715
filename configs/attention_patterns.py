r"""Compares global, local and axial attention (arXiv 2010.11929, D.6) in small.

  python -m vit_jax.main --config=configs/attention_patterns.py \
    --workdir=/tmp/patterns

The argument, if any, selects some of VARIANTS: --config=configs/attention_patterns.py:axial.
All pool by the mean, since axial attention has no class token. A layer of axial
attention has two blocks, so `deep` is global attention with as many blocks. Takes about
12 minutes of processor time. Expected over three seeds, in percent:

  global   94.07 ± 0.32   local (3 x 3)              97.78 ± 0.56
  axial    97.22 ± 1.27   deep (global, 8 layers)    91.76 ± 0.64
"""

import ml_collections

from vit_jax.configs import studies

LAYERS = 4
# Name -> (attention_pattern, attention_window, num_layers).
VARIANTS = {
  'global': ('global', 7, LAYERS),
  'local': ('local', 3, LAYERS),
  'axial': ('axial', 7, LAYERS),
  'deep': ('global', 7, 2 * LAYERS),
}


def get_config(names: str = '') -> ml_collections.ConfigDict:
  """Returns the config of the study of some variants, separated by commas."""
  transformer = 'model.transformer'
  variant_names, dataset = studies.select(VARIANTS, names)
  variants = []
  for name in variant_names:
    pattern, window, layers = VARIANTS[name]
    settings = {
      'model.classifier': 'gap',
      f'{transformer}.attention_pattern': pattern,
      f'{transformer}.attention_window': window,
      f'{transformer}.num_layers': layers,
    }
    variants.append((name, settings))
  return studies.get_config(
    'Attention patterns (appendix D.6 in small)', tuple(variants), dataset
  )
