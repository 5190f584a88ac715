"""Batches as a pure function of (config, step): source, order, augment, batch.

Example i of a run (i = step * batch + row) belongs to epoch e = i // n; which one
of the n examples it is follows from a permutation seeded by (seed, e), and how it
is augmented from (seed, i). So nothing is buffered to shuffle, a resumed run sees
the batches that it would have seen, and the global batch does not depend on how
many hosts read it: each reads its own rows.

Evaluation visits every example once: the last batch is padded, and `mask` says
which rows count.
"""

import collections
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
from vit_jax.data import sources
from vit_jax.run import config as run_config
from vit_jax.scale import sharding

# Images decoded at a time.
_CALLS = os.cpu_count() or 1


def get_dataset_info(dataset: str, split: str) -> dict:
  """Returns what is known of a data set.

  Args:
    dataset: a TFDS name or a folder with train/<class>/* and test/<class>/*.
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
  source = sources.open_split(config, split, class_names)
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
  test = sources.open_split(config, config.pp.test, train.class_names)
  return (
    train_dataset(config, train, sharding.local_rows(mesh, config.batch)),
    eval_dataset(config, test, sharding.local_rows(mesh, config.batch_eval)),
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


def example_indices(positions, num_examples: int, seed: int):
  """Returns which example stands at each position of the endless run.

  Args:
    positions: int64 [b], ascending.
    num_examples: size n of an epoch.
    seed: seed of the run.

  Returns:
    int64 [b]: position i gets element i mod n of the permutation that (seed,
    i // n) draws.
  """
  epochs = positions // num_examples
  inside = positions % num_examples

  def fill(epoch, indices):
    shuffled = tf.random.experimental.index_shuffle(
      inside, tf.stack([tf.cast(seed, tf.int64), epoch]), num_examples - 1
    )
    return epoch + 1, tf.where(epochs == epoch, shuffled, indices)

  _, indices = tf.while_loop(
    lambda epoch, _: epoch <= epochs[-1], fill, [epochs[0], inside]
  )
  return indices


def train_dataset(
  config, source, rows: np.ndarray, start_step: int = 0
) -> tf.data.Dataset:
  """Returns the training batches from a step on, without end.

  Args:
    config: reads `batch`, `seed`, `pp`, `shuffle_buffer`.
    source: the training split.
    rows: the rows of the global batch that this process reads.
    start_step: number of the first batch.

  Returns:
    tf.data of dicts with `image` and `label`, as in get_datasets.
  """
  rows = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + rows)

  if source.random_access:
    records = positions.map(
      lambda i: {
        'position': i,
        **source.lookup(example_indices(i, source.num_examples, config.seed)),
      },
    ).unbatch()
  else:
    stream = source.stream(
      jax.process_count(),
      jax.process_index(),
      config.shuffle_buffer,
      config.seed,
    ).skip(start_step * len(rows))
    records = tf.data.Dataset.zip(
      {'position': positions.unbatch(), 'record': stream}
    ).map(lambda both: {'position': both['position'], **both['record']})

  def example(record):
    seed = tf.stack([tf.cast(config.seed, tf.int64), record['position']])
    return {
      'image': preprocess.decode_for_training(
        source.read(record['image']), seed, config.pp
      ),
      'label': _many_hot(record['label'], len(source.class_names)),
    }

  return _batches(records.map(example, num_parallel_calls=_CALLS), len(rows))


def eval_dataset(config, source, rows: np.ndarray) -> tf.data.Dataset:
  """Returns every example of a split once, in batches padded at the end.

  Args:
    config: reads `batch_eval`, `pp`.
    source: the split.
    rows: the rows of the global batch that this process reads.

  Returns:
    tf.data of dicts with `image`, `label` and `mask`, as in get_datasets.
  """
  steps = -(-source.num_examples // config.batch_eval)
  positions = np.arange(steps)[:, None] * config.batch_eval + rows
  positions = positions.reshape(-1).astype(np.int64)
  real = positions[positions < source.num_examples]

  if source.random_access:
    records = (
      tf.data.Dataset.from_tensor_slices(real)
      .batch(len(rows))
      .map(source.lookup)
      .unbatch()
    )
  else:
    mine = tf.constant(rows, tf.int64)
    records = (
      source.stream(1, 0, shuffle_buffer=0, seed=0)
      .enumerate()
      .filter(lambda i, _: tf.reduce_any(i % config.batch_eval == mine))
      .map(lambda _, record: record)
    )

  def example(record):
    image = images.decode(source.read(record['image']), config.pp.channels)
    return {
      'image': preprocess.for_evaluation(image, config.pp),
      'label': _many_hot(record['label'], len(source.class_names)),
      'mask': tf.ones([]),
    }

  data = records.map(example, num_parallel_calls=_CALLS)
  padding = tf.nest.map_structure(
    lambda spec: tf.zeros(spec.shape, spec.dtype), data.element_spec
  )
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
    return tf.reduce_max(tf.one_hot(label, num_classes), axis=0)


def train_batches(config, source, mesh, start_step: int = 0) -> Iterator[dict]:
  """Yields training batches from a step on, as global arrays, without end.

  Args:
    config: reads `batch`, `seed`, `pp`, `prefetch`, `shuffle_buffer`.
    source: the training split.
    mesh: the mesh, over whose batch axes the rows are split.
    start_step: number of the first batch.

  Raises:
    ValueError: if an image cannot be decoded or a label is out of range.
  """
  rows = sharding.local_rows(mesh, config.batch)

  def indices(number):
    positions = (start_step + number) * config.batch + rows
    return example_indices(
      tf.constant(positions), source.num_examples, config.seed
    ).numpy()

  data = train_dataset(config, source, rows, start_step)
  return _on_devices(_read(data, source, indices), mesh, config.prefetch)


def eval_batches(config, source, mesh) -> Iterator[dict]:
  """Yields every example of a split once, as global arrays.

  Args:
    config: reads `batch_eval`, `pp`, `prefetch`.
    source: the split.
    mesh: the mesh, over whose batch axes the rows are split.

  Raises:
    ValueError: if an image cannot be decoded or a label is out of range.
  """
  rows = sharding.local_rows(mesh, config.batch_eval)

  def indices(number):
    positions = number * config.batch_eval + rows
    return positions[positions < source.num_examples]

  data = eval_dataset(config, source, rows)
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
    for index in indices(count) if source.random_access else []:
      record = source.lookup(tf.constant([index], tf.int64))
      try:
        images.decode(source.read(record['image'][0]))
      except images.DECODE_ERRORS as cause:
        raise ValueError(
          f"image '{source.name(index)}' cannot be decoded: "
          f'{images.first_line(cause)}. Mend or delete it; '
          '--config.broken_images=skip leaves such images of a folder out'
        ) from None
    raise ValueError(f'reading the data failed: {images.first_line(e)}') from e
