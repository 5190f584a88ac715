"""Opens sources of examples: folders, TFDS data sets and other names, mixtures.

See vit_jax/data/records.py for the interface of a source, and folder_formats.py for
that of a way to store one in a folder. A name with a prefix of registry.SOURCES has a
module with the functions `open_split(config, dataset, split, features, class_names)`
and `has_split(config, dataset, base)`.
"""

from collections.abc import Iterable, Mapping, Sequence
import importlib
import operator
from typing import Any

from etils import epath
import ml_collections

from vit_jax import console
from vit_jax.data import (
  checking,
  folder,
  folder_formats,
  folder_layout,
  manifest,
  mask_folders,
  masks,
  mixture,
  parquet,
  pseudo_labels,
  records,
  registry,
  slices,
)
from vit_jax.data.coco import caption_files, source as annotated
from vit_jax.data.images import multichannel
from vit_jax.distributed import files

# Ways to store a data set in a folder; the first that recognizes a split opens it.
FORMATS: list[folder_formats.FolderFormat] = [
  mask_folders.ManifestFormat(),
  manifest.Format(),
  parquet.Format(),
  caption_files.Format(),
  annotated.Format(),
  mask_folders.Format(),
  folder.Format(),
]
# Features that a classifier needs.
LABELLED = ('image', 'label')


def example_file(source: records.Source, workdir: epath.PathLike) -> str:
  """Returns the path of an image of a split; writes it to the workdir if needed."""
  source, index = source.locate(0)
  if isinstance(source, records.FolderSource):
    return source.name(index)
  if 'image' not in source.features:
    return 'IMAGE.jpg'
  encoded = source.read(source.record(index))['image'].numpy()
  ending = 'jpg' if encoded.startswith(b'\xff\xd8') else 'png'
  path = epath.Path(workdir) / f'example.{ending}'
  files.write(path, encoded)
  return str(path)


def open_split(
  config: ml_collections.ConfigDict,
  split: str,
  features: Sequence[str] = LABELLED,
  class_names: Sequence[str] | None = None,
  dataset: str | Sequence[tuple[str, float]] | None = None,
  workdir: str | None = None,
) -> records.Source:
  """Opens one split of a data set, with the requested features.

  Args:
    config: the run's.
    split: in the notation of TFDS: 'train', 'test[:50%]', 'train[:800]+test[:9]'.
    features: names of features, see records.resolve. Others are not read.
    class_names: expected classes of a folder: the classes of its training split.
    dataset: by default `config.dataset`. Of a mixture, `config.pp.train` opens that
      split of all its data sets, and any other split is taken from the first.
    workdir: folder of the run, shared by all processes, to store the list of a folder's
      images in. None: the folder is listed and checked anew.

  Raises ValueError or FileNotFoundError if data set, split, features or images are
  wrong.
  """
  dataset = config.dataset if dataset is None else dataset
  if not dataset:
    raise ValueError(
      'dataset is not set: set --config.dataset to the name of a TFDS data set, '
      'or to a folder with train/<class>/* and test/<class>/*'
    )
  if not isinstance(dataset, str):
    if split == config.pp.train:
      part_sources = []
      for name, _ in dataset:
        part_sources.append(
          open_split(config, split, features, class_names, name, workdir)
        )
      return mixture.MixtureSource(part_sources, dataset)
    dataset = dataset[0][0]
  existing = existing_split(config, dataset, split)
  if existing != split:
    console.log(f"Split '{split}' of '{dataset}' is '{existing}'.")
  if not folder.is_folder(dataset):
    module = importlib.import_module(registry.module_of(dataset))
    source = module.open_split(config, dataset, existing, features, class_names)
    _add_mask_classes(source, config, None)
    source.channels = multichannel.stored_channels(config.pp)
    return source
  if workdir is not None:
    folder_layout.check_apart(str(workdir), dataset, existing)
  if pseudo_labels.exists(dataset):
    if split != config.pp.train:
      raise ValueError(
        f"'{dataset}' holds pseudo-labels for training: evaluate split '{split}' "
        'of labelled data (config.evals, --split)'
      )
    facts = pseudo_labels.read_facts(dataset)
    images = open_split(
      config, facts['split'], ('image',), dataset=facts['dataset'], workdir=workdir
    )
    return pseudo_labels.open_folder(dataset, features, class_names, images)
  folder_format = find_format(dataset, existing, features)
  if folder_format is None:
    _check_tables(dataset, existing)
    folder_format = FORMATS[-1]  # Its error describes the layout of class folders.
  source = folder_format.open(
    folder_formats.Request(config, dataset, existing, features, class_names, workdir)
  )
  _add_mask_classes(source, config, dataset)
  source.channels = multichannel.stored_channels(config.pp)
  return source


