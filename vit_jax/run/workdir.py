"""The files of a run beside its checkpoints: config, class names, versions.

config.json        the resolved config
class_names.json   the names of the classes, in the order of the logits
versions.json      versions of Python and of the packages that matter
"""

import importlib.metadata
import json
import os
import platform
from typing import Any

from etils import epath
import jax
import ml_collections

# Keys that say how a run is watched, where it runs and in what order it computes,
# but not what: they may differ when a run goes on, on other devices for one.
FREE_KEYS = (
  'accum_steps',
  'batch_eval',
  'best_metric',
  'broken_images',
  'checkpoint_every',
  'eval_every',
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
  old = _flatten(_read_json(path / 'config.json'))
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


def create(workdir, config, class_names):
  """Writes the files of a run, or leaves them if they are there.

  Raises:
    ValueError: if the folder cannot be written.
  """
  if jax.process_index():
    return
  path = epath.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(
      path / 'class_names.json', json.dumps(list(class_names), indent=1)
    )
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


def load(workdir) -> tuple[ml_collections.ConfigDict, tuple[str, ...]]:
  """Returns the config and the class names of a run.

  Raises:
    FileNotFoundError: if the folder holds no run.
    ValueError: if its files cannot be read.
  """
  path = epath.Path(workdir)
  for name in ('config.json', 'class_names.json'):
    if not (path / name).exists():
      raise FileNotFoundError(
        f"workdir='{workdir}' holds no run: there is no {name}; give the "
        '--workdir of a training'
      )
  config = ml_collections.ConfigDict(_read_json(path / 'config.json'))
  return config, tuple(_read_json(path / 'class_names.json'))


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
