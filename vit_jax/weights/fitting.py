"""Selects the weights of a file that fit a model, and resizes embeddings.

Names and shapes are compared leaf by leaf. Position embeddings are resized as in
section 3.2 of the paper, patch embeddings as in FlexiViT (arXiv 2212.08013).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import re
from typing import Any

from absl import logging
import flax.traverse_util
import numpy as np

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.layers import positions
from vit_jax.weights import arrays, identify, preparation, reading
from vit_jax.weights.families import families, vit

# A table of position embeddings, see vit_jax/layers/positions.py.
_POSEMB = re.compile(
  r'(img/|)Transformer/posembed_(?:input|\d+)/(pos|x|y|relative)_(?:embedding|bias)'
)

_PATCHES = re.compile(r'(?:\w+/)?embedding/kernel')  # Also of a tower or backbone.


class OtherModelError(ValueError):
  """Weights belong to another kind of model, such as a classifier."""


def transferable(
  pretrained_path: str,
  expected: dict,
  model_config: Any,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
  new: Sequence[str] | Callable[..., Sequence[str]] = ('head',),
  partly: bool = False,
  adapt: Callable[[reading.Weights], reading.Weights] = lambda weights: weights,
  place: str = 'model',
  part: str = '',
  prepared: preparation.Preparation | None = None,
  entry: str | None = None,
) -> dict[str, np.ndarray]:
  """Returns the weights that `load_pretrained` takes, by '/'-joined path.

  Args that `load_pretrained` does not have:
    expected: parameters of the model, arrays or jax.ShapeDtypeStruct, and
      vit_jax.weights.reading.EXTRA.
    new: prefixes of the paths that keep their initial values; or a function
      that returns them, see vit_jax.tasks.base.Task.new_params.
    partly: whether the model may have parameters that published models lack, and
      the file more layers.
    adapt: see vit_jax.tasks.base.Task.adapt_weights.
    place: where in the config of a run `model_config` is.
    prepared: how the run prepares images; None: unknown.
    part: the part of an image-text model that this model is; it is initialised,
      with its head, from the same part of an image-text model's weights.
    entry: see vit_jax.weights.reading.read.
  """
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  weights = reading.read(pretrained_path, heads(model_config), entry=entry)
  family = families.from_tree(reading.leaves_of(weights))
  weights = family.scaled(weights)
  flat = reading.leaves_of(weights)
  # A whole classifier starts from the image tower of an image-text model.
  is_whole_model = place == 'model' and families.describe(want) == vit.Classifiers.noun
  part_weights = family.part(weights, 'img' if is_whole_model else part)
  if part_weights is not None:
    weights, flat = part_weights, reading.leaves_of(part_weights)
  if part_weights is not None and part:
    new = () if 'head/kernel' in flat.keys() & want.keys() else ('head',)
  _check_family(pretrained_path, flat, want)
  weights = adapt(weights)
  flat = reading.leaves_of(weights)
  if 'head/kernel' in flat and not flat['head/kernel'].any():
    logging.warning(
      f"The head of '{pretrained_path}' is all zeros: these weights have no trained "
      'classifier'
    )
  try:
    if callable(new):
      new = new(flat, want, weights.class_names)
    if model_config.get('representation_size') is None:
      new = (*new, 'pre_logits/')
    new = tuple(new)
    have = {k: v for k, v in flat.items() if not k.startswith(new)}
    resized, faults = _resized(have, want, grid or _grid(weights), new_grid)
    loaded = _choose(have | resized, want, new, partly, faults)
  except ValueError as e:
    raise ValueError(
      f"'{pretrained_path}' looks like {identify.describe(weights.params)}, the model "
      f'of this config like {identify.describe(expected)}: {e}'
    ) from None
  note_differences(weights, model_config, place)
  if prepared is not None:
    _note_preparation(weights.preparation, prepared)
  if partly:
    _note_parts(pretrained_path, flat, want, loaded, new)
  return loaded


def with_classes(weights: Any, class_names: Sequence[str]) -> Any:
  """Returns a detector's weights with a class head for some of its classes.

  Weights that lack one of the names, or repeat one, are returned unchanged.
  """
  names = weights.class_names or ()
  has_all = all(names.count(name) == 1 for name in class_names)
  if not has_all or identify.num_classes(weights.params) != len(names):
    return weights
  # The last row is "no object".
  rows = np.array([*map(names.index, class_names), len(names)])
  head = {k: x[..., rows] for k, x in weights.params['class_head'].items()}
  return weights._replace(
    params={**weights.params, 'class_head': head},
    class_names=tuple(class_names),
  )


def _check_family(path: str, have: Mapping[str, Any], want: Mapping[str, Any]) -> None:
  """Raises OtherModelError if weights belong to another kind of model."""
  file_kind, model_kind = families.describe(have), families.describe(want)
  if file_kind != model_kind and (file_kind, model_kind) not in families.STARTS:
    raise OtherModelError(
      f"pretrained_path='{path}' holds the weights of {file_kind}, which cannot "
      f'initialise {model_kind}: use weights of {model_kind} (config.pretrained)'
    )


def _choose(
  have: Mapping[str, Any],
  want: Mapping[str, Any],
  new: tuple[str, ...],
  partly: bool,
  faults: list[str],
) -> dict[str, np.ndarray]:
  """Returns the arrays to take from the file; ValueError if they do not fit."""
  if not any(key.startswith('pre_logits/') for key in have):
    new += ('pre_logits/',)
  want = {k: v for k, v in want.items() if not k.startswith(new)}
  missing, extra = sorted(want.keys() - have), sorted(have.keys() - want)
  if partly:
    missing = [path for path in missing if identify.is_published(path)]
    deepest = max(map(_layer, want), default=-1)
    extra = [path for path in extra if not _layer(path) > deepest >= 0]
  fail_for(faults + identify.misfits(have, want), missing, extra)
  return {path: x for path, x in have.items() if path in want}


def _layer(path: str) -> int:
  """Returns the number of the layer (of encoder or Mixer) of a path, or -1."""
  match = re.match(r'(?:Transformer/encoderblock|MixerBlock)_(\d+)/', path)
  return int(match[1]) if match else -1


_SEQUENCE = (
  'relative position embeddings belong to offsets between patches of one grid, and '
  'cannot be resized to another grid: use images of the size that the weights were '
  'trained with, so that new_grid equals grid (config.pp.crop)'
)


def _resized(
  have: Mapping[str, Any],
  want: Mapping[str, Any],
  grid: tuple[int, int] | None,
  new_grid: tuple[int, int] | None,
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns embeddings that change with the grid or the patch size, and faults.

  Grids with as many tokens may differ: 2 x 8 and 4 x 4. What cannot be resized
  keeps its shape, which then does not fit.
  """
  moved = bool(grid and new_grid and tuple(grid) != tuple(new_grid))
  resized: dict[str, np.ndarray] = {}
  faults: list[str] = []
  for path in filter(_PATCHES.fullmatch, have.keys() & want.keys()):
    (*old, _, _), (*new, _, _) = have[path].shape, want[path].shape
    if old == new or have[path].shape[2:] != want[path].shape[2:]:
      continue
    if path.replace('embedding', 'conv_root') in want:
      faults.append(
        f"{path}: patches of a ResNet's features are not resized: use the weights' "
        f'{old[0]} x {old[1]} (patches.size of the model, config.model.patches.size)'
      )
      continue
    resized[path] = resize_patches(have[path], new)
    logging.warning(
      f'The weights are for patches of {old[0]} x {old[1]} pixels: resized {path} to '
      f'{new[0]} x {new[1]}'
    )
  for path in sorted(filter(_POSEMB.fullmatch, have.keys() & want)):
    tower, kind = _POSEMB.fullmatch(path).groups()
    table = have[path]
    file_tokens = positions.class_tokens(have, tower)
    model_tokens = positions.class_tokens(want, tower)
    old, new = table.shape, want[path].shape
    if kind == 'relative' and (moved or old != new):
      faults.append(f'{path}: {_SEQUENCE}')
    elif file_tokens != model_tokens or len(old) != len(new):
      continue
    elif kind == 'pos' and old[::2] == new[::2] and (moved or old != new):
      resized[path] = interpolate_posembed(table, new[1], file_tokens, grid, new_grid)
    elif kind in ('x', 'y') and old[1:] == new[1:] and old != new:
      table = positions.resize(np.asarray(table, np.float32), new[0])
      resized[path] = table.astype(np.float32)
  return resized, faults


