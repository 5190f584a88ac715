"""Writes, reads and checks the files of a run, except its checkpoints.

config.json        the resolved config
class_names.json   for classification: names of the classes, in the order of the
                   logits; other tasks have other metadata, a NAME.json each
data.json          fingerprints of the data (counts and hashes), and hashes of
                   the config and of the metadata
calibration.json   temperature of the probabilities, after vit_jax evaluate --calibrate
labels.npz         classes of the training images, if they had to be read to balance them
versions.json      versions of Python and of important packages
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
from typing import Any

from absl import logging
from etils import epath
import ml_collections

from vit_jax import console, user_code
from vit_jax.configs import common, schema
from vit_jax.distributed import files, processes
from vit_jax.layers import dtypes
from vit_jax.run import config as run_config

_CONFIG, _DATA = 'config.json', 'data.json'
# Keys of a config.json of timm and Hugging Face.
_OF_WEIGHTS = ('architecture', 'architectures', 'model_type')
_SCHEMES = ('gs', 's3')  # URLs of object storage.
PACKAGES = (
  'vit_jax',
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'tensorflow',
  'tensorflow-cpu',
  'tensorflow-datasets',
  'numpy',
)


def folder(workdir: epath.PathLike) -> epath.Path:
  """Returns the path of a workdir; ValueError for http:// and the like."""
  scheme, separator, _ = str(workdir).partition('://')
  if separator and scheme not in _SCHEMES:
    raise ValueError(
      f"workdir='{workdir}' must be a folder or at gs://, not at {scheme}:// (--workdir)"
    )
  return epath.Path(workdir)


def absolute(path: epath.PathLike) -> epath.Path:
  """Returns the absolute path, which Orbax requires; gs:// is one already."""
  text = os.fspath(path)
  return epath.Path(text if files.is_remote(text) else os.path.abspath(text))


def to_plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Converts a config to types of JSON (tuples become lists)."""
  return json.loads(json.dumps(config.to_dict()))


def facts(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns values by name that must agree in all processes of a run."""
  values = flatten(to_plain(config))
  for name, version in versions().items():
    values[f'version of {name}'] = version
  return values


@processes.by_first('checking the workdir')
def check(
  workdir: epath.PathLike,
  config: ml_collections.ConfigDict,
  metadata: Mapping[str, Any],
  data: Mapping[str, Any],
) -> None:
  """Checks that a run can start or resume in a folder, on process 0 for all.

  `config` is resolved, `metadata` {name of the file: JSON}, `data` the fingerprints
  of the training data and of each evaluation (data.records.Source.fingerprint).
  ValueError lists the differences if the folder holds a run with another config,
  other classes or other training data, which has saved a checkpoint.
  """
  path = folder(workdir)
  differing = _check_config(path, config, _free_keys(config))
  if has_saved(path):
    for name, value in metadata.items():
      if (path / f'{name}.json').exists():
        _check_metadata(path / f'{name}.json', value)
    check_data(path, data)
  elif differing:
    console.log(
      f"The run in '{path}' has another config but no checkpoint: starting anew."
    )


@processes.by_first('checking the workdir')
def check_config(
  workdir: epath.PathLike, config: ml_collections.ConfigDict, finished: bool = False
) -> None:
  """Checks a complete config as `check` does, except its lengths.

  Data may be elsewhere than before, since `check` compares their fingerprints later;
  but not those of a `finished` run, which may have lost its checkpoints.
  """
  free = _free_keys(config) + run_config.marked_keys(config, schema.LENGTH)
  _check_config(folder(workdir), config, free, finished)


def has_saved(workdir: epath.PathLike) -> bool:
  """Returns whether a run has a checkpoint; without one it may be started anew."""
  checkpoints = folder(workdir) / 'checkpoints'
  if not checkpoints.exists():
    return False
  return any(entry.name.isdigit() for entry in checkpoints.iterdir())


