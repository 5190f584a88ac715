"""Paths of the weights of a config, and whether they exist. Does not import JAX."""

from collections.abc import Iterator
import contextlib

from etils import epath
import ml_collections

from vit_jax.configs import models as model_configs
from vit_jax.distributed import files, text_files
from vit_jax.weights import arrays, fetch

# Endings of exported models, and files in their folders.
_EXPORTED = ('.onnx', '.stablehlo', '.pb')
_EXPORTS = ('model.onnx', 'model.stablehlo', 'saved_model.pb', '1/saved_model.pb')
_ENDINGS = ('.npz', '.safetensors', '.json', *arrays.TORCH_ENDINGS)


def from_config(config: ml_collections.ConfigDict) -> dict[str, str]:
  """Returns the paths of the weights in a config by part, '' for all parts."""
  pretrained = config.pretrained
  if isinstance(pretrained, str):
    return {'': pretrained}
  if pretrained is not None:
    return dict(pretrained)
  if config.pretrained_dir is None:
    return {}
  name = config.model_or_filename
  if name:
    return {'': augreg_filename(name, config.pretrained_dir)}
  model = model_configs.vit_of(config.model)
  return {'': f'{config.pretrained_dir}/{model.get("model_name")}.npz'}


@contextlib.contextmanager
def with_remedy(config: ml_collections.ConfigDict) -> Iterator[None]:
  """Adds the remedy to the error for missing weights."""
  try:
    yield
  except FileNotFoundError as e:
    if config.pretrained is not None:
      raise
    raise FileNotFoundError(
      f'{e}; or set the folder of the published files (--config.pretrained_dir); to '
      'start from random weights use --config.pretrained_dir=None'
    ) from e


def check_exist(config: ml_collections.ConfigDict) -> None:
  """Raises FileNotFoundError if local weights of a config do not exist."""
  for path in from_config(config).values():
    if '://' not in path:
      with with_remedy(config):
        existing(path)


def existing(path: epath.PathLike) -> epath.Path:
  """Returns the local path of weights; fetches a remote file.

  FileNotFoundError if it does not exist; ValueError for an archive or an export.
  """
  name = str(path)
  # A folder in a bucket, such as a workdir, is read in place.
  in_place = name.startswith('gs://') and not name.endswith(_ENDINGS)
  local_path = epath.Path(path) if in_place else fetch.fetch(path)
  if not local_path.exists():
    raise FileNotFoundError(
      f"there is no weights file '{path}': pass a published .npz, a .safetensors or "
      '.bin of timm or Hugging Face, a URL of one, hf://OWNER/NAME, or a workdir'
    )
  _check_format(local_path)
  return local_path


def _check_format(path: epath.Path) -> None:
  """Raises ValueError for an archive or an exported model, with the remedy."""
  if path.suffix == '.zip':
    raise ValueError(
      f"'{path}' is an archive: unpack it and pass the weights (config.pretrained, "
      '--weights)'
    )
  if path.suffix in _EXPORTED or any((path / name).exists() for name in _EXPORTS):
    raise ValueError(
      f"'{path}' is an exported model, which holds a program instead of weights: pass "
      'the run or the weights that it was exported from (config.pretrained, --workdir, '
      '--weights)'
    )


def augreg_filename(model: str, directory: str) -> str:
  """Returns the path of the best ImageNet-21k checkpoint of the AugReg paper.

  Of the checkpoints pre-trained for 300 epochs ("i21k" in `index.csv`), it has the
  highest final validation accuracy.

  Args:
    model: a model such as 'R_Ti_16', or the name of one checkpoint
      ('R_Ti_16-i21k- ...'), which is used unchanged.
    directory: folder of the published files, such as gs://vit_models/augreg.

  Raises:
    FileNotFoundError, PermissionError, OSError: if the index cannot be read.
    ValueError: if the index lacks the model.
  """
  filename = model
  if '-' not in model:
    index = augreg_index(directory)
    rows = []
    for _, row in text_files.csv_rows(files.read(index), index):
      if row['filename'].split('-')[0] == model and row['ds'] == 'i21k':
        rows.append(row)
    if not rows:
      raise ValueError(
        f"model '{model}' is not among the i21k checkpoints of "
        f"'{directory}/index.csv' (config.model_or_filename)"
      )
    filename = max(rows, key=lambda row: float(row['final_val']))['filename']
  return f'{directory}/{filename}.npz'


def augreg_index(directory: str) -> epath.Path:
  """Returns the local path of index.csv, the table of the AugReg checkpoints."""
  path = f'{directory}/index.csv'
  index = fetch.fetch(path)
  if not index.exists():
    raise FileNotFoundError(
      f"there is no '{path}': pass the folder of the AugReg checkpoints as directory "
      '(config.pretrained_dir), or the name of one of its files '
      '(configs/augreg.py:NAME)'
    )
  return index
