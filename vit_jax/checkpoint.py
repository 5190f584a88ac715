"""Published weights in and out of a model's parameters.

Files of any kind are read (vit_jax.weights.reading); what is written is an .npz by the
published names, which the original's readers and timm's `load_npz` understand.
"""

from collections.abc import Sequence
import csv
import math
from typing import Any

from absl import logging
import flax.traverse_util
import numpy as np

from vit_jax import models
from vit_jax.weights import fetch
from vit_jax.weights import identify
from vit_jax.weights import reading
from vit_jax.weights import writing

_POSEMB = 'Transformer/posembed_input/pos_embedding'

copy = fetch.copy
save = writing.save


def recover_tree(keys: Sequence[str], values: Sequence[Any]) -> dict:
  """Makes a nested dict of '/'-joined keys and their values."""
  return flax.traverse_util.unflatten_dict(dict(zip(keys, values)), sep='/')


def load(path: str) -> dict:
  """Loads weights.

  Args:
    path: a published .npz, timm's or Hugging Face's .safetensors or .bin (or a
      folder of it with its config.json), the workdir of a run; local, https://
      or gs://.

  Returns:
    Parameters as nested dict of numpy arrays, by Linen's names.

  Raises:
    FileNotFoundError, PermissionError, OSError: if there is no such file or it
      may not be read.
    ValueError: if it holds no weights of a ViT, hybrid or Mixer, is truncated,
      or holds pickled objects.
    ImportError: if a package is missing; names the extra to install.
  """
  weights = reading.read(path)
  if weights.kind != 'workdir':
    _note_differences(weights, identify.model_config(weights.params) or {})
  return weights.params