def _free_keys(config: ml_collections.ConfigDict) -> list[str]:
  return run_config.marked_keys(config, schema.FREE, schema.MEASURED)


def _check_config(
  path: epath.Path,
  config: ml_collections.ConfigDict,
  free: Sequence[str],
  finished: bool = False,
) -> bool:
  """Checks the config of a run; returns whether it has another one and saved nothing."""
  files.check_no_pattern(path, 'workdir')
  if path.exists() and not path.is_dir():
    raise ValueError(f"workdir='{path}' is a file: use a folder (--workdir)")
  if not (path / _CONFIG).exists():
    if (path / 'checkpoints').exists():
      raise ValueError(
        f"workdir='{path}' has checkpoints but no {_CONFIG}: use another --workdir"
      )
    return False
  old = to_plain(_read_config(path))
  new = to_plain(config)
  if not finished:
    for key in run_config.marked_keys(config, schema.MOVABLE):
      # A mixture is a list of paths and weights, which cannot move.
      if isinstance(old[key], str) and isinstance(new[key], str):
        free = (*free, key)
  if _is_longer(path, old, new):
    free = (*free, *run_config.marked_keys(config, schema.LENGTH))
  if not differences(old, new, free):
    return False
  if finished or has_saved(path):
    differing = differences(old, new, (*_free_keys(config), *_unknown_lengths(new)))
    raise ValueError(
      f"workdir='{path}' belongs to a run of another config:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or the same config to resume that run'
    )
  return True


def _is_longer(
  path: epath.Path, old: Mapping[str, Any], new: Mapping[str, Any]
) -> bool:
  """Returns whether a config trains a run on that has made all steps of its own."""
  num_steps = old['total_steps']
  is_finished = (path / 'checkpoints' / f'{num_steps}').exists()
  return is_finished and (new['total_steps'] or 0) > num_steps


def _unknown_lengths(config: Mapping[str, Any]) -> list[str]:
  """Returns the keys of lengths of a config that depend on the size of the data."""
  keys = []
  for name in ('total', 'warmup'):
    if config[f'{name}_steps'] is None:
      keys += [f'{name}_steps', f'{name}_epochs']
  return keys


def _check_metadata(file: epath.Path, value: Any) -> None:
  """Checks that the metadata of the data are the ones that the run has learned."""
  old = _read(file, object)
  new = json.loads(json.dumps(value))
  if old == new:
    return
  difference = f'{old!r:.100} there, {new!r:.100} here'
  if isinstance(old, list) and isinstance(new, list):
    for i, (a, b) in enumerate(itertools.zip_longest(old, new)):
      if a != b:
        difference = f'number {i}: {a!r} there, {b!r} here'
        break
  raise ValueError(
    f"'{file}' differs from the data, which now have other names or values than the "
    f'run has learned ({difference}): restore them, or train into another --workdir with '
    f'--config.pretrained={file.parent}, which takes all but the head'
  )


def check_data(workdir: epath.PathLike, data: Mapping[str, Any]) -> None:
  """Refuses other training data or frozen weights; warns of other evaluation data."""
  path = folder(workdir)
  sources = _read(path / _DATA)['sources']
  for name in data:
    if name not in sources:
      continue
    differing = differences(sources[name], data[name])
    if differing and name == 'base':
      raise ValueError(
        f"workdir='{path}' has adapters of weights other than those now at "
        f"pretrained='{_read_config(path).pretrained}' ({differing[0]}): restore these"
      )
    if differing and name == 'train':
      raise ValueError(
        f"workdir='{path}' belongs to a run on other training data:\n  "
        + '\n  '.join(differing)
        + '\nRestore those data to resume that run, or train into another '
        f'--workdir with --config.pretrained={path}'
      )
    if differing:
      logging.warning(
        f'Evaluation {name} uses other data than before: {"; ".join(differing)}; '
        'its metrics cannot be compared with the earlier ones'
      )


