"""The 19 tasks of VTAB-1k (arXiv 1910.04867) as data sets 'vtab/<task>'.

Each task is a TFDS data set with a label, and with these splits:

train800         the first 800 training examples
val200           200 other examples, on which to choose settings
train800val200   both together, to train on for the score
test             all test images

They can be used like any other data set, as in --config.dataset=vtab/clevr_count.
"""

import importlib.util

from vit_jax.data import records, slices
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import builders, parsing, splits, vtab_tasks


class Reader(parsing.Reader):
  """Reads the image and the label of a task, or one of them."""

  def __init__(self, info, task: vtab_tasks.Task, wanted=('image', 'label')):
    self._task = task
    available = parsing.features(info)
    reads = [name for name in ('image',) if name in wanted]
    reads += task.label.reads if 'label' in wanted else ()
    super().__init__(info, {name: available[name] for name in reads})
    self.features = tuple(wanted)
    names = task.label.class_names or self.names.get('label')
    self.names = {'label': names} if 'label' in wanted else {}

  def parse(self, serialized) -> dict:
    """Parses a record, computes its label, and scales its pixels."""
    record, found = super().parse(serialized), {}
    if 'image' in self.features:
      found['image'] = record['image']
      if (scale := self._task.pixel_scale) != 1:
        pixels = tf.io.decode_png(record['image']) * scale
        found['image'] = tf.io.encode_png(pixels)
    if 'label' in self.features:
      label = self._task.label
      number = label.compute(*(record[name] for name in label.reads))
      found['label'] = tf.reshape(tf.cast(number, tf.int64), [1])
    return found


def tfds_split(info, dataset: str, split: str) -> str:
  """Returns a split of a task, such as 'train800', in the notation of TFDS."""
  train, val, test = vtab_tasks.find_task(dataset).splits
  known = {
    'train800': [(train, 800)],
    'val200': [(val, 200)],
    'train800val200': [(train, 800), (val, 200)],
    'test': [(test, None)],
  }
  found = []
  for part in map(str.strip, split.split('+')):
    if part not in known:
      raise ValueError(
        f"data set '{dataset}' has no split '{part}': it has {list(known)}, which "
        'cannot be sliced (config.pp.train, config.pp.test, config.evals, --split)'
      )
    found += known[part]
  return '+'.join(_first(info, dataset, *part) for part in found)


def _first(info, dataset, split, count) -> str:
  """Returns the first examples of a split, or all, in the notation of TFDS."""
  [(base, instruction)] = slices.parts(split)
  whole = splits.whole(info, dataset, base)
  if count is None:
    return split
  begin, end = slices.bounds(whole, instruction)
  if end - begin < count:
    raise ValueError(
      f"data set '{dataset}': split '{split}' of '{info.full_name}' has "
      f'{end - begin} examples and needs {count}: prepare the data set again in '
      'another folder (config.tfds_data_dir)'
    )
  return f'{base}[{begin}:{begin + count}]'


def open_split(config, dataset: str, split: str, features) -> records.Source:
  """Opens a split of a task; see vit_jax.data.sources.open_split."""
  task = vtab_tasks.find_task(dataset)
  wanted = records.resolve(features, ('image', 'label'), f"data set '{dataset}'")
  info = builders.get_builder(config, task.dataset).info
  chosen = tfds_split(info, dataset, split)
  source = splits.open_with(info, dataset, chosen, Reader(info, task, wanted))
  title = f'{dataset} of {info.full_name}'
  source.origin = {'dataset': title, 'split': chosen}
  return source


def planned_size(config, dataset: str) -> tuple[int, int]:
  """Returns the numbers of training examples and of classes; needs no data."""
  task = vtab_tasks.find_task(dataset)
  info = builders.find_builder(config, task.dataset).info
  examples = {'train800': 800, 'val200': 200}.get(config.pp.train, 1000)
  return examples, len(Reader(info, task).names['label'])


def missing(config, dataset: str) -> str:
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
