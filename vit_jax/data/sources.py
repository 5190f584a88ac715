"""Opens sources of examples: folders, annotations, manifests, mixtures, TFDS.

See vit_jax/data/records.py for the interface of a source.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import operator
import os
from typing import Any

from etils import epath
import ml_collections

from vit_jax import console
from vit_jax.data import (
  checking,
  folder,
  manifest,
  mixture,
  parquet,
  pseudo_labels,
  records,
  slices,
)
from vit_jax.data.coco import caption_files, layout, source as annotated
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import builders, registry, splits, vtab
from vit_jax.distributed import files

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
  if not folder.is_folder(dataset):
    module = vtab if dataset.startswith(registry.VTAB) else splits
    return module.open_split(config, dataset, split, features)
  if pseudo_labels.exists(dataset):
    if split != config.pp.train:
      raise ValueError(
        f"'{dataset}' holds pseudo-labels for training: evaluate split '{split}' "
        'of labelled data (config.evals, --split)'
      )

    def open_images(name: str, split: str) -> records.Source:
      return open_split(config, split, ('image',), dataset=name, workdir=workdir)

    return pseudo_labels.open_folder(dataset, features, class_names, open_images)
  existing = existing_split(config, dataset, split)
  if existing != split:
    console.log(f"Split '{split}' of '{dataset}' is '{existing}'.")
  return _open_folder(config, dataset, existing, features, class_names, workdir)


def existing_split(
  config: ml_collections.ConfigDict,
  dataset: str | Sequence[tuple[str, float]],
  split: str,
) -> str:
  """Returns a split; the validation split of a folder that has no test split.

  That may have any of its names, and the run must not train on it.
  """
  if not isinstance(dataset, str) or not folder.is_folder(dataset):
    return split
  bases = slices.bases(split)
  existing = [_existing_part(config, dataset, base) for base in bases]
  if existing == bases:
    return split
  instructions = [instruction for _, instruction in slices.parts(split)]
  return '+'.join(map(operator.add, existing, instructions))


def _existing_part(config: ml_collections.ConfigDict, root: str, base: str) -> str:
  """Returns the name of a part of a split in a folder, see `existing_split`."""
  if base not in ('test', *slices.VALIDATION) or _has_part(root, base):
    return base
  for name in slices.VALIDATION:
    if name not in slices.bases(config.pp.train) and _has_part(root, name):
      return name
  return base


def _has_part(root: str, base: str) -> bool:
  """Returns whether a folder has a part of a split in any form."""
  kinds = (manifest.exists, parquet.exists, layout.exists, _has_folders)
  return any(exists(root, base) for exists in kinds)


def has_split(config: ml_collections.ConfigDict, split: str) -> bool:
  """Returns whether the data set of a config has all parts of a split."""
  dataset = config.dataset
  if not isinstance(dataset, str):
    dataset = dataset[0][0]  # As `open_split` does.
  if folder.is_folder(dataset):
    split = existing_split(config, dataset, split)
    return all(_has_part(dataset, base) for base in slices.bases(split))
  if dataset.startswith(registry.VTAB):
    return True  # `open_split` names its splits.
  split_infos = builders.get_builder(config, dataset).info.splits
  return all(base in split_infos for base in slices.bases(split))


def _open_folder(
  config: ml_collections.ConfigDict,
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None,
  workdir: str | None,
) -> records.Source:
  """Opens a split of a folder; see open_split."""
  read_split = folder.read_split
  limit = config.max_image_pixels
  captioned = any(name.rstrip('?') == caption_files.FEATURE for name in features)
  if manifest.exists(root, split):
    read_split = manifest.read_split
  elif parquet.exists(root, split):
    return parquet.open_split(config, root, split, features, class_names)
  elif captioned and caption_files.exists(root, split):
    read_split = functools.partial(manifest.read_split, parse=caption_files.lines)
  elif _is_annotated(root, split, features):
    return annotated.open_split(config, root, split, features, class_names, workdir)
  elif not _has_folders(root, split):
    _check_tables(root, split)
  columns, names = read_split(
    root,
    split,
    features,
    class_names,
    broken=config.broken_images,
    max_pixels=limit,
    workdir=workdir,
  )
  return records.FolderSource(columns, names, limit)


def _is_annotated(root: str, split: str, features: Sequence[str]) -> bool:
  """Returns whether to read a split of a folder with its annotations."""
  required = (name for name in features if not name.endswith('?'))
  if any(name.startswith(('objects', 'panoptic')) for name in required):
    return True
  # COCO's images are in train2017 etc., which only its annotation files tell.
  return not _has_folders(root, split) and layout.exists(root, split)


def _has_folders(root: str, split: str) -> bool:
  folders = [os.path.join(root, base) for base in slices.bases(split)]
  return all(map(tf.io.gfile.isdir, folders))


def _check_tables(root: str, split: str) -> None:
  """Raises FileNotFoundError if a folder has Parquet files of other splits."""
  if tables := [name for name in checking.SPLITS if parquet.exists(root, name)]:
    first, last = tables[0], tables[-1]
    raise slices.NoSplitError(
      f"folder '{root}' has no split '{split}': its Parquet files are the splits "
      f'{tables}',
      f"To test on '{last}': --config.pp.test='{last}'; on a tenth of '{first}': "
      f"--config.pp.train='{first}[:90%]' --config.pp.test='{first}[90%:]'",
    )


def open_for(
  config: ml_collections.ConfigDict,
  task_class: Any,
  metadata: Mapping[str, Any],
  split: str,
  dataset: str | Sequence[tuple[str, float]] | None = None,
  workdir: str | None = None,
  further: Iterable[str] = (),
) -> records.Source:
  """Opens a split with the classes of the training data, and `further` features."""
  features = (*task_class.FEATURES, *further)
  class_names = metadata.get('class_names')
  return open_split(config, split, features, class_names, dataset, workdir)