def differences(
  old: Mapping[str, Any],
  new: Mapping[str, Any],
  free: Sequence[str] = (),
  common: bool = False,
) -> list[str]:
  """Lists the keys, other than free ones, in which two trees differ.

  With `common`, keys of the roots that only one of the trees has do not count.
  """
  if common:
    shared = old.keys() & new.keys()
    old = {key: value for key, value in old.items() if key in shared}
    new = {key: value for key, value in new.items() if key in shared}
  old, new = flatten(old), flatten(new)
  prefixes = tuple(f'{key}.' for key in free)
  lines = []
  for key in sorted(old.keys() | new.keys()):
    is_free = f'{key}.'.startswith(prefixes)
    if old.get(key) != new.get(key) and not is_free:
      lines.append(f'{key}: {old.get(key)} there, {new.get(key)} here')
  return lines


@processes.by_first('writing the workdir')
def create(
  workdir: epath.PathLike,
  config: ml_collections.ConfigDict,
  metadata: Mapping[str, Any],
  data: Mapping[str, Any],
) -> None:
  """Writes the files of a run, see `check`; ValueError if that fails."""
  path, plain = folder(workdir), to_plain(config)
  configs = [plain]
  if (path / _CONFIG).exists():
    # A run that resumes with other free keys may be killed before it replaces this file.
    configs.append(_read_plain(path))
  contents = {
    **metadata,
    'data': {
      'config': sorted({_digest(config) for config in configs}),
      'metadata': _digest(metadata),
      'sources': data,
    },
    'versions': versions(),
    # Written last, since config.json marks the folder as a run's.
    'config': plain,
  }
  try:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in contents.items():
      text = json.dumps(value, indent=1, sort_keys=name == 'config')
      files.write(path / f'{name}.json', text)
  except OSError as e:
    raise ValueError(
      f"workdir='{workdir}' cannot be written: {e}; use a writable folder (--workdir)"
    ) from e


def is_missing(workdir: epath.PathLike) -> bool:
  """Returns whether the folder of a run was moved or deleted."""
  try:
    return not (folder(workdir) / _CONFIG).exists()
  except OSError:
    return False  # Unknown, since the storage does not answer.


def missing_error(workdir: epath.PathLike) -> OSError:
  """Returns the error for `is_missing`."""
  return OSError(
    f"workdir='{workdir}' was moved or deleted during training: it has no {_CONFIG}; "
    'run the same command with the --workdir where it is now, to resume from its last '
    'checkpoint'
  )


@processes.by_first('looking for the workdir')
def check_present(workdir: epath.PathLike) -> None:
  """Raises OSError on all processes if the folder of a run was moved or deleted."""
  if is_missing(workdir):
    raise missing_error(workdir)


@contextlib.contextmanager
def writing(path: epath.PathLike) -> Iterator[None]:
  """Explains errors of the storage while a run writes a file of its workdir."""
  path = epath.Path(path)
  try:
    yield
  except OSError as e:
    if is_missing(path.parent):
      raise missing_error(path.parent) from e
    raise OSError(
      f"'{path}' cannot be written: {e.strerror or e}; free some space (or repair the "
      'disk) and run the same command again to resume from the last checkpoint'
    ) from e