def _add_mask_classes(
  source: records.Source, config: ml_collections.ConfigDict, root: str | None
) -> None:
  """Names the classes of masks in a table, whose columns do not."""
  feature = masks.FEATURE
  if feature not in source.features or source.mask_classes or feature in source.names:
    return
  source.mask_classes = masks.classes_for(config, root)
  source.names[feature] = tuple(x.name for x in masks.learned(source.mask_classes))


def find_format(
  root: str, split: str, features: Sequence[str] = ()
) -> folder_formats.FolderFormat | None:
  """Returns the format in which a folder has a split; None if it has no such split."""
  for folder_format in FORMATS:
    if folder_format.recognizes(root, split, features):
      return folder_format
  return None


def existing_split(
  config: ml_collections.ConfigDict,
  dataset: str | Sequence[tuple[str, float]],
  split: str,
) -> str:
  """Returns a split; the validation split of data without a test split.

  That may have any of its names, and the run must not train on it. Splits of TFDS are
  not looked up, since its data sets have fixed names.
  """
  if not isinstance(dataset, str) or not _has_any_names(dataset):
    return split
  bases = slices.bases(split)
  existing = [_existing_part(config, dataset, base) for base in bases]
  if existing == bases:
    return split
  instructions = [instruction for _, instruction in slices.parts(split)]
  return '+'.join(map(operator.add, existing, instructions))


def _has_any_names(dataset: str) -> bool:
  """Returns whether anybody may have named the splits of a data set."""
  return dataset.startswith(registry.HUB) or folder.is_folder(dataset)


def _existing_part(config: ml_collections.ConfigDict, dataset: str, base: str) -> str:
  """Returns the name of a part of a split, see `existing_split`."""
  if base not in ('test', *slices.VALIDATION) or _has_part(config, dataset, base):
    return base
  for name in slices.VALIDATION:
    if name not in slices.bases(config.pp.train) and _has_part(config, dataset, name):
      return name
  return base


def _has_part(config: ml_collections.ConfigDict, dataset: str, base: str) -> bool:
  """Returns whether a data set has a part of a split in any form."""
  if folder.is_folder(dataset):
    return find_format(dataset, base) is not None
  module = importlib.import_module(registry.module_of(dataset))
  return module.has_split(config, dataset, base)


def has_split(config: ml_collections.ConfigDict, split: str) -> bool:
  """Returns whether the data set of a config has all parts of a split."""
  dataset = config.dataset
  if not isinstance(dataset, str):
    dataset = dataset[0][0]  # As `open_split` does.
  split = existing_split(config, dataset, split)
  return all(_has_part(config, dataset, base) for base in slices.bases(split))


def _check_tables(root: str, split: str) -> None:
  """Raises FileNotFoundError if a folder has Parquet files of other splits."""
  if tables := [name for name in checking.SPLITS if parquet.exists(root, name)]:
    first = tables[0]
    last = tables[-1]
    raise slices.NoSplitError(
      f"folder '{root}' has no split '{split}': its Parquet files are the splits "
      f'{tables}',
      f"To test on '{last}': --config.pp.test='{last}'; on a tenth of '{first}': "
      f"--config.pp.train='{first}[:90%]' --config.pp.test='{first}[90%:]'",
    )


def list_images(root: str, split: str) -> folder_formats.Listing:
  """Returns the images of a split of a folder, which has no Parquet files."""
  listings = (x.list_images(root, split) for x in FORMATS)
  # Class folders, the last format, list any folder.
  return next(listing for listing in listings if listing is not None)


def open_for(
  config: ml_collections.ConfigDict,
  task_class: Any,
  metadata: Mapping[str, Any],
  split: str,
  dataset: str | Sequence[tuple[str, float]] | None = None,
  workdir: str | None = None,
  more_features: Iterable[str] = (),
) -> records.Source:
  """Opens a split with the classes of the training data, and `more_features`."""
  features = (*task_class.record_features(config), *more_features)
  class_names = metadata.get('class_names')
  return open_split(config, split, features, class_names, dataset, workdir)
