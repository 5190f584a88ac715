"""Converts the files of a prepared TFDS data set to array_record.

See vit_jax/commands/convert_data.py, the command.
"""

from concurrent import futures
import os

from etils import epath
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info
from tensorflow_datasets.core import file_adapters
from tensorflow_datasets.core import utils

from vit_jax import cli
from vit_jax.data.tfds import registry
from vit_jax.data.tfds import shards
from vit_jax.data.tfds import tfrecords

_TARGET = file_adapters.FileFormat.ARRAY_RECORD


def convert(dataset: str, data_dir: str | None = None) -> epath.Path:
  """Writes array_record files of a prepared TFDS data set; returns its folder.

  Args:
    dataset: TFDS name of the data set.
    data_dir: folder where TFDS keeps data sets; by default
      ~/tensorflow_datasets.

  Raises:
    ValueError: if the data set does not exist or is not prepared, or if a file
      has a wrong number of records.
  """
  registry.register(dataset)
  try:
    builder = tfds.builder(dataset, data_dir=data_dir)
  except (tfds.core.DatasetNotFoundError, ValueError) as e:
    raise ValueError(
      f"TFDS knows no data set '{dataset}' (NAME, --data_dir): "
      f'{str(e).strip().splitlines()[0]}'
    ) from e
  info, folder = builder.info, epath.Path(builder.data_dir)
  if not info.splits:
    raise ValueError(
      f"'{folder}' holds no prepared data set: give its folder (--data_dir), or "
      'start a training, which prepares array_record files itself'
    )
  if registry.has_array_records(info):
    return folder
  adapter = file_adapters.ADAPTER_FOR_FORMAT[info.file_format]
  jobs = [job for split in info.splits.values() for job in _missing(split)]
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    running = [pool.submit(_convert_file, adapter, *job) for job in jobs]
    try:
      with cli.bar(total=len(jobs), unit='file') as bar:
        for done in futures.as_completed(running):
          done.result()
          bar.update()
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise
  info.add_alternative_file_format(_TARGET)
  path = dataset_info.dataset_info_path(folder)
  with utils.incomplete_file(path) as temporary:
    temporary.write_text(dataset_info.get_dataset_info_json(info.as_proto))
  return folder


def _missing(split):
  """Yields (file, array_record file, number of records) that remain to do."""
  here = split.filename_template
  there = here.replace(filetype_suffix=_TARGET.file_suffix)
  for i, count in enumerate(split.shard_lengths):
    source, target = (
      template.sharded_filepath(shard_index=i, num_shards=split.num_shards)
      for template in (here, there)
    )
    if not target.exists():
      yield source, target, count


def _convert_file(adapter, source, target, count):
  """Copies the records of a file to another, which appears when complete."""
  read = 0

  def examples():
    nonlocal read
    for example in _records(adapter, source).as_numpy_iterator():
      yield None, example
      read += 1

  with utils.incomplete_file(target) as temporary:
    file_adapters.ADAPTER_FOR_FORMAT[_TARGET].write_examples(
      temporary, examples()
    )
    if read != count:
      raise shards.wrong_count(str(source), read, count)


def _records(adapter, source):
  """Returns tf.data of the records of a file, which may be compressed."""
  with source.open('rb') as file:
    if file.read(len(tfrecords.GZIP)) == tfrecords.GZIP:
      return tf.data.TFRecordDataset(source, compression_type='GZIP')
  return adapter.make_tf_data(source)


if __name__ == '__main__':
  cli.run('convert_data')
