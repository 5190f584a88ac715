"""Chooses a learning rate, or other values: the command `vit_jax sweep`.

  python -m vit_jax.sweep --help

vit_jax.studies.sweep is the library.
"""

from vit_jax import cli

if __name__ == '__main__':
  cli.run('sweep')