def _note_parts(
  path: str,
  flat: Mapping[str, Any],
  want: Mapping[str, Any],
  loaded: Mapping[str, Any],
  new: tuple[str, ...],
) -> None:
  """Warns of parameters that only the model or only the file has."""
  new = (*new, 'pre_logits/')
  for paths, consequence in (
    (want.keys() - loaded.keys(), 'lacks, which keep their initial values'),
    (flat.keys() - want.keys(), 'has but the model lacks, which are ignored'),
  ):
    paths = sorted(key for key in paths if not key.startswith(new))
    if paths:
      logging.warning(
        "Parameters that '%s' %s: %s", path, consequence, arrays.join_names(paths)
      )


def fail_for(
  misfits: Iterable[str] = (),
  missing: Iterable[str] = (),
  extra: Iterable[str] = (),
  summary: str = 'the weights do not fit the model',
) -> None:
  """Raises a ValueError that lists what does not fit, if anything.

  `misfits` are whole lines, `missing` and `extra` paths of leaves.
  """
  problems = list(misfits)
  for path in missing:
    problems.append(f'{path}: missing in the weights')
  for path in extra:
    problems.append(f'{path}: not in the model')
  if len(problems) > 20:
    problems = [*problems[:20], f'and {len(problems) - 20} more']
  if problems:
    raise ValueError(f'{summary}:\n  ' + '\n  '.join(problems))


