r"""Compares class token and mean pooling (arXiv 2010.11929, D.3) in small.

  python -m vit_jax.main --config=configs/pooling.py --workdir=/tmp/pooling

The argument, if any, selects one of VARIANTS: --config=configs/pooling.py:gap. In the
paper (figure 9) both work similarly, but need different learning rates. Takes
about 10 minutes of processor time. Expected over three seeds, in percent:

  learning rate    class token   mean pooling
  3e-4            71.94 ± 5.64   65.65 ± 7.63
  1e-3            88.70 ± 0.58   85.00 ± 0.73
  3e-3            97.59 ± 0.70   96.11 ± 0.96

With configs/pooling.py:token,gap,fashion_mnist, an hour or more on one core, both are
equal at each learning rate: docs/benchmarks.md.
"""

import ml_collections

from vit_jax.configs import studies

# Name -> (value of config.model.classifier, name in the plot).
VARIANTS = {
  'token': ('token', 'class token'),
  'gap': ('gap', 'mean pooling'),
}
RATES = (3e-4, 1e-3, 3e-3)


def get_config(names: str = '') -> ml_collections.ConfigDict:
  """Returns the config of the study of some variants, separated by commas."""
  variant_names, dataset = studies.select(VARIANTS, names)
  variants, places = [], []
  for name in variant_names:
    classifier, label = VARIANTS[name]
    for rate in RATES:
      settings = {'model.classifier': classifier, 'base_lr': rate}
      variants.append((f'{label}, lr {rate:g}', settings))
      places.append((label, rate))
  config = studies.get_config(
    'Class token or mean pooling (figure 9 in small)', tuple(variants), dataset
  )
  config.x = tuple(places)
  config.x_label = 'base learning rate'
  config.x_log = True
  return config
