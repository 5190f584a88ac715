"""The 19 tasks of VTAB-1k (arXiv 1910.04867) as data sets 'vtab/<task>'.

Each task is a TFDS data set with a label, and with these splits:

train800         the first 800 training examples
val200           200 other examples, on which to choose settings
train800val200   both together, to train on for the score
test             all test images

They can be used like any other data set, as in --config.dataset=vtab/clevr_count.
"""

from collections.abc import Sequence
import importlib.util
from typing import Any

import ml_collections

from vit_jax.data import records, slices
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import builders, parsing, splits, vtab_tasks


class Reader(parsing.Reader):
  """Reads the image and the label of a task, or one of them."""

  def __init__(
    self,
    info: Any,
    task: vtab_tasks.Task,
    names: Sequence[str] = ('image', 'label'),
  ) -> None:
    self._task = task
    reads: list[str] = []
    if 'image' in names:
      reads.append('image')
    if 'label' in names:
      reads += task.label.reads
    available = parsing.features(info)
    super().__init__(info, {name: available[name] for name in reads})
    self.features = tuple(names)
    class_names = task.label.class_names or self.names.get('label', ())
    self.names = {'label': class_names} if 'label' in names else {}

  def parse(self, serialized: 'tf.Tensor') -> records.Record:
    """Parses a record, computes its label, and scales its pixels."""
    record = super().parse(serialized)
    features = {}
    if 'image' in self.features:
      features['image'] = record['image']
      if (scale := self._task.pixel_scale) != 1:
        pixels = tf.io.decode_png(record['image']) * scale
        features['image'] = tf.io.encode_png(pixels)
    if 'label' in self.features:
      label = self._task.label
      values = [record[name] for name in label.reads]
      number = label.compute(*values)
      features['label'] = tf.reshape(tf.cast(number, tf.int64), [1])
    return features


def tfds_split(info: Any, dataset: str, split: str) -> str:
  """Returns a split of a task, such as 'train800', in the notation of TFDS."""
  train, val, test = vtab_tasks.find_task(dataset).splits
  parts_of_splits: dict[str, list[tuple[str, int | None]]] = {
    'train800': [(train, 800)],
    'val200': [(val, 200)],
    'train800val200': [(train, 800), (val, 200)],
    'test': [(test, None)],
  }
  limited_splits: list[tuple[str, int | None]] = []
  for name in map(str.strip, split.split('+')):
    if name not in parts_of_splits:
      raise ValueError(
        f"data set '{dataset}' has no split '{name}': it has {list(parts_of_splits)}, "
        'which cannot be sliced (config.pp.train, config.pp.test, config.evals, '
        '--split)'
      )
    limited_splits += parts_of_splits[name]
  return '+'.join(_first(info, dataset, base, count) for base, count in limited_splits)


def _first(info: Any, dataset: str, split: str, count: int | None) -> str:
  """Returns the first examples of a split, or all, in the notation of TFDS."""
  [(base, instruction)] = slices.parts(split)
  split_info = splits.whole(info, dataset, base)
  if count is None:
    return split
  begin, end = slices.bounds(split_info, instruction)
  if end - begin < count:
    raise ValueError(
      f"data set '{dataset}': split '{split}' of '{info.full_name}' has "
      f'{end - begin} examples and needs {count}: prepare the data set again in '
      'another folder (config.tfds_data_dir)'
    )
  return f'{base}[{begin}:{begin + count}]'


def has_split(config: ml_collections.ConfigDict, dataset: str, base: str) -> bool:
  """Returns True: `open_split` names the splits of a task."""
  del config, dataset, base
  return True


def open_split(
  config: ml_collections.ConfigDict,
  dataset: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> records.Source:
  """Opens a split of a task; see vit_jax.data.sources.open_split."""
  del class_names  # The task has them.
  task = vtab_tasks.find_task(dataset)
  names = records.resolve(features, ('image', 'label'), f"data set '{dataset}'")
  info = builders.get_builder(config, task.dataset).info
  tfds_name = tfds_split(info, dataset, split)
  source = splits.open_with(info, dataset, tfds_name, Reader(info, task, names))
  title = f'{dataset} of {info.full_name}'
  source.origin = {'dataset': title, 'split': tfds_name}
  return source


def planned_size(config: ml_collections.ConfigDict, dataset: str) -> tuple[int, int]:
  """Returns the numbers of training examples and of classes; needs no data."""
  task = vtab_tasks.find_task(dataset)
  info = builders.find_builder(config, task.dataset).info
  examples = {'train800': 800, 'val200': 200}.get(config.pp.train, 1000)
  return examples, len(Reader(info, task).names['label'])


def missing(config: ml_collections.ConfigDict, dataset: str) -> str:
  """Returns how to get the data of a task; '' if they are on this machine."""
  task = vtab_tasks.find_task(dataset)
  builder = builders.find_builder(config, task.dataset)
  if builder.info.splits:
    return ''
  how = f'{builders.how_to_get(config, builder)} {lacking(task)}'.strip()
  return f"'{task.dataset}' is not in {builder.data_dir}: {how}"


def lacking(task: vtab_tasks.Task) -> str:
  """Returns how to install the package that TFDS needs to prepare the data, or ''."""
  if not task.module or importlib.util.find_spec(task.module):
    return ''
  package = builders.PACKAGES[task.module]
  return f'To prepare it, TFDS needs `pip install {package}`.'