def load(workdir: epath.PathLike) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Returns the complete config of a run, and its metadata.

  FileNotFoundError if the folder holds no run; ValueError if its files cannot
  be read or were changed, or its task is unknown.
  """
  path = folder(workdir)
  config = _read_config(path)
  return config, _read_metadata(path, run_config.get_task(config.task).METADATA)


@processes.by_first('reading the metadata of the run')
def stored(workdir: epath.PathLike, names: Sequence[str]) -> dict[str, Any]:
  """Returns the metadata of the run in a folder; {} if no run has saved there.

  `names`: vit_jax.tasks.base.Task.METADATA.
  """
  path = folder(workdir)
  return _read_metadata(path, names) if has_saved(path) else {}


def _read_metadata(path: epath.Path, names: Sequence[str]) -> dict[str, Any]:
  metadata = {name: _read(path / f'{name}.json', object) for name in names}
  if _read(path / _DATA).get('metadata') != _digest(metadata):
    raise ValueError(
      f"{[f'{name}.json' for name in names]} in workdir='{path}' differ from what "
      'the run has learned (data.json has a hash of it): restore these files'
    )
  return metadata


@processes.by_first('reading the model of the run')
def stored_config(workdir: str | epath.Path) -> dict[str, Any]:
  """Returns the config of the run in a folder as it is stored, {} if none has saved."""
  path = folder(workdir)
  if not (path / _CONFIG).exists():
    return {}
  plain = _read_plain(path)
  return plain if has_saved(path) else {}


def keep_dtype(stored: Mapping[str, Any], config: ml_collections.ConfigDict) -> None:
  """Replaces, in place, dtype 'auto' by the dtype in a `stored_config`, if any."""
  if config.model.get('dtype') == dtypes.AUTO:
    config.model.dtype = stored.get('model', {}).get('dtype') or dtypes.AUTO


def _read_plain(path: epath.Path) -> dict[str, Any]:
  """Returns the config of a run as it is stored."""
  file = path / _CONFIG
  plain = _read(file)
  if not isinstance(plain.get('model'), dict):
    if {*plain} & {*_OF_WEIGHTS}:
      raise ValueError(
        f"workdir='{path}' holds weights of timm or Hugging Face, not a run: pass "
        f'--weights={path} (to train: --config.pretrained={path}), or make a run of '
        f'them with `vit_jax convert {path} FOLDER --to=workdir`'
      )
    raise _damaged(file, "it has no key 'model'")
  digest = _digest(plain)
  digests = _read(path / _DATA).get('config', [digest])
  if not isinstance(digests, list) or digest not in digests:
    raise ValueError(
      f"'{file}' differs from the config that the run was trained with ({_DATA} has a "
      f'hash of it): restore the file, or accept the change by deleting the entry '
      f"'config' from '{path / _DATA}'"
    )
  return plain


def _read_config(path: epath.Path) -> ml_collections.ConfigDict:
  """Returns the complete config of a run."""
  plain = _read_plain(path)
  try:
    run_config.check_stored_task(plain.get('task', 'classify'))
    return run_config.complete_stored(ml_collections.ConfigDict(plain))
  except (user_code.ForeignModuleError, user_code.UnknownModuleError) as e:
    raise ValueError(f"the run in workdir='{path}' is not loaded: {e}") from e
  except (ValueError, AttributeError, KeyError, TypeError) as e:
    raise _damaged(path / _CONFIG, str(e)) from e


def _read(path: epath.Path, kind: type = dict) -> Any:
  """Reads JSON of a kind."""
  try:
    content = files.read_json(path)
  except FileNotFoundError as e:
    raise FileNotFoundError(
      f"workdir='{path.parent}' holds no run: there is no {path.name}; use the "
      '--workdir of a run, or pass weights as --weights'
    ) from e
  except (ValueError, IsADirectoryError) as e:
    raise _damaged(path, str(e)) from e
  if not isinstance(content, kind):
    raise _damaged(path, f'{content!r:.50} is not a JSON object')
  return content


def _damaged(path: epath.PathLike, reason: str) -> ValueError:
  return ValueError(
    f"'{path}' is damaged: {reason}; restore the file, or start anew in another --workdir"
  )


def _digest(value: Any) -> str:
  return files.digest([json.dumps(value, sort_keys=True).encode()])


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Converts {'a': {'b': 1}} to {'a.b': 1}."""
  return dict(common.flatten(tree, ()))


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide results."""
  versions_by_name = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      versions_by_name[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions_by_name
