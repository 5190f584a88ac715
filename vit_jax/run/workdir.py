"""The files of a run beside its checkpoints: config, metadata, versions.

config.json        the resolved config
class_names.json   for classification: the names of the classes, in the order of
                   the logits; other tasks have other metadata, NAME.json each
versions.json      versions of Python and of the packages that matter
"""

from collections.abc import Mapping
import importlib.metadata
import json
import os
import platform
from typing import Any

from etils import epath
import jax
import ml_collections

from vit_jax.run import config as run_config

# Keys that say how a run is watched, where it runs and in what order it computes,
# but not what: they may differ when a run goes on, on other devices for one.
FREE_KEYS = (
  'accum_steps',
  'batch_eval',
  'best_metric',
  'broken_images',
  'checkpoint_every',
  'eval_every',
  'evals',
  'keep_checkpoints',
  'mesh',
  'model.transformer.attention',
  'model.transformer.remat',
  'model.transformer.scan',
  'prefetch',
  'profile_steps',
  'progress_every',
  'sharding_rules',
  'tfds_data_dir',
  'tfds_manual_dir',
)
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


def absolute(path) -> epath.Path:
  """Returns a path that does not depend on the current folder.

  Orbax takes no other. What has a scheme, gs:// for one, stays as it is.
  """
  text = str(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def to_plain(config) -> dict[str, Any]:
  """Turns a config into what JSON can hold (tuples become lists)."""
  return json.loads(json.dumps(config.to_dict()))


def check(workdir, config):
  """Checks that a run of this config can be, or go on, in a folder.

  Args:
    workdir: the folder; it need not exist.
    config: the resolved config.

  Raises:
    ValueError: if the folder holds a run of another config, or other files; says
      which keys differ.
  """
  path = epath.Path(workdir)
  if path.exists() and not path.is_dir():
    raise ValueError(
      f"workdir='{workdir}' is a file: give a folder (--workdir)"
    )
  if not (path / 'config.json').exists():
    if path.exists() and (path / 'checkpoints').exists():
      raise ValueError(
        f"workdir='{workdir}' holds checkpoints but no config.json: they are "
        'not of a run of this program; use another --workdir'
      )
    return
  # Runs of older versions lack keys that have come since.
  old = ml_collections.ConfigDict(_read_json(path / 'config.json'))
  old = _flatten(to_plain(run_config.complete(old)))
  new = _flatten(to_plain(config))
  differing = [
    f'{key}: {old.get(key)} there, {new.get(key)} here'
    for key in sorted({*old, *new})
    if old.get(key) != new.get(key)
    and not {key, key.split('.')[0]} & set(FREE_KEYS)
  ]
  if differing:
    raise ValueError(
      f"workdir='{workdir}' belongs to a run of another config:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or the same config to go on with that run'
    )


def create(workdir, config, metadata: Mapping[str, Any]):
  """Writes the files of a run.

  Args:
    workdir: the folder.
    config: the resolved config.
    metadata: what the task stores of the data: {name of the file: JSON}.

  Raises:
    ValueError: if the folder cannot be written.
  """
  if jax.process_index():
    return
  path = epath.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in metadata.items():
      write_atomically(path / f'{name}.json', json.dumps(value, indent=1))
    write_atomically(path / 'versions.json', json.dumps(_versions(), indent=1))
    # The last, since it is what makes the folder a run's.
    write_atomically(
      path / 'config.json',
      json.dumps(to_plain(config), indent=1, sort_keys=True),
    )
  except OSError as e:
    raise ValueError(
      f"workdir='{workdir}' cannot be written: {e}; give a folder that can "
      '(--workdir)'
    ) from e


def load(workdir) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Returns the config of a run, complete, and its metadata.

  Raises:
    FileNotFoundError: if the folder holds no run.
    ValueError: if its files cannot be read, or its task is not known.
  """
  path = epath.Path(workdir)
  config = ml_collections.ConfigDict(_read_run(path, 'config'))
  config = run_config.complete(config)
  names = run_config.get_task(config.task).METADATA
  return config, {name: _read_run(path, name) for name in names}


def _read_run(path, name):
  file = path / f'{name}.json'
  if not file.exists():
    raise FileNotFoundError(
      f"workdir='{path}' holds no run: there is no {name}.json; give the "
      '--workdir of a training'
    )
  return _read_json(file)


def write_atomically(path: epath.Path, text: str):
  """Writes a file such that it is never seen half written."""
  temporary = path.parent / f'.{path.name}.tmp'
  temporary.write_text(text)
  temporary.replace(path)


def _read_json(path):
  try:
    return json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"'{path}' is damaged: {e}") from e


def _flatten(tree, prefix=''):
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      flat.update(_flatten(value, f'{prefix}{key}.'))
    else:
      flat[prefix + key] = value
  return flat


def _versions():
  versions = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions
