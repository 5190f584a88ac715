"""Published weights in and out of a model's parameters.

Files of any kind are read (vit_jax.weights.reading); what is written is an .npz by the
published names, which the original's readers and timm's `load_npz` understand.
"""

from collections.abc import Sequence
import csv
from typing import Any

from absl import logging
import flax.core
import flax.traverse_util

from vit_jax.weights import fetch
from vit_jax.weights import fitting
from vit_jax.weights import identify
from vit_jax.weights import reading
from vit_jax.weights import writing

copy = fetch.copy
save = writing.save
interpolate_posembed = fitting.interpolate_posembed
transferable = fitting.transferable


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
    fitting.note_differences(
      weights, identify.model_config(weights.params) or {}
    )
  return weights.params


def inspect_params(
  *,
  params: dict,
  expected: dict,
  fail_if_extra: bool = True,
  fail_if_missing: bool = True,
) -> dict:
  """Compares the names of the leaves of `params` with those expected.

  Args:
    params: nested dict of arrays.
    expected: nested dict of arrays or jax.ShapeDtypeStruct; their shapes may be
      others, as those of a head are.
    fail_if_extra: whether a leaf that is not expected is an error.
    fail_if_missing: whether a leaf that is missing is an error.

  Returns:
    `params`.

  Raises:
    ValueError: lists the leaves that are missing or extra.
  """
  have = flax.traverse_util.flatten_dict(params, sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  missing, extra = sorted(want.keys() - have), sorted(have.keys() - want)
  if missing:
    logging.info('The weights lack: %s', missing)
  if extra:
    logging.info('The weights have, beside those of the model: %s', extra)
  fitting.fail_for(
    fitting.say_missing(missing * fail_if_missing)
    + fitting.say_extra(extra * fail_if_extra)
  )
  return params


def load_pretrained(
  *,
  pretrained_path: str,
  init_params: dict,
  model_config,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> flax.core.FrozenDict:
  """Loads weights to fine-tune them (appendix B.1.1).

  The head is that of `init_params` (zeros, in a new model), and so is the
  pre-logits layer where the model wants one that the file lacks; a pre-logits
  layer that the model does not want is dropped; position embeddings are resized.
  Parameters that no published model has, those of adapters for one, keep their
  initial values where the file lacks them, and layers of the file beyond those of
  the model are left out, with a warning each.

  Args:
    pretrained_path: see `load`.
    init_params: parameters of the model, newly initialised.
    model_config: reads `representation_size`.
    grid: patches (height, width) of the weights; None: what the file says of
      it, or else a square.
    new_grid: patches (height, width) of the model; None: a square.

  Returns:
    Parameters of the shapes of `init_params`, frozen as the original's are:
    `.unfreeze()` makes a nested dict of them.

  Raises:
    FileNotFoundError, PermissionError, OSError, ValueError, ImportError: if the
      file cannot be read (see `load`) or does not fit; lists the leaves at
      fault, with both shapes, and says which model the weights look like.
  """
  taken = fitting.transferable(
    pretrained_path, init_params, model_config, grid, new_grid, partly=True
  )
  init = flax.traverse_util.flatten_dict(init_params, sep='/')
  params = flax.traverse_util.unflatten_dict({**init, **taken}, sep='/')
  return flax.core.freeze(params)


def _fix_groupnorm(params):
  """Returns parameters with the GroupNorms of old files as vectors.

  Programs written for the original call it on what they read by themselves.
  """
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  flat = {path: reading.without_ones(path, leaf) for path, leaf in flat.items()}
  return flax.traverse_util.unflatten_dict(flat, sep='/')


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
      "get_augreg_df needs pandas: pip install -e '.[colab]' in the checkout of "
      'vit_jax'
    ) from e
  with _augreg_index(directory).open('r') as f:
    return pd.read_csv(f)