def heads(model_config: Any) -> Any:
  """Returns the number of heads of a model, or a pair for its two towers."""
  if 'image' in model_config:
    text = model_config.get('text') or {}
    return heads(model_config.image), text.get('num_heads')
  return (model_config.get('transformer') or model_config).get('num_heads')


def _grid(weights: Any) -> tuple[int, int] | None:
  """Returns (height, width) in patches if the file gives it, or its image size."""
  encoder = model_configs.vit_of(weights.model).get('transformer') or {}
  if encoder.get('position_grid'):
    return tuple(encoder['position_grid'])
  config = identify.model_config(weights.params)
  if weights.image_size is None or config is None:
    return None
  return models.patch_grid(model_configs.vit_of(config), weights.image_size)


def note_differences(weights: Any, model_config: Any, place: str = 'model') -> None:
  """Warns if the model that the weights were made for computes differently."""
  family = families.of(model_config)
  for key, value in flax.traverse_util.flatten_dict(weights.model).items():
    if value is None and key[-1] == 'gelu':
      logging.warning(
        'No config specifies the GELU of these weights, or perhaps their number of '
        f'heads: check {".".join(key)} and num_heads of the model '
        f'(--config.{place}.{".".join(key)})'
      )
  for key, file_value, model_value in family.differences(weights.model, model_config):
    if key == 'classifier':  # Another pooling is the new model's choice.
      continue
    if _as_tuple(file_value) == _as_tuple(model_value):  # A list and a tuple.
      continue
    logging.warning(
      f'These weights were made for {key.rpartition(".")[2]}={file_value}, this model '
      f'computes with {model_value}: to get the same features, set {key}={file_value} '
      f'in the config of the model (--config.{place}.{key}={file_value})'
    )


