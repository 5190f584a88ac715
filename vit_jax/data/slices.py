"""Slices of a split, in the notation of TFDS: 'train[:90%]', 'train+test'."""

from collections.abc import Iterator
import itertools
from typing import Any

from vit_jax import console
from vit_jax.data import folds
from vit_jax.data.lazy import tfds

_LARGE = 10**9  # Number of examples by which slices are compared.
VALIDATION = ('validation', 'val', 'valid')  # Names of the same split.


class NoSplitError(FileNotFoundError):
  """A folder has no split of a name; `message` lacks the `remedy` for training."""

  def __init__(self, message: str, remedy: str) -> None:
    super().__init__(f'{message}. {remedy}')
    self.message = message


def parts(split: str) -> Iterator[tuple[str, str]]:
  """Yields the parts of 'train[:9]+test' with their slices, 'train', '[:9]'.

  A slice may also be a fold, see vit_jax/data/folds.py.
  """
  for part in split.split('+'):
    base, bracket, instruction = part.strip().partition('[')
    yield base, bracket + instruction


def bases(split: str) -> list[str]:
  """Returns the names of the parts, ['train', 'test'] of 'train[:9]+test'."""
  return [base for base, _ in parts(split)]


def take(items: Any, name: str, instruction: str) -> Any:
  """Returns a slice such as '[:90%]' of a list, range or array, rounded as in TFDS."""
  info = tfds.core.SplitInfo(
    name=name, shard_lengths=[len(items)], num_bytes=0, filename_template=None
  )
  begin, end = bounds(info, instruction)
  return items[begin:end]


def bounds(info: 'tfds.core.SplitInfo', instruction: str) -> tuple[int, int]:
  """Returns (begin, end) of a slice of a tfds.core.SplitInfo, rounded as in TFDS.

  Raises ValueError if it is empty or exceeds the split.
  """
  count = info.num_examples
  split = f'{info.name}{instruction}'
  if folds.parse(instruction) is not None:
    raise ValueError(
      f"split '{split}': only folders of images, manifests, Parquet files and data sets of "
      f"the Hugging Face Hub have folds; use a slice, such as '{info.name}[:90%]' "
      '(config.pp, config.evals)'
    )
  remedy = (
    f"'{info.name}' has {console.pluralize(count, 'example')} (config.pp, config.evals)"
  )
  try:
    # Under another name, since TFDS does not accept '.'.
    spec = tfds.core.ReadInstruction.from_spec(f'train{instruction}')
    [absolute] = spec.to_absolute({'train': info})
  except (ValueError, AssertionError) as e:
    reason = str(e).strip().splitlines()[-1]
    raise ValueError(f"split '{split}' cannot be sliced: {reason} {remedy}") from e
  begin = absolute.from_ or 0
  end = count if absolute.to is None else absolute.to
  if begin >= end:
    raise ValueError(f"split '{split}' is empty, from {begin} to {end}: {remedy}")
  return begin, end


def overlap(a: str, b: str) -> bool:
  """Returns whether two splits of large data sets overlap."""
  for (base_a, part_a), (base_b, part_b) in itertools.product(parts(a), parts(b)):
    if base_a == base_b and _parts_overlap(part_a, part_b):
      return True
  return False


def _parts_overlap(a: str, b: str) -> bool:
  """Returns whether two slices or folds of a large split overlap."""
  fold_a, fold_b = folds.parse(a), folds.parse(b)
  if fold_a is not None and fold_b is not None:
    return fold_a.overlaps(fold_b)
  if fold_a is not None or fold_b is not None:
    return True
  range_a, range_b = (take(range(_LARGE), 'train', part) for part in (a, b))
  return range_a.start < range_b.stop and range_b.start < range_a.stop
