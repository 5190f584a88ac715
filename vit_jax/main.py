"""Trains a Vision Transformer: the original's name for `vit_jax train`.

python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
python -m vit_jax.main --workdir=/tmp/digits --evaluate=test
"""

from vit_jax import __main__ as program

if __name__ == '__main__':
  program.run('train')