def _as_tuple(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


def _note_preparation(
  file_preparation: preparation.Preparation, run_preparation: preparation.Preparation
) -> None:
  """Warns if images are resized in another way than for the weights."""
  differs = False
  flags = []
  for name in ('interpolation', 'antialias'):
    value = getattr(file_preparation, name)
    differs |= value != getattr(run_preparation, name)
    flags.append(f'--config.pp.{name}={value}')
  if file_preparation.source and differs:
    logging.warning(
      f'Images were prepared for these weights so: {file_preparation} '
      f'({file_preparation.source}); this run prepares them so: {run_preparation}: for '
      f'the same pixels pass {" ".join(flags)}'
    )


def resize_patches(kernel: Any, size: Sequence[int]) -> np.ndarray:
  """Resizes the kernel of a patch embedding to another patch size.

  Multiplies by the pseudo-inverse of the transpose of the matrix that resizes patches
  bilinearly, without antialiasing as in preprocessing ("PI-resize", FlexiViT, arXiv
  2212.08013, section 3.4). So patches that are enlarged give the same tokens. Where
  patches shrink, the squared error of tokens of white noise is the least possible.

  Takes [height, width, C, D] and a size (height, width) in pixels; returns float32.
  """
  kernel = np.asarray(kernel, np.float64)
  for axis, new in enumerate(size):
    old = kernel.shape[axis]
    places = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)[:, None]
    matrix = np.maximum(0, 1 - abs(places - np.arange(old)))  # [new, old]
    inverse = np.linalg.pinv(matrix.T)  # [new, old]
    kernel = np.moveaxis(np.tensordot(inverse, kernel, axes=(1, axis)), 0, axis)
  return kernel.astype(np.float32)


def interpolate_posembed(
  posemb: Any,
  num_tokens: int,
  has_class_token: bool,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> np.ndarray:
  """Resizes position embeddings to another number of patches (section 3.2).

  Interpolates bilinearly with corners aligned, as
  `scipy.ndimage.zoom(order=1)` does. The class token's embedding is kept.

  Args:
    posemb: [1, N, D]; the class token's embedding, if any, comes first.
    num_tokens: number of tokens wanted, including the class token.
    has_class_token: whether the first token is a class token.
    grid: (height, width) of `posemb` in patches; None: a square.
    new_grid: (height, width) wanted; None: a square.

  Returns float32 [1, num_tokens, D]. ValueError if a grid does not match its number
  of tokens.
  """
  posemb = np.asarray(posemb, np.float32)
  extra = int(has_class_token)
  grid = _check_grid(grid, posemb.shape[1] - extra, 'the weights')
  new_grid = _check_grid(new_grid, num_tokens - extra, 'the model')
  return positions.resize_grid(posemb, grid, new_grid).astype(np.float32)


def at_crop(model: Any) -> Any:
  """Returns a vit_jax.weights.writing.Model for images of its preparation's size.

  Position embeddings are resized as the program of its file does, with bicubic
  interpolation: with antialiasing in timm, open_clip and DINOv2 with registers.
  ValueError if the model has parameters that belong to one size.
  """
  size = model.preparation.crop
  if size in (None, model.image_size):
    return model
  config = model_configs.vit_of(model.config)
  grid, new_grid = (models.patch_grid(config, x) for x in (model.image_size, size))
  antialias = model.source != 'hf' or bool(config.get('registers'))
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  for path in filter(_POSEMB.fullmatch, flat):
    table = np.asarray(flat[path], np.float32)
    resized = positions.resize_bicubic(table, grid, new_grid, antialias)
    flat[path] = resized.astype(flat[path].dtype)
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  family = families.of(model.config)
  expected = family.shapes(model.config, params, model.num_classes, size)
  want = flax.traverse_util.flatten_dict(expected['params'], sep='/')
  if misfits := identify.misfits(flat, want):
    raise ValueError(
      f'images are cropped to {size[0]} x {size[1]} pixels, but parameters are for '
      f'{model.image_size[0]} x {model.image_size[1]}, and some of them cannot be '
      f'resized, such as {misfits[0]}: pass that size as image_size (--image_size)'
    )
  return model._replace(params=params, image_size=size)


def _check_grid(
  grid: tuple[int, int] | None, patches: int, where: str
) -> tuple[int, int]:
  side = math.isqrt(max(patches, 0))
  grid = (side, side) if grid is None else tuple(grid)
  if math.prod(grid) != patches:
    raise ValueError(
      f'the {patches} position embeddings of {where} are not a grid of {grid[0]} x '
      f'{grid[1]} patches: pass the sizes as grid=(height, width) '
      '(--config.pretrained_grid) and new_grid=(height, width)'
    )
  return grid
