"""Splits training data into a part to train on and a held-out part."""

import re
from typing import NamedTuple

from vit_jax.configs import schema
from vit_jax.data import slices
from vit_jax.data.lazy import tfds

_LARGE = 10**9  # Number of examples by which slices are compared.


class Parts(NamedTuple):
  """Splits to train on and to compare on, and both together."""

  train: str
  held_out: str
  all: str


def cut(split: str, test: str, held_out: str | None = None) -> Parts:
  """Splits the training data into a part to train on and a held-out part.

  `split` and `test` are the training and the test split, in the notation of TFDS.
  `held_out` is None for the rest of the base of `split` ('train[98%:]' for
  'train[:98%]'); '10%' (of the base) or '200' (examples) to cut off the end of
  `split`; or another split, 'validation'.

  Raises ValueError if nothing is left to train on or to hold out, or the held-out
  part overlaps with the rest or the test split.
  """
  (base, instruction), *more = slices.parts(split)
  remedy = 'hold out a part with --held_out=10%, or a split with --held_out=validation'
  if held_out and not re.fullmatch(r'\d+|\d+(\.\d+)?%', held_out):
    schema.check('held_out', held_out, schema.Split, '--')
    found = Parts(split, held_out, f'{split}+{held_out}')
  elif more:
    raise ValueError(
      f"pp.train='{split}' is a sum of splits: name the split to hold out, as in "
      '--held_out=validation'
    )
  elif held_out:
    found = _cut_off(base, instruction, held_out)
  else:
    begin, _, end = instruction.strip('[]').partition(':')
    rest = [f'{base}[:{begin}]'] * bool(begin) + [f'{base}[{end}:]'] * bool(end)
    found = Parts(split, '+'.join(rest), base)
    if not rest:
      raise ValueError(
        f"pp.train='{split}' leaves no training data to choose on: {remedy}"
      )
  for key, other in (('pp.train', found.train), ('pp.test', test)):
    if _overlap(found.held_out, other):
      raise ValueError(
        f"the part to choose on, '{found.held_out}', overlaps with {key}='{other}': "
        f'{remedy}'
      )
  return found


def _overlap(split: str, other: str) -> bool:
  """Returns whether two splits of large data sets overlap."""

  def ranges(split):
    for base, instruction in slices.parts(split):
      yield base, slices.take(range(_LARGE), base, instruction)

  return any(
    base == other_base and part.start < other_part.stop and other_part.start < part.stop
    for base, part in ranges(split)
    for other_base, other_part in ranges(other)
  )


def _cut_off(base, instruction, held_out) -> Parts:
  """Cuts a share or a number of examples off the end of a slice."""
  unit = '%' if held_out.endswith('%') else ''
  spec = tfds.core.ReadInstruction.from_spec(f'train{instruction}')
  if instruction and spec.unit != (unit or 'abs'):
    raise ValueError(
      f"held_out='{held_out}' and pp.train='{base}{instruction}' must both be in "
      'percent, or both numbers of examples (--held_out)'
    )
  amount = float(held_out.rstrip('%'))
  begin, end = spec.from_ or 0, spec.to or (100 if unit else 0)
  middle = end - amount
  if not amount or (end > 0 and middle <= begin):
    raise ValueError(
      f"held_out='{held_out}' leaves nothing of '{base}{instruction}' to train on, "
      'or nothing to choose on (--held_out)'
    )

  def bound(number, given=True):
    return f'{number:.10g}{unit}' if given else ''

  return Parts(
    f'{base}[{bound(begin, begin)}:{bound(middle)}]',
    f'{base}[{bound(middle)}:{bound(end, spec.to)}]',
    f'{base}{instruction}',
  )