def inspect_params(
  *,
  params: dict,
  expected: dict,
  fail_if_extra: bool = True,
  fail_if_missing: bool = True,
) -> dict:
  """Compares the leaves of `params` with those expected.

  Args:
    params: nested dict of arrays.
    expected: nested dict of arrays or jax.ShapeDtypeStruct.
    fail_if_extra: whether a leaf that is not expected is an error.
    fail_if_missing: whether a leaf that is missing is an error.

  Returns:
    `params`.

  Raises:
    ValueError: lists the leaves that are missing, extra, or of another shape.
  """
  have = flax.traverse_util.flatten_dict(params, sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  missing, extra = sorted(want.keys() - have), sorted(have.keys() - want)
  problems = [
    f'{key}: {tuple(have[key].shape)} in the weights, '
    f'{tuple(want[key].shape)} in the model'
    for key in sorted(want.keys() & have)
    if tuple(have[key].shape) != tuple(want[key].shape)
  ]
  if missing:
    logging.info('The weights lack: %s', missing)
  if extra:
    logging.info('The weights have, beside those of the model: %s', extra)
  if missing and fail_if_missing:
    problems += [f'{key}: missing in the weights' for key in missing]
  if extra and fail_if_extra:
    problems += [f'{key}: not in the model' for key in extra]
  if problems:
    shown = problems[:20] + [f'and {len(problems) - 20} more'] * (
      len(problems) > 20
    )
    raise ValueError(
      'the weights do not fit the model:\n  ' + '\n  '.join(shown)
    )
  return params


def interpolate_posembed(
  posemb,
  num_tokens: int,
  has_class_token: bool,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> np.ndarray:
  """Resizes position embeddings to another number of patches (section 3.2).

  Bilinear with corners aligned, what `scipy.ndimage.zoom(order=1)` computes. The
  class token's embedding is kept as it is.

  Args:
    posemb: [1, N, D], that of the class token first if there is one.
    num_tokens: number of tokens wanted, the class token included.
    has_class_token: whether the first token is a class token.
    grid: (height, width) of the patches in `posemb`; None: a square.
    new_grid: (height, width) wanted; None: a square.

  Returns:
    float32 [1, num_tokens, D].

  Raises:
    ValueError: if a grid is not what the number of tokens allows.
  """
  posemb = np.asarray(posemb, np.float32)
  extra = int(has_class_token)
  grid = _check_grid(grid, posemb.shape[1] - extra, 'the weights')
  new_grid = _check_grid(new_grid, num_tokens - extra, 'the model')
  table = posemb[0, extra:].reshape(*grid, -1)  # [h, w, D]
  for axis, size in enumerate(new_grid):
    table = _resize_axis(table, axis, size)
  table = table.reshape(1, math.prod(new_grid), -1)
  return np.concatenate([posemb[:, :extra], table], axis=1)


def _check_grid(grid, patches, where):
  side = math.isqrt(patches)
  grid = (side, side) if grid is None else tuple(grid)
  if math.prod(grid) != patches:
    raise ValueError(
      f'the {patches} position embeddings of {where} are no grid of {grid[0]} x '
      f'{grid[1]} patches: say which they are with grid=(height, width) '
      '(--config.pretrained_grid) and new_grid=(height, width)'
    )
  return grid


def _resize_axis(table, axis, size):
  """Linear interpolation along an axis, first and last entry kept in place."""
  old = table.shape[axis]
  if old == size:
    return table
  positions = np.linspace(0, old - 1, size, dtype=np.float64)
  low = np.clip(np.floor(positions).astype(int), 0, max(old - 2, 0))
  high = np.minimum(low + 1, old - 1)
  shape = [1] * table.ndim
  shape[axis] = size
  weight = (positions - low).astype(np.float32).reshape(shape)
  return (
    np.take(table, low, axis) * (1 - weight)
    + np.take(table, high, axis) * weight
  )


def load_pretrained(
  *,
  pretrained_path: str,
  init_params: dict,
  model_config,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> dict:
  """Loads weights to fine-tune them (appendix B.1.1).

  The head is that of `init_params` (zeros, in a new model), and so is the
  pre-logits layer where the model wants one that the file lacks; a pre-logits
  layer that the model does not want is dropped; position embeddings are resized.

  Args:
    pretrained_path: see `load`.
    init_params: parameters of the model, newly initialised.
    model_config: reads `representation_size`.
    grid: patches (height, width) of the weights; None: what the file says of
      it, or else a square.
    new_grid: patches (height, width) of the model; None: a square.

  Returns:
    Parameters of the shapes of `init_params`.

  Raises:
    FileNotFoundError, PermissionError, OSError, ValueError, ImportError: if the
      file cannot be read (see `load`) or does not fit; lists the leaves at
      fault, with both shapes, and says which model the weights look like.
  """
  taken = transferable(
    pretrained_path, init_params, model_config, grid, new_grid
  )
  init = flax.traverse_util.flatten_dict(init_params, sep='/')
  return flax.traverse_util.unflatten_dict({**init, **taken}, sep='/')


def transferable(
  pretrained_path: str,
  expected: dict,
  model_config,
  grid=None,
  new_grid=None,
  new: Sequence[str] = ('head/',),
) -> dict[str, np.ndarray]:
  """Returns what `load_pretrained` takes from the file, by '/'-joined path.

  Args:
    pretrained_path: see `load`.
    expected: parameters of the model, arrays or jax.ShapeDtypeStruct.
    model_config: reads `representation_size` and, to explain what does not fit
      with it, `transformer`.
    grid: patches (height, width) of the weights; None: what the file says of
      it, or else a square.
    new_grid: patches (height, width) of the model; None: a square.
    new: beginnings of the paths that are not taken, nor missed.

  Raises:
    FileNotFoundError, PermissionError, OSError, ValueError, ImportError: see
      load_pretrained.
  """
  encoder = model_config.get('transformer') or {}
  weights = reading.read(pretrained_path, encoder.get('num_heads'))
  flat = flax.traverse_util.flatten_dict(weights.params, sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  head = flat.get('head/kernel')
  if head is not None and not head.any():
    logging.warning(
      "The head of '%s' is all zeros: no classifier comes with these weights",
      pretrained_path,
    )
  new = list(new)
  if model_config.get('representation_size') is None:
    new.append('pre_logits/')
  flat = {k: v for k, v in flat.items() if not k.startswith(tuple(new))}
  if not any(key.startswith('pre_logits/') for key in flat):
    new.append('pre_logits/')
  want = {k: v for k, v in want.items() if not k.startswith(tuple(new))}
  has_class_token = 'cls' in flat
  try:
    if {_POSEMB} <= flat.keys() & want.keys() and has_class_token == (
      'cls' in want
    ):
      old, resized = flat[_POSEMB].shape, want[_POSEMB].shape
      grid = grid or _grid(weights)
      # As many tokens may still be another grid: 2 x 8 and 4 x 4.
      if old[2] == resized[2] and (
        old != resized or (grid and new_grid and tuple(grid) != tuple(new_grid))
      ):
        flat[_POSEMB] = interpolate_posembed(
          flat[_POSEMB], resized[1], has_class_token, grid, new_grid
        )
    inspect_params(params=_nested(flat), expected=_nested(want))
  except ValueError as e:
    raise ValueError(
      f"'{pretrained_path}' looks like {identify.describe(weights.params)}, the "
      f'model of this config like {identify.describe(expected)}: {e}'
    ) from None
  _note_differences(weights, model_config)
  return flat


def _nested(flat):
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def _grid(weights):
  """Patches (height, width) where the file says its image size, else None."""
  config = identify.model_config(weights.params)
  if weights.image_size is None or config is None:
    return None
  return models.patch_grid(config, weights.image_size)


def _note_differences(weights, model_config):
  """Warns where the source computes what these weights are for differently."""
  encoder = weights.model.get('transformer', {})
  for key in ('gelu', 'norm_eps'):
    there = encoder.get(key)
    here = (model_config.get('transformer') or {}).get(key)
    if None not in (here, there) and there != here:
      logging.warning(
        'The source of the weights computes with %s=%s, this model with %s: for '
        'the same features set --config.model.transformer.%s=%s',
        key,
        there,
        here,
        key,
        there,
      )


def augreg_filename(model: str, directory: str) -> str:
  """Returns the file of the best 21k checkpoint of a model of the AugReg paper.

  Best by the validation accuracy at the end of pre-training, of those that were
  pre-trained on ImageNet-21k for 300 epochs ("i21k"); from `index.csv`.

  Args:
    model: 'R_Ti_16', or the name of one checkpoint ('R_Ti_16-i21k-...'), which
      is then taken as it is.
    directory: folder of the published files, gs://vit_models/augreg for one.

  Returns:
    The path of the .npz.

  Raises:
    FileNotFoundError, PermissionError, OSError: if the index cannot be read.
    ValueError: if it has no such model.
  """
  filename = model
  if '-' not in model:
    rows = csv.DictReader(_augreg_index(directory).read_text().splitlines())
    ours = [
      row
      for row in rows
      if row['filename'].split('-')[0] == model and row['ds'] == 'i21k'
    ]
    if not ours:
      raise ValueError(
        f"model '{model}' is not among the i21k checkpoints of "
        f"'{directory}/index.csv' (config.model_or_filename)"
      )
    filename = max(ours, key=lambda row: float(row['final_val']))['filename']
  return f'{directory}/{filename}.npz'


def _augreg_index(directory):
  path = f'{directory}/index.csv'
  index = fetch.fetch(path)
  if not index.exists():
    raise FileNotFoundError(
      f"there is no '{path}': give the folder of the AugReg checkpoints "
      '(config.pretrained_dir), or the name of one of its files '
      '(configs/augreg.py:NAME)' + fetch.elsewhere(path)
    )
  return index


def get_augreg_df(directory: str = 'gs://vit_models/augreg'):
  """Reads the index of the AugReg checkpoints (arXiv 2106.10270).

  Args:
    directory: folder of `index.csv`, local, https:// or gs://.

  Returns:
    A pandas.DataFrame with a row for each fine-tuned checkpoint. Its columns:
    `name` of the model, `ds` pre-trained on, `lr`, `aug`, `wd`, `do`, `sd` of
    the pre-training, `best_val`, `final_val`, `final_test` accuracy,
    `adapt_ds`, `adapt_lr`, `adapt_steps`, `adapt_resolution` of the
    fine-tuning, `adapt_final_val`, `adapt_final_test` accuracy, `params`,
    `infer_samples_per_sec`, `filename` and `adapt_filename` of the checkpoints
    before and after fine-tuning, without their .npz.

  Raises:
    FileNotFoundError, PermissionError, OSError: if it cannot be read.
    ImportError: if pandas is missing.
  """
  try:
    import pandas as pd
  except ImportError as e:
    raise ImportError(
      "get_augreg_df needs pandas: pip install 'vit_jax[colab]'"
    ) from e
  with _augreg_index(directory).open('r') as f:
    return pd.read_csv(f)
