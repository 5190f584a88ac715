"""Batches as a pure function of (config, step): source, order, example, batch.

Example i of a run (i = step * batch + row) belongs to epoch e = i // n. A
permutation seeded by (seed, e) selects one of the n examples, and (seed, i)
determines its augmentation. Nothing is buffered for shuffling, a resumed run
sees the batches that it would have seen without interruption, and the global
batch does not depend on the number of hosts: each host reads its own rows.

Evaluation visits every example once: the last batch is padded, and `mask` marks
the real rows.

A task turns a record into an example by its function `example(record, seed)`.
The record holds the features of one example that the task requested from the
source, with images as the contents of their files; and `index`, int64 scalar, the
number of the example within its split. The seed is int64 [2] in training and
determines all random numbers; it is None in evaluation. The function returns a
dict of tensors of static shapes.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import os
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
import ml_collections
import numpy as np

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data import (
  balance,
  feeding,
  folder,
  manifest,
  order,
  parquet,
  pixel_statistics,
  records,
  sources,
)
from vit_jax.data.images import images
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import processes, sharding
from vit_jax.run import config as run_config

Batch = dict[str, jax.Array]  # The arrays of examples by name, [B, ...].
_CALLS = os.cpu_count() or 1  # Images decoded at a time.
_HEADERS = 64  # Image headers read at a time.
_FEW = 8  # So few examples are prepared without a pipeline, which starts in 0.2 s.


def get_dataset_info(dataset: str, split: str) -> dict:
  """Returns the sizes and classes of a TFDS data set or a folder.

  A dict with `num_examples`, `num_classes`, `class_names`, `int2str`, which maps the
  number of a class to its name, and `examples_glob`, a pattern for the files of a
  split that is a folder of classes, else None. Raises ValueError or
  FileNotFoundError if there is no such data set or split.
  """
  config = common.set_dataset(common.get_config(), dataset)
  is_folder = folder.is_folder(dataset)
  names = None
  if is_folder and split != '.':
    names = sources.open_split(config, config.pp.train).class_names
  source = sources.open_split(config, split, class_names=names)
  return {
    'num_examples': source.num_examples,
    'num_classes': len(source.class_names),
    'class_names': source.class_names,
    'int2str': lambda i: source.class_names[i],
    'examples_glob': _examples_glob(dataset.rstrip('/'), split) if is_folder else None,
  }


def get_tfds_info(dataset: str, split: str) -> dict:
  """Returns the sizes and classes of a TFDS data set, see get_dataset_info."""
  return get_dataset_info(dataset, split)


def get_directory_info(directory: str) -> dict:
  """Returns the sizes and classes of a folder, see `get_dataset_info`.

  The folder is `directory/<class>/<image>`, or has a split `train`, which is counted.
  """
  return get_dataset_info(directory, _split_of(directory, 'train'))


def _examples_glob(root: str, split: str) -> str | None:
  """Returns a pattern for the files of a split of class folders, else None."""
  top = root if split == '.' else f'{root}/{split}'
  if manifest.exists(root, split) or parquet.exists(root, split):
    return None
  return f'{top}/*/*' if tf.io.gfile.isdir(top) else None


def _split_of(directory: str, split: str) -> str:
  """Returns `split` if a folder has a split of that name, else '.'."""
  top = os.path.join(directory, split)
  if not tf.io.gfile.isdir(directory):
    raise FileNotFoundError(
      f"directory='{directory}' is not a folder that exists: use a folder with "
      '<class>/<image>'
    )
  if any(kind.exists(directory, split) for kind in (manifest, parquet)):
    return split
  # Otherwise `top` may be a class of that name.
  is_split = tf.io.gfile.isdir(top) and folder.has_labels(directory, split)
  return split if is_split else '.'


def get_datasets(
  config: ml_collections.ConfigDict,
) -> tuple['tf.data.Dataset', 'tf.data.Dataset']:
  """Returns the training and the test data of a config, as tf.data.

  Each element is a dict with `image`, float32 [B, height, width, channels] in
  [-1, 1], and `label`, float32 [B, classes]. The training data are infinite. The
  test data have every example once and a smaller last batch, so that a mean over
  all rows is exact; their `mask`, float32 [B], is all ones. With several processes,
  B counts the rows of this process, all test batches have the same size, and `mask`
  is 0 for the rows that pad the last batch.

  Raises ValueError or FileNotFoundError if the config or the data are wrong.
  """
  config = pixel_statistics.resolve(run_config.complete(config))
  train = sources.open_split(config, config.pp.train)
  if config.sampling == 'balanced':
    train = balance.balanced(train, balance.labels(config, train))
  test = sources.open_split(config, config.pp.test, class_names=train.class_names)
  return _dataset(config, 'train', train), _dataset(config, 'test', test)


def get_data_from_tfds(
  *, config: ml_collections.ConfigDict, mode: str
) -> 'tf.data.Dataset':
  """Returns the data of a config for 'train' or 'test', see `get_datasets`."""
  _check_mode(mode)
  return get_datasets(config)[mode == 'test']


def get_data_from_directory(
  *, config: ml_collections.ConfigDict, directory: str, mode: str
) -> 'tf.data.Dataset':
  """Returns the images of a folder of classes, see `get_datasets`.

  `directory` is `directory/<class>/<image>`, or has the splits `train` and `test`, of
  which `mode` selects one. The config's `dataset` and splits are not read.
  """
  _check_mode(mode)
  config = run_config.complete(config)
  config.dataset = directory
  split = _split_of(directory, mode)
  if split == '.':
    return _dataset(config, mode, sources.open_split(config, split))
  config.pp.train, config.pp.test = 'train', 'test'
  return get_data_from_tfds(config=config, mode=mode)


def _check_mode(mode: str) -> None:
  if mode not in ('train', 'test'):
    raise ValueError(f"mode='{mode}' is unknown: use 'train' or 'test'")


def _dataset(
  config: ml_collections.ConfigDict, mode: str, source: records.Source
) -> 'tf.data.Dataset':
  """Returns a split in the form of `get_datasets`."""
  run_config.check_preprocessing(config.pp)
  mesh = sharding.make_mesh({'data': -1})
  example = labelled_example(config, len(source.class_names))
  if mode == 'train':
    rows = sharding.local_rows(mesh, config.batch)
    data = train_dataset(config, source, example, rows)
    length = tf.data.INFINITE_CARDINALITY
  else:
    rows = sharding.local_rows(mesh, config.batch_eval)
    count = source.evaluated.num_examples
    padded = count % config.batch_eval and jax.process_count() == 1

    def without_padding(batch: dict[str, 'tf.Tensor']) -> dict[str, 'tf.Tensor']:
      real = batch['mask'] > 0
      tensors = {key: batch[key] for key in ('image', 'label', 'mask')}
      if not padded:
        return tensors
      return {key: tf.boolean_mask(x, real) for key, x in tensors.items()}

    data = eval_dataset(config, source, example, rows).map(without_padding)
    length = -(-count // config.batch_eval)
  # tf.data cannot infer the number of batches here.
  return data.apply(tf.data.experimental.assert_cardinality(length))


def prefetch(dataset: 'tf.data.Dataset', n_prefetch: int) -> Iterator[dict]:
  """Yields the batches of tf.data as arrays, split over all devices.

  The elements of `dataset` are dicts of arrays [B, ...], the rows of this process,
  of which `n_prefetch` are kept ready. A batch that the devices do not divide evenly,
  such as the last one of a test set, is copied to every device.
  """
  mesh = sharding.make_mesh({'data': -1})
  return feeding.on_devices(dataset.as_numpy_iterator(), mesh, n_prefetch)


def labelled_example(config: ml_collections.ConfigDict, num_classes: int) -> Callable:
  """Returns the function `example` of a classifier, see the top; reads `pp`.

  Its records have 'image', 'label' and possibly 'soft_label', the probability of
  each class, or all 0 if unknown. It returns `image`, float32 [height, width,
  channels] in [-1, 1], and `label`, float32 [classes]: the soft label if there is
  one, else 0 or 1.
  """

  @no_autograph
  def example(
    record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    image = preprocess.prepare(record['image'], seed, config.pp)
    label = _many_hot(record['label'], num_classes)
    if 'soft_label' in record:
      soft = tf.ensure_shape(record['soft_label'], [num_classes])
      label = tf.where(tf.reduce_any(soft > 0), soft, label)
    return {'image': image, 'label': label}

  return example


def train_dataset(
  config: ml_collections.ConfigDict,
  source: records.Source,
  example: Callable,
  rows: np.ndarray,
  start_step: int = 0,
) -> 'tf.data.Dataset':
  """Returns the infinite training batches from a step on, see the top.

  They are dicts of the tensors of `example`, [B, ...] each. `rows`, int [B], are the
  rows of the global batch that this process reads.
  """
  read = no_autograph(source.read)

  def make(position: 'tf.Tensor', record: records.Record) -> dict[str, 'tf.Tensor']:
    seed = tf.stack([tf.cast(config.seed, tf.int64), position])
    return example(read(record), seed)

  data = order.training_records(config, source, rows, start_step)
  return _batches(data.map(make, num_parallel_calls=_CALLS), len(rows))


def eval_dataset(
  config: ml_collections.ConfigDict,
  source: records.Source,
  example: Callable,
  rows: np.ndarray,
  numbers: np.ndarray | None = None,
) -> 'tf.data.Dataset':
  """Returns every example of a split once, in padded batches.

  See `train_dataset`; `numbers`, int64 [n], are the examples to return, by
  default all. The batches also have `mask`, float32 [B], and `index`, int32 [B],
  the number of the example. Padding has mask 0 and index -1, and comes last.
  """
  source = source.evaluated
  numbers = np.arange(source.num_examples) if numbers is None else numbers
  begins = np.arange(0, len(numbers), config.batch_eval)
  positions = (begins[:, None] + rows).reshape(-1)
  real = numbers[positions[positions < len(numbers)]].astype(np.int64)
  read = no_autograph(source.read)

  def make(record: records.Record) -> dict[str, 'tf.Tensor']:
    tensors = example(read(record), None)
    index = tf.cast(record['index'], tf.int32)
    return {**tensors, 'mask': tf.ones([]), 'index': index}

  data = order.map_batched(
    source,
    tf.data.Dataset.from_tensor_slices(real).batch(len(rows)),
    lambda index: {'index': index, **source.lookup(index)},
  ).map(make, num_parallel_calls=_CALLS)
  if source.tolerant:
    data = data.ignore_errors()
  padding = {
    name: tf.zeros(spec.shape, spec.dtype) for name, spec in data.element_spec.items()
  }
  padding['index'] = tf.constant(-1)
  padding = tf.data.Dataset.from_tensors(padding).repeat()
  return _batches(data.concatenate(padding).take(len(positions)), len(rows))


def _batches(data: 'tf.data.Dataset', size: int) -> 'tf.data.Dataset':
  options = tf.data.Options()
  options.deterministic = True
  # The end of the iterator, hence of the program, would wait for the autotuning
  # thread, which sleeps for up to a minute. One call per core is as fast.
  options.autotune.enabled = False
  return data.batch(size, drop_remainder=True).prefetch(1).with_options(options)


def _many_hot(label: 'tf.Tensor', num_classes: int) -> 'tf.Tensor':
  """Turns label ids [L], padded with -1, into float32 [num_classes]."""
  message = (
    f'a label is out of range: the data set has {num_classes} class names, so '
    f'labels must be 0 to {num_classes - 1}'
  )
  # tf.debugging.Assert would build a branch.
  check = tf.raw_ops.Assert(
    condition=tf.reduce_all((label >= -1) & (label < num_classes)),
    data=[message, label],
  )
  with tf.control_dependencies([check]):
    counts = tf.reduce_sum(tf.one_hot(label, num_classes), axis=0)
    return tf.minimum(counts, 1)


def train_batches(
  config: ml_collections.ConfigDict,
  source: records.Source,
  example: Callable,
  mesh: jax.sharding.Mesh,
  start_step: int = 0,
) -> Iterator[dict]:
  """Yields the batches of `train_dataset` as global arrays, split over a mesh.

  Raises ValueError if an image cannot be decoded or a label is out of range.
  """
  rows = sharding.local_rows(mesh, config.batch)

  def indices(number: int) -> np.ndarray:
    positions = (start_step + number) * config.batch + rows
    return order.training_indices(source, positions, config.seed)

  data = train_dataset(config, source, example, rows, start_step)
  batches = feeding.read(data, source, indices, example)
  return feeding.on_devices(batches, mesh, config.prefetch)


def eval_batches(
  config: ml_collections.ConfigDict,
  source: records.Source,
  example: Callable,
  mesh: jax.sharding.Mesh,
  numbers: np.ndarray | None = None,
) -> Iterator[dict]:
  """Yields the batches of `eval_dataset` like `train_batches`."""
  source = source.evaluated
  rows = sharding.local_rows(mesh, config.batch_eval)
  numbers = np.arange(source.num_examples) if numbers is None else numbers

  def indices(number: int) -> np.ndarray:
    positions = number * config.batch_eval + rows
    return numbers[positions[positions < len(numbers)]]

  data = eval_dataset(config, source, example, rows, numbers)
  batches = feeding.read(data, source, indices, example)
  return feeding.on_devices(batches, mesh, config.prefetch)


class Part(NamedTuple):
  """Examples of a split that have the same shapes."""

  numbers: np.ndarray | None  # Numbers of the examples, int64 [n]; None for all.
  example: Callable  # (record, None) -> dict of tensors, see the top.
  image_size: tuple[int, int] | None = None  # None: the usual one.


def part_batches(
  config: ml_collections.ConfigDict,
  source: records.Source,
  parts: Sequence[Part],
  mesh: jax.sharding.Mesh,
  size: Callable[[Part, int], int] | None = None,
) -> Iterator[dict]:
  """Yields every example of some parts of a split once.

  All processes yield batches of the same shapes in the same order.

  For predictions, `size` maps a part and its number of examples to the rows per
  batch, rounded up to a multiple of the batch shards; by default
  `config.batch_eval`, or fewer for a part of fewer examples.
  """
  source = source.evaluated
  shards = sharding.batch_shards(mesh)
  config = config.copy_and_resolve_references()
  most = config.batch_eval
  for part in (Part(*part) for part in parts):
    is_whole = part.numbers is None
    numbers: np.ndarray = np.arange(source.num_examples) if is_whole else part.numbers
    rows = min(most, len(numbers)) if size is None else size(part, len(numbers))
    config.batch_eval = -(-rows // shards) * shards
    if size is None and is_whole:
      config.batch_eval = most
    few = size is not None and len(numbers) <= _FEW and not mesh.is_multi_process
    if few and not source.tolerant:
      batches = _few_batches(config.batch_eval, source, part.example, numbers)
      yield from feeding.on_devices(batches, mesh, 1)
    else:
      yield from eval_batches(config, source, part.example, mesh, numbers)


def _few_batches(
  size: int, source: records.Source, example: Callable, numbers: np.ndarray
) -> Iterator[dict]:
  """Yields the batches of `eval_dataset` for few examples, without a pipeline."""

  def make(number: int) -> dict[str, Any]:
    tensors = _one(source, lambda record: example(source.read(record), None), number)
    return {**tensors, 'mask': np.float32(1), 'index': np.int32(number)}

  for begin in range(0, len(numbers), size):
    rows = [make(number) for number in numbers[begin : begin + size]]
    padding = jax.tree.map(np.zeros_like, rows[0])
    padding['index'] = np.int32(-1)
    rows += [padding] * (size - len(rows))
    yield jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


def _one(source: records.Source, function: Callable, number: int) -> dict:
  """Applies a function to the record with a number; returns NumPy arrays."""
  index = tf.constant(number, tf.int64)
  try:
    tensors = function({'index': index, **source.record(index)})
  except tf.errors.OpError as e:
    feeding.explain(e, source, [number])
  return {name: value.numpy() for name, value in tensors.items()}


def task_batches(
  task: Any, source: records.Source, mesh: jax.sharding.Mesh
) -> Iterator[dict]:
  """Yields every example of a split once, in the parts chosen by a task."""
  parts = task.parts(source.evaluated)
  return part_batches(task.config, source, parts, mesh)


@functools.lru_cache(maxsize=8)
def image_shapes(source: records.Source, upright: bool = False) -> np.ndarray:
  """Returns height and width of the images of a split, int64 [n, 2].

  They are as stored, or `upright`, by the EXIF orientation. All processes must call it:
  unless the source knows the shapes, each reads the headers of some images. Raises
  ValueError or OSError, the same on all processes, if an image cannot be read.
  """
  known_shapes = source.shapes(upright)
  if known_shapes is not None:
    return known_shapes
  local_numbers = np.arange(
    jax.process_index(), source.num_examples, jax.process_count()
  )

  def indices(number: int) -> np.ndarray:
    start = number * _HEADERS
    return local_numbers[start : start + _HEADERS]

  def shape(record: records.Record) -> dict[str, 'tf.Tensor']:
    shape_of = images.upright_shape_of if upright else images.shape_of
    return {'shape': shape_of(source.read(record)['image'])}

  def read() -> np.ndarray:
    shapes = np.zeros((source.num_examples, 2), np.int64)  # 0: read by another process.
    if len(local_numbers) <= _FEW:
      for number in local_numbers:
        shapes[number] = _one(source, shape, number)['shape']
      return shapes
    numbers = tf.data.Dataset.from_tensor_slices(local_numbers).batch(_HEADERS)
    data = order.map_batched(source, numbers, source.lookup)
    batches = data.map(shape, num_parallel_calls=_CALLS).batch(_HEADERS)
    for number, batch in enumerate(feeding.read(batches, source, indices)):
      shapes[indices(number)] = batch['shape']
    return shapes

  shapes = processes.attempt_local('reading the sizes of the images', read)
  if jax.process_count() > 1:
    shapes = multihost_utils.process_allgather(shapes.astype(np.int32)).sum(0)
  return shapes.astype(np.int64)
