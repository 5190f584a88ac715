"""Makes the top-level folder `configs/` importable as `vit_jax.configs`.

A wheel holds the config files beside this one. In a checkout they lie in the
top-level folder, and the package's path is pointed there.
"""

import pathlib

_here = pathlib.Path(__file__).parent
if not (_here / 'common.py').exists():
  __path__ = [str(_here.parents[1] / 'configs')]
