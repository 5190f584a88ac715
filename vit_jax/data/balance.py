"""Balanced sampling, and how often each class occurs in the training data.

With `config.sampling='balanced'`, a run of C classes consists of rounds of C
positions, each of which has one example of every class, in an order drawn from (seed,
round). Round r draws from a class of n examples element r mod n of the permutation drawn
from (seed, class, r // n), so all of its examples are seen before one repeats. As in
vit_jax/data/order.py, the example is a pure function of the position.
"""

import copy
import functools
import json

from absl import logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import ml_collections
import numpy as np

from vit_jax import console
from vit_jax.data import feeding, mixture, order, records, sources
from vit_jax.data.images import image_files
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import files, processes

_FILE = 'labels.npz'  # In the workdir.
_BATCH = 1024  # Labels read at a time.
# Rounds of the shuffle. Each leaves a pair of elements in place with probability 1/2.
_ROUNDS = 64


def labels(
  config: ml_collections.ConfigDict,
  source: records.Source,
  workdir: epath.PathLike | None = None,
) -> np.ndarray:
  """Returns the classes of the training examples, int [n, L], padded with -1.

  All processes must call it. Unless the source knows them, or the workdir has them from
  an earlier start, each process reads its share, without images.
  """
  if isinstance(source, mixture.MixtureSource):
    raise ValueError(
      f'the mixture {mixture.describe(config.dataset)} already decides how often images '
      'are drawn: to balance classes, train on one data set (config.dataset)'
    )
  if 'label' not in source.features:
    raise ValueError(
      f"the training data '{config.dataset}' have no class labels to balance: use "
      'labelled data (config.sampling, config.class_weights)'
    )
  numbers = source.labels()
  if numbers is None and workdir is not None:
    numbers = _stored(epath.Path(workdir) / _FILE, source)
  return _read(config, source) if numbers is None else numbers


def counts(numbers: np.ndarray, class_names: tuple[str, ...]) -> np.ndarray:
  """Returns the number of examples of each class, int64 [classes].

  `numbers` is the result of `labels`; ValueError if a class has no examples.
  """
  totals = np.bincount(numbers[numbers >= 0], minlength=len(class_names))
  if not totals.all():
    missing = [class_names[i] for i in np.flatnonzero(totals == 0)]
    raise ValueError(
      f'the training data have no example of class {missing[0]!r} ({len(missing)} of '
      f'{len(class_names)} classes have none), so classes cannot be balanced: add images '
      'of each, or pass class weights as a dict (config.class_weights, '
      'config.sampling, config.task_options.logit_adjustment)'
    )
  return totals


def balanced(source: records.Source, numbers: np.ndarray) -> records.Source:
  """Returns a source whose classes are drawn equally often in training.

  `numbers` is the result of `labels`; ValueError if an example has several classes, or
  a class no examples.
  """
  num_labels = (numbers >= 0).sum(axis=1)
  if (num_labels > 1).any():
    number = int(num_labels.argmax())
    raise ValueError(
      f"sampling='balanced' needs one class per image, and '{source.name(number)}' has "
      f'{num_labels[number]}: use --config.sampling=uniform with '
      '--config.class_weights=balanced'
    )
  totals = counts(numbers, source.class_names)
  if unlabelled := int((num_labels == 0).sum()):
    logging.warning(
      "sampling='balanced' leaves out %s without a label",
      console.pluralize(unlabelled, 'training image'),
    )
  source = copy.copy(source)
  source.order = Order(numbers.max(axis=1), totals)
  return source


class Order:
  """The example at each position of a run, see the top.

  `classes`, int [n], are the classes of the examples, -1 for none; `totals`, int64 [C],
  the number of examples of each, all above 0.
  """

  def __init__(self, classes: np.ndarray, totals: np.ndarray) -> None:
    sorted_examples = np.argsort(classes, kind='stable')
    self._examples = sorted_examples[len(classes) - totals.sum() :]
    self._totals = totals
    self._begins = np.cumsum(totals) - totals

  def __call__(self, positions: np.ndarray, seed: int) -> np.ndarray:
    """Returns the numbers of the examples at positions [b] of a run, int64 [b]."""
    num_classes = np.int64(len(self._totals))
    rounds, slots = np.divmod(np.asarray(positions, np.int64), num_classes)
    classes = permuted(slots, num_classes, _keys(seed, 0, rounds))
    epochs, places = np.divmod(rounds, self._totals[classes])
    keys = _keys(seed, classes + 1, epochs)
    return self._examples[
      self._begins[classes] + permuted(places, self._totals[classes], keys)
    ]


