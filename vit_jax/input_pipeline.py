"""Batches as a pure function of (config, step): source, order, example, batch.

Example i of a run (i = step * batch + row) belongs to epoch e = i // n; which one
of the n examples it is follows from a permutation seeded by (seed, e), and how it
is augmented from (seed, i). So nothing is buffered to shuffle, a resumed run sees
the batches that it would have seen, and the global batch does not depend on how
many hosts read it: each reads its own rows.

Evaluation visits every example once: the last batch is padded, and `mask` says
which rows count.

What becomes of an example, a task says by a function `example(record, seed)`. The
record has the features that the task asked the source for, of one example, with
images as the contents of their files, and `index`, int64 scalar, the number of
the example within its split (-1 in training from a stream, which does not tell).
The seed is int64 [2] in training, from which all that is random must follow, and
None in evaluation. The function returns tensors of static shapes, by name.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import itertools
import os

import jax
import numpy as np
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data import folder
from vit_jax.data import images
from vit_jax.data import mixture
from vit_jax.data import sources
from vit_jax.run import config as run_config
from vit_jax.scale import sharding

# Images decoded at a time.
_CALLS = os.cpu_count() or 1


def get_dataset_info(dataset: str, split: str) -> dict:
  """Returns what is known of a data set.

  Args:
    dataset: a TFDS name, or a folder as vit_jax/data/folder.py or manifest.py
      says.
    split: the split to count, as TFDS writes it.

  Returns:
    A dict with `num_examples`, `num_classes`, `class_names`, and `int2str`, a
    function from the number of a class to its name.

  Raises:
    ValueError, FileNotFoundError: if there is no such data set or split.
  """
  config = common.set_dataset(common.get_config(), dataset)
  class_names = None
  if folder.is_folder(dataset):
    class_names = sources.open_split(config, config.pp.train).class_names
  source = sources.open_split(config, split, class_names=class_names)
  return {
    'num_examples': source.num_examples,
    'num_classes': len(source.class_names),
    'class_names': source.class_names,
    'int2str': lambda i: source.class_names[i],
  }


def get_datasets(config):
  """Returns the training and the test data of a config, as tf.data.

  Args:
    config: `dataset`, `pp`, `batch`, `batch_eval`, `seed` and the other keys of
      vit_jax.configs.common.

  Returns:
    (ds_train, ds_test). Each element is a dict with `image`, float32 [B, height,
    width, channels] in [-1, 1], and `label`, float32 [B, classes]; that of
    ds_test also has `mask`, float32 [B], which is 0 for padding. ds_train does
    not end. In a run of many processes B counts the rows of this one.

  Raises:
    ValueError, FileNotFoundError: where the config or the data are not right.
  """
  config = run_config.complete(config)
  preprocess.check(config.pp)
  mesh = sharding.make_mesh({'data': -1})
  train = sources.open_split(config, config.pp.train)
  test = sources.open_split(
    config, config.pp.test, class_names=train.class_names
  )
  example = labelled_example(config, len(train.class_names))
  train_rows = sharding.local_rows(mesh, config.batch)
  test_rows = sharding.local_rows(mesh, config.batch_eval)
  return (
    train_dataset(config, train, example, train_rows),
    eval_dataset(config, test, example, test_rows).map(
      lambda batch: {key: batch[key] for key in ('image', 'label', 'mask')}
    ),
  )


def get_data_from_tfds(*, config, mode: str) -> tf.data.Dataset:
  """Returns the training or the test data of a config, see `get_datasets`.

  Args:
    config: see `get_datasets`.
    mode: 'train' or 'test'.

  Raises:
    ValueError, FileNotFoundError: see `get_datasets`; on an unknown mode.
  """
  if mode not in ('train', 'test'):
    raise ValueError(f"mode='{mode}' is unknown: use 'train' or 'test'")
  return get_datasets(config)[mode == 'test']


def get_data_from_directory(
  *, config, directory: str, mode: str
) -> tf.data.Dataset:
  """The same for a folder with train/<class>/* and test/<class>/*."""
  config = run_config.complete(config)
  config.dataset = directory
  config.pp.train, config.pp.test = 'train', 'test'
  return get_data_from_tfds(config=config, mode=mode)


def get_directory_info(directory: str) -> dict:
  """Returns what is known of the training images of a folder.

  See `get_dataset_info`.
  """
  return get_dataset_info(directory, 'train')


def prefetch(dataset: tf.data.Dataset, n_prefetch: int) -> Iterator[dict]:
  """Yields the batches of tf.data as arrays, split over all devices.

  Args:
    dataset: elements are dicts of arrays [B, ...], the rows of this process.
    n_prefetch: batches kept ready on the devices.
  """
  mesh = sharding.make_mesh({'data': -1})
  return _on_devices(dataset.as_numpy_iterator(), mesh, n_prefetch)


def labelled_example(config, num_classes: int) -> Callable:
  """Returns what a classifier makes of an example.

  Args:
    config: reads `pp`.
    num_classes: number of classes.

  Returns:
    example(record, seed), of records with 'image' and 'label', as the module's
    text says; it returns `image`, float32 [height, width, channels] in [-1, 1],
    and `label`, float32 [classes], 0 or 1.
  """

  def example(record, seed):
    image = preprocess.prepare(record['image'], seed, config.pp)
    return {'image': image, 'label': _many_hot(record['label'], num_classes)}

  return example


def train_dataset(
  config, source, example: Callable, rows: np.ndarray, start_step: int = 0
) -> tf.data.Dataset:
  """Returns the training batches from a step on, without end.

  Args:
    config: reads `batch`, `seed`, `shuffle_buffer`.
    source: the training split.
    example: (record, seed) -> tensors by name, see the module's text.
    rows: the rows of the global batch that this process reads.
    start_step: number of the first batch.

  Returns:
    tf.data of dicts of what `example` returns, [B, ...] each.
  """

  def make(position, record):
    seed = tf.stack([tf.cast(config.seed, tf.int64), position])
    return example(source.read(record), seed)

  records = mixture.training_records(config, source, rows, start_step)
  return _batches(records.map(make, num_parallel_calls=_CALLS), len(rows))


def eval_dataset(
  config, source, example: Callable, rows: np.ndarray
) -> tf.data.Dataset:
  """Returns every example of a split once, in batches padded at the end.

  Args:
    config: reads `batch_eval`.
    source: the split.
    example: (record, None) -> tensors by name, see the module's text.
    rows: the rows of the global batch that this process reads.

  Returns:
    tf.data of dicts of what `example` returns, [B, ...] each; and `mask`,
    float32 [B], and `index`, int32 [B], the number of the example: 0 and -1 for
    padding.
  """
  source = source.evaluated
  steps = -(-source.num_examples // config.batch_eval)
  positions = np.arange(steps)[:, None] * config.batch_eval + rows
  positions = positions.reshape(-1).astype(np.int64)
  real = positions[positions < source.num_examples]

  if source.random_access:
    indices = tf.data.Dataset.from_tensor_slices(real).batch(len(rows))
    records = indices.map(
      lambda index: {'index': index, **source.lookup(index)}
    ).unbatch()
  else:
    mine = tf.constant(rows, tf.int64)
    records = (
      source.stream(1, 0, shuffle_buffer=0, seed=0)
      .enumerate()
      .filter(lambda i, _: tf.reduce_any(i % config.batch_eval == mine))
      .map(lambda index, record: {'index': index, **record})
    )

  def make(record):
    made = example(source.read(record), None)
    index = tf.cast(record['index'], tf.int32)
    return {**made, 'mask': tf.ones([]), 'index': index}

  data = records.map(make, num_parallel_calls=_CALLS)
  padding = {
    name: tf.zeros(spec.shape, spec.dtype)
    for name, spec in data.element_spec.items()
  }
  padding['index'] = tf.constant(-1)
  data = data.concatenate(
    tf.data.Dataset.from_tensors(padding).repeat(len(positions) - len(real))
  )
  return _batches(data, len(rows))


def _batches(data, size):
  options = tf.data.Options()
  options.deterministic = True
  # The thread that tunes a pipeline sleeps for up to a minute, and the end of
  # the iterator, hence of the program, waits for it. One call a core is as fast.
  options.autotune.enabled = False
  return data.batch(size, drop_remainder=True).prefetch(1).with_options(options)


def _many_hot(label, num_classes):
  """Turns label ids [L], padded with -1, into float32 [num_classes]."""
  message = (
    'a label is out of range: the data set names '
    f'{num_classes} classes, labels must be 0 to {num_classes - 1}'
  )
  with tf.control_dependencies(
    [
      tf.debugging.assert_less(label, tf.cast(num_classes, tf.int64), message),
      tf.debugging.assert_greater_equal(label, tf.cast(-1, tf.int64), message),
    ]
  ):
    counts = tf.reduce_sum(tf.one_hot(label, num_classes), axis=0)
    return tf.minimum(counts, 1)


def train_batches(
  config, source, example: Callable, mesh, start_step: int = 0
) -> Iterator[dict]:
  """Yields training batches from a step on, as global arrays, without end.

  Args:
    config: reads `batch`, `seed`, `prefetch`, `shuffle_buffer`.
    source: the training split.
    example: (record, seed) -> tensors by name, see the module's text.
    mesh: the mesh, over whose batch axes the rows are split.
    start_step: number of the first batch.

  Raises:
    ValueError: if an image cannot be decoded or a label is out of range.
  """
  rows = sharding.local_rows(mesh, config.batch)

  def indices(number):
    positions = (start_step + number) * config.batch + rows
    return mixture.training_indices(source, positions, config.seed)

  data = train_dataset(config, source, example, rows, start_step)
  return _on_devices(_read(data, source, indices), mesh, config.prefetch)


def eval_batches(config, source, example: Callable, mesh) -> Iterator[dict]:
  """Yields every example of a split once, as global arrays.

  Args:
    config: reads `batch_eval`, `prefetch`.
    source: the split.
    example: (record, None) -> tensors by name, see the module's text.
    mesh: the mesh, over whose batch axes the rows are split.

  Raises:
    ValueError: if an image cannot be decoded or a label is out of range.
  """
  source = source.evaluated
  rows = sharding.local_rows(mesh, config.batch_eval)

  def indices(number):
    positions = number * config.batch_eval + rows
    return positions[positions < source.num_examples]

  data = eval_dataset(config, source, example, rows)
  return _on_devices(_read(data, source, indices), mesh, config.prefetch)


def _on_devices(batches, mesh, prefetch):
  """Sends `prefetch` batches ahead of their use."""
  split = sharding.batch_sharding(mesh)
  placed = (
    {
      key: jax.make_array_from_process_local_data(split, value)
      for key, value in batch.items()
    }
    for batch in batches
  )
  ready = collections.deque(itertools.islice(placed, max(1, prefetch)))
  while ready:
    yield ready.popleft()
    ready.extend(itertools.islice(placed, 1))


def _read(data, source, indices):
  """Iterates over tf.data, and makes its errors name the image at fault.

  Args:
    data: tf.data.
    source: the split that it reads.
    indices: function from the number of a batch to the indices of its examples.
  """
  count = 0
  try:
    for batch in data.as_numpy_iterator():
      yield batch
      count += 1
  except tf.errors.OpError as e:
    for index in indices(count):
      part, number = source.locate(int(index))
      if index < 0 or not part.random_access or 'image' not in part.features:
        continue
      record = part.lookup(tf.constant([number], tf.int64))
      record = {name: value[0] for name, value in record.items()}
      try:
        images.decode(part.read(record)['image'])
      except images.DECODE_ERRORS as cause:
        raise ValueError(
          f"image '{part.name(number)}' cannot be decoded: "
          f'{images.first_line(cause)}. Mend or delete it; '
          '--config.broken_images=skip leaves such images of a folder out'
        ) from None
    raise ValueError(f'reading the data failed: {images.first_line(e)}') from e
