"""Trains a Vision Transformer, by the command of the original.

  python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
  python -m vit_jax.main --workdir=/tmp/digits --evaluate=test

`vit_jax train` is the same, see vit_jax/commands/train.py.
"""

from vit_jax import console

if __name__ == '__main__':
  console.run('train')
