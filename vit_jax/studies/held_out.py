"""Splits training data into a part to train on and a held-out part."""

import re
from typing import NamedTuple

from vit_jax.configs import schema
from vit_jax.data import folds, slices
from vit_jax.data.lazy import tfds


class Parts(NamedTuple):
  """Splits to train on and to compare on, and both together."""

  train: str
  held_out: str
  all: str


def cut(split: str, test: str, held_out: str | None = None) -> Parts:
  """Splits the training data into a part to train on and a held-out part.

  `split` and `test` are the training and the test split, in the notation of TFDS.
  `held_out` is None for the rest of the base of `split` ('train[98%:]' for
  'train[:98%]', 'train[fold=0/5]' for 'train[fold!=0/5]'); '10%' (of the base) or '200'
  (examples) to cut off the end of `split`; or another split, 'validation'.

  Raises ValueError if nothing is left to train on or to hold out, or the held-out
  part overlaps with the rest or the test split.
  """
  summands = list(slices.parts(split))
  base, instruction = summands[0]
  remedy = 'hold out a part with --held_out=10%, or a split with --held_out=validation'
  if held_out and not re.fullmatch(r'\d+|\d+(\.\d+)?%', held_out):
    schema.check('held_out', held_out, schema.Split, '--')
    splits = Parts(split, held_out, f'{split}+{held_out}')
  elif len(summands) > 1:
    raise ValueError(
      f"pp.train='{split}' is a sum of splits: name the split to hold out, as in "
      '--held_out=validation'
    )
  elif held_out:
    splits = _cut_off(base, instruction, held_out)
  elif (fold := folds.parse(instruction)) is not None:
    splits = Parts(split, f'{base}{fold.complement}', base)
  else:
    begin, _, end = instruction.strip('[]').partition(':')
    remainders = []
    if begin:
      remainders.append(f'{base}[:{begin}]')
    if end:
      remainders.append(f'{base}[{end}:]')
    splits = Parts(split, '+'.join(remainders), base)
    if not remainders:
      raise ValueError(
        f"pp.train='{split}' leaves no training data to choose on: {remedy}"
      )
  for key, value in (('pp.train', splits.train), ('pp.test', test)):
    if slices.overlap(splits.held_out, value):
      raise ValueError(
        f"the part to choose on, '{splits.held_out}', overlaps with {key}='{value}': "
        f'{remedy}'
      )
  return splits


def _cut_off(base: str, instruction: str, held_out: str) -> Parts:
  """Cuts a share or a number of examples off the end of a slice."""
  if folds.parse(instruction) is not None:
    raise ValueError(
      f"held_out='{held_out}' is cut off a slice, and pp.train='{base}{instruction}' is "
      'of folds: name folds to hold out, such as --held_out="train[fold=0/5]"'
    )
  unit = '%' if held_out.endswith('%') else ''
  spec = tfds.core.ReadInstruction.from_spec(f'train{instruction}')
  if instruction and spec.unit != (unit or 'abs'):
    raise ValueError(
      f"held_out='{held_out}' and pp.train='{base}{instruction}' must both be in "
      'percent, or both numbers of examples (--held_out)'
    )
  amount = float(held_out.rstrip('%'))
  begin = spec.from_ or 0
  end = spec.to or (100 if unit else 0)
  middle = end - amount
  if not amount or (end > 0 and middle <= begin):
    raise ValueError(
      f"held_out='{held_out}' leaves nothing of '{base}{instruction}' to train on, "
      'or nothing to choose on (--held_out)'
    )

  start = f'{begin:.10g}{unit}' if begin else ''
  cut_at = f'{middle:.10g}{unit}'
  stop = f'{end:.10g}{unit}' if spec.to else ''
  return Parts(
    f'{base}[{start}:{cut_at}]', f'{base}[{cut_at}:{stop}]', f'{base}{instruction}'
  )
