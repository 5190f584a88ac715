"""Opens splits of TFDS data sets in array_record and tfrecord files."""

from collections.abc import Sequence
from typing import Any

from etils import epath
import ml_collections

from vit_jax.data import records, slices
from vit_jax.data.lazy import tfds
from vit_jax.data.tfds import builders, parsing, shards, tfrecords

_SOURCES = {
  'array_record': shards.ArrayRecordSource,
  'tfrecord': tfrecords.TfRecordSource,
}


def has_split(config: ml_collections.ConfigDict, dataset: str, base: str) -> bool:
  """Returns whether a TFDS data set has a split."""
  return base in builders.get_builder(config, dataset).info.splits


def open_split(
  config: ml_collections.ConfigDict,
  dataset: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> records.Source:
  """Opens a split of a TFDS data set; see vit_jax.data.sources.open_split."""
  del class_names  # TFDS has the names of classes.
  info = builders.get_builder(config, dataset).info
  available = parsing.features(info)
  names = records.resolve(features, available, f"data set '{info.name}'")
  reader = parsing.Reader(info, {name: available[name] for name in names})
  source = open_with(info, dataset, split, reader)
  source.origin = {'dataset': info.full_name, 'split': split}
  return source


def whole(info: Any, dataset: str, split: str) -> Any:
  """Returns a whole split of a TFDS data set, a tfds.core.SplitInfo."""
  if split not in info.splits:
    raise ValueError(
      f"data set '{dataset}' has no split '{split}': it has {list(info.splits)} "
      '(config.pp.train, config.pp.test, config.evals, --split)'
    )
  return info.splits[split]


def open_with(
  info: Any, dataset: str, split: str, reader: parsing.Reader
) -> records.Source:
  """Opens a split, in the notation of TFDS, of a prepared tfds.core.DatasetInfo."""
  bases = []
  for base, instruction in slices.parts(split):
    bases.append(whole(info, dataset, base))
    slices.bounds(bases[-1], instruction)
  # DatasetInfo.alternative_file_formats is not always read from the files.
  stored = info.as_proto
  if 'array_record' in (stored.file_format, *stored.alternative_file_formats):
    info.set_file_format(
      tfds.core.FileFormat.ARRAY_RECORD, override=True, override_if_initialized=True
    )
  if info.file_format.value not in _SOURCES:
    raise ValueError(
      f"dataset='{dataset}' is stored as {info.file_format.value} files, which are "
      f'not supported: write array_record files next to them by tfds convert_format '
      f'--dataset_version_dir={info.data_dir} --out_file_format=array_record '
      '(config.dataset)'
    )
  files = info.splits[split].file_instructions
  return _SOURCES[info.file_format.value](files, _record_bytes(bases, files), reader)


def _record_bytes(splits: Sequence[Any], files: Sequence[Any]) -> float:
  """Returns the mean bytes of a record."""
  size = sum(split.num_bytes for split in splits)
  if size:
    return size / sum(split.num_examples for split in splits)
  # The info lacks the sizes: they are estimated from the first file.
  file = files[0]
  return epath.Path(file.filename).stat().length / file.examples_in_shard