def permuted(
  values: np.ndarray, sizes: np.ndarray | np.int64, keys: np.ndarray
) -> np.ndarray:
  """Permutes values, int64 [b], of 0 to `sizes` - 1 each, by the swap-or-not shuffle.

  Hoang, Morris and Rogaway (2012), "An enciphering scheme based on a card shuffle".
  Each round pairs x with k - x, and swaps the pair or not by a bit of a hash. `keys`,
  uint64 [b], choose the permutation of each value.
  """
  for _ in range(_ROUNDS):
    keys = _hash(keys)
    offsets = (keys % np.uint64(sizes)).astype(np.int64)
    partners = (offsets - values) % sizes
    pairs = np.maximum(values, partners).astype(np.uint64)
    is_swapped = _hash(keys ^ pairs) & np.uint64(1)
    values = np.where(is_swapped, partners, values)
  return values


def _keys(seed: int, stream: np.ndarray | int, epochs: np.ndarray) -> np.ndarray:
  """Returns keys of permutations, uint64 [b]; streams do not share their orders."""
  keys = _hash(np.uint64(seed) + np.uint64(1))
  for part in (stream, epochs):
    keys = _hash(keys ^ _hash(np.asarray(part, np.uint64) + np.uint64(1)))
  return keys


def _hash(x: np.ndarray | np.uint64) -> np.ndarray:
  """Mixes uint64 as SplitMix64 does (Steele et al., 2014)."""
  with np.errstate(over='ignore'):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- Reading labels ---


def _read(config: ml_collections.ConfigDict, source: records.Source) -> np.ndarray:
  """Reads the labels of the training split; each process reads a range of them."""
  label_source = sources.open_split(
    config, config.pp.train, ('label',), source.class_names
  )
  size = -(-source.num_examples // jax.process_count())
  begin = jax.process_index() * size
  local_numbers = np.arange(begin, min(begin + size, source.num_examples))
  read = functools.partial(_rows, label_source, local_numbers)
  rows = processes.attempt_local('reading the labels', read)
  local_width = max((row.shape[1] for row in rows), default=1)
  width = max(processes.gather('comparing the labels', local_width))
  local = np.full((size, width), -1, np.int32)
  count = 0
  for row in rows:
    local[count : count + len(row), : row.shape[1]] = row
    count += len(row)
  if jax.process_count() > 1:
    local = multihost_utils.process_allgather(local)
  return local.reshape(-1, width)[: source.num_examples]


def _rows(source: records.Source, numbers: np.ndarray) -> list[np.ndarray]:
  """Returns the labels of examples in batches, int64 [b, L], padded with -1."""
  if not len(numbers):
    return []
  data = order.map_batched(
    source, tf.data.Dataset.from_tensor_slices(numbers).batch(_BATCH), source.lookup
  )
  read = no_autograph(source.read)
  labels = data.map(lambda record: {'label': read(record)['label']})
  batches = labels.padded_batch(_BATCH, padding_values={'label': np.int64(-1)})

  def indices(number: int) -> np.ndarray:
    return numbers[number * _BATCH :][:_BATCH]

  return [batch['label'] for batch in feeding.read(batches, source, indices)]


def store(
  source: records.Source, numbers: np.ndarray | None, workdir: epath.PathLike
) -> None:
  """Writes labels that had to be read to the workdir, for the next start of the run."""
  path = epath.Path(workdir) / _FILE
  if numbers is None or source.labels() is not None or _load(path, source) is not None:
    return
  with files.replacing(path) as file:
    np.savez(file, labels=numbers, digest=_digest(numbers, source))


def _digest(numbers: np.ndarray, source: records.Source) -> str:
  """Returns a hash of labels and of the data that they are of."""
  facts = [str((numbers.dtype, numbers.shape)), json.dumps(source.fingerprint())]
  return files.digest([*map(str.encode, facts), numbers.tobytes()])


def _load(path: epath.Path, source: records.Source) -> np.ndarray | None:
  """Returns the labels in a file; None if they are damaged or of other data."""
  content = image_files.from_npz(path, dict) or {}
  if content.keys() != {'labels', 'digest'}:
    return None
  numbers = content['labels']
  if str(content['digest']) != _digest(numbers, source):
    return None
  if numbers.dtype.kind != 'i' or numbers.ndim != 2:
    return None
  if len(numbers) != source.num_examples:
    return None
  if numbers.max(initial=-1) >= len(source.class_names):
    return None
  return numbers


def _stored(path: epath.Path, source: records.Source) -> np.ndarray | None:
  """Returns the labels in a workdir, or None if any process cannot use them."""
  if not processes.from_first('looking for labels', path.exists):
    return None
  load = functools.partial(_load, path, source)
  numbers = processes.attempt_local(f"reading '{path}'", load)
  are_valid = processes.gather(f"checking '{path}'", numbers is not None)
  return numbers if all(are_valid) else None
