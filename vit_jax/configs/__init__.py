"""Makes the top-level folder `configs/` importable as `vit_jax.configs`.

A wheel has the config files next to this file. In a checkout they are in the
top-level folder, and `__path__` points to it.
"""

import pathlib

_here = pathlib.Path(__file__).parent
if not (_here / 'common.py').exists():
  __path__ = [str(_here.parents[1] / 'configs')]
