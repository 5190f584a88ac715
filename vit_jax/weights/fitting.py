"""Selects the weights of a file that fit a model, and resizes embeddings.

Names and shapes are compared leaf by leaf. Position embeddings are resized as in
section 3.2 of the paper, patch embeddings as in FlexiViT (arXiv 2212.08013), and kernels
that read colour images are adapted to other numbers of channels as in timm.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import re
from typing import Any

from absl import logging
import flax.traverse_util
import numpy as np

from vit_jax import console, models
from vit_jax.configs import models as model_configs
from vit_jax.layers import positions
from vit_jax.weights import arrays, descriptions, identify, preparation, reading
from vit_jax.weights.families import families, leaves as leaves_lib, vit

# A table of position embeddings, see vit_jax/layers/positions.py.
_POSEMB = re.compile(
  r'(img/|)Transformer/posembed_(?:input|\d+)/(pos|x|y|relative)_(?:embedding|bias)'
)

_COLOURS = 3  # Channels of the images that published weights read.
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

  Args:
    pretrained_path, model_config, grid, new_grid: see
      vit_jax.checkpoint.load_pretrained.
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

  Returns:
    Arrays by path.

  Raises:
    ValueError: if the weights do not fit.
  """
  model_leaves = flax.traverse_util.flatten_dict(expected, sep='/')
  weights = reading.read(pretrained_path, heads(model_config), entry=entry)
  family = families.from_tree(reading.leaves_of(weights))
  weights = family.scaled(weights)
  # A whole classifier starts from the image tower of an image-text model.
  is_classifier = families.describe(model_leaves) == vit.Classifiers.noun
  if place == 'model' and is_classifier:
    weights = family.part(weights, 'img') or weights
  elif part:
    tower = family.part(weights, part)
    if tower is not None:
      weights = tower
      has_head = 'head/kernel' in reading.leaves_of(tower).keys() & model_leaves.keys()
      new = () if has_head else ('head',)
  _check_family(pretrained_path, reading.leaves_of(weights), model_leaves)
  weights = adapt(weights)
  file_leaves = reading.leaves_of(weights)
  if 'head/kernel' in file_leaves and not file_leaves['head/kernel'].any():
    logging.warning(
      f"The head of '{pretrained_path}' is all zeros: these weights have no trained "
      'classifier'
    )
  try:
    if callable(new):
      new = new(file_leaves, model_leaves, weights.class_names)
    prefixes = tuple(new)
    if model_config.get('representation_size') is None:
      prefixes = (*prefixes, 'pre_logits/')
    leaves = {k: v for k, v in file_leaves.items() if not k.startswith(prefixes)}
    faults = _resize(leaves, model_leaves, grid or _grid(weights), new_grid)
    loaded = _choose(leaves, model_leaves, prefixes, partly, faults)
  except ValueError as e:
    raise ValueError(
      f"'{pretrained_path}' looks like {identify.describe(weights.params)}, the model "
      f'of this config like {identify.describe(expected)}: {e}'
    ) from None
  note_differences(weights, model_config, place)
  if prepared is not None:
    _note_preparation(weights.preparation, prepared)
  if partly:
    _note_parts(pretrained_path, file_leaves, model_leaves, loaded, prefixes)
  return loaded


def with_classes(weights: Any, class_names: Sequence[str]) -> Any:
  """Returns a detector's weights with a class head for some of its classes.

  Weights that lack one of the names, or repeat one, are returned unchanged.
  """
  names = weights.class_names or ()
  has_all = all(names.count(name) == 1 for name in class_names)
  if not has_all or identify.num_classes(weights.params) != len(names):
    return weights
  rows = [names.index(name) for name in class_names]
  rows.append(len(names))  # "No object".
  head = {k: x[..., np.array(rows)] for k, x in weights.params['class_head'].items()}
  return weights._replace(
    params={**weights.params, 'class_head': head},
    class_names=tuple(class_names),
  )


def _check_family(
  path: str, file_leaves: Mapping[str, Any], model_leaves: Mapping[str, Any]
) -> None:
  """Raises OtherModelError if weights belong to another kind of model."""
  file_kind = families.describe(file_leaves)
  model_kind = families.describe(model_leaves)
  if file_kind != model_kind and (file_kind, model_kind) not in families.STARTS:
    raise OtherModelError(
      f"pretrained_path='{path}' holds the weights of {file_kind}, which cannot "
      f'initialise {model_kind}: use weights of {model_kind} (config.pretrained)'
    )


def _choose(
  file_leaves: Mapping[str, Any],
  model_leaves: Mapping[str, Any],
  new: tuple[str, ...],
  partly: bool,
  faults: list[str],
) -> dict[str, np.ndarray]:
  """Returns the arrays to take from the file; ValueError if they do not fit."""
  if not any(path.startswith('pre_logits/') for path in file_leaves):
    new += ('pre_logits/',)
  expected = {k: v for k, v in model_leaves.items() if not k.startswith(new)}
  missing = sorted(expected.keys() - file_leaves.keys())
  extra = sorted(file_leaves.keys() - expected.keys())
  if partly:
    missing = [path for path in missing if identify.is_published(path)]
    deepest = max(map(_layer, expected), default=-1)
    if deepest >= 0:
      extra = [path for path in extra if _layer(path) <= deepest]
  fail_for(faults + identify.misfits(file_leaves, expected), missing, extra)
  return {path: x for path, x in file_leaves.items() if path in expected}


def _layer(path: str) -> int:
  """Returns the number of the layer (of encoder or Mixer) of a path, or -1."""
  match = re.match(r'(?:Transformer/encoderblock|MixerBlock)_(\d+)/', path)
  return int(match[1]) if match else -1


_SEQUENCE = (
  'relative position embeddings belong to offsets between patches of one grid, and '
  'cannot be resized to another grid: use images of the size that the weights were '
  'trained with, so that new_grid equals grid (config.pp.crop)'
)


def _resize(
  leaves: dict[str, Any],
  model_leaves: Mapping[str, Any],
  grid: tuple[int, int] | None,
  new_grid: tuple[int, int] | None,
) -> list[str]:
  """Resizes what changes with the grid, the patch size or the channels, in place.

  Returns faults. What cannot be resized keeps its shape, which then does not fit.
  """
  faults = []
  for path in sorted(leaves.keys() & model_leaves.keys()):
    if path.endswith(leaves_lib.INPUT_KERNELS):
      _adapt_channels(path, leaves, model_leaves)
    if _PATCHES.fullmatch(path):
      faults += _resize_patches(path, leaves, model_leaves)
    elif match := _POSEMB.fullmatch(path):
      faults += _resize_positions(match, leaves, model_leaves, grid, new_grid)
  return faults


def _adapt_channels(
  path: str, leaves: dict[str, Any], model_leaves: Mapping[str, Any]
) -> None:
  """Adapts a kernel that reads colour images to the channels of the model."""
  shape, model_shape = leaves[path].shape, model_leaves[path].shape
  if len(shape) != 4 or shape[2] != _COLOURS or model_shape[2] == _COLOURS:
    return
  leaves[path] = adapt_channels(leaves[path], model_shape[2])
  logging.warning(
    f'The weights are for images of {_COLOURS} channels: adapted {path} to '
    f'{console.pluralize(model_shape[2], "channel")}'
  )


def _resize_patches(
  path: str, leaves: dict[str, Any], model_leaves: Mapping[str, Any]
) -> list[str]:
  """Resizes a patch embedding, see `_resize`."""
  shape, model_shape = leaves[path].shape, model_leaves[path].shape
  size, new_size = shape[:2], model_shape[:2]
  if size == new_size or shape[2:] != model_shape[2:]:
    return []
  if path.replace('embedding', 'conv_root') in model_leaves:
    return [
      f"{path}: patches of a ResNet's features are not resized: use the weights' "
      f'{size[0]} x {size[1]} (patches.size of the model, config.model.patches.size)'
    ]
  leaves[path] = resize_patches(leaves[path], new_size)
  logging.warning(
    f'The weights are for patches of {size[0]} x {size[1]} pixels: resized {path} to '
    f'{new_size[0]} x {new_size[1]}'
  )
  return []


def _resize_positions(
  match: re.Match,
  leaves: dict[str, Any],
  model_leaves: Mapping[str, Any],
  grid: tuple[int, int] | None,
  new_grid: tuple[int, int] | None,
) -> list[str]:
  """Resizes position embeddings, see `_resize`; `match` is of _POSEMB."""
  path = match[0]
  tower, kind = match.groups()
  shape, new_shape = leaves[path].shape, model_leaves[path].shape
  # Grids with as many tokens may differ: 2 x 8 and 4 x 4.
  is_other_grid = bool(grid and new_grid and tuple(grid) != tuple(new_grid))
  is_other_size = shape != new_shape
  if kind == 'relative' and (is_other_grid or is_other_size):
    return [f'{path}: {_SEQUENCE}']
  num_first = positions.class_tokens(leaves, tower)
  if num_first != positions.class_tokens(model_leaves, tower):
    return []
  if len(shape) != len(new_shape):
    return []
  if kind == 'pos' and shape[::2] == new_shape[::2]:
    if is_other_grid or is_other_size:
      leaves[path] = interpolate_posembed(
        leaves[path], new_shape[1], num_first, grid, new_grid
      )
  elif kind in ('x', 'y') and shape[1:] == new_shape[1:] and is_other_size:
    table = np.asarray(leaves[path], np.float32)
    leaves[path] = positions.resize(table, new_shape[0]).astype(np.float32)
  return []


def _note_parts(
  path: str,
  file_leaves: Mapping[str, Any],
  model_leaves: Mapping[str, Any],
  loaded: Mapping[str, Any],
  new: tuple[str, ...],
) -> None:
  """Warns of parameters that only the model or only the file has."""
  new = (*new, 'pre_logits/')
  for paths, consequence in (
    (model_leaves.keys() - loaded.keys(), 'lacks, which keep their initial values'),
    (
      file_leaves.keys() - model_leaves.keys(),
      'has but the model lacks, which are ignored',
    ),
  ):
    names = sorted(path for path in paths if not path.startswith(new))
    if names:
      logging.warning(
        "Parameters that '%s' %s: %s", path, consequence, arrays.join_names(names)
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
  family = families.from_config(model_config)
  fields = flax.traverse_util.flatten_dict(weights.model, sep='.')
  for key, value in fields.items():
    if value is None and key.rpartition('.')[2] == 'gelu':
      logging.warning(
        'No config specifies the GELU of these weights, or perhaps their number of '
        f'heads: check {key} and num_heads of the model (--config.{place}.{key})'
      )
  known_fields = families.from_tree(reading.leaves_of(weights)).computes
  for key, file_value, model_value in family.differences(weights.model, model_config):
    # Another pooling is the new model's choice, and so is what only its kind has.
    if key == 'classifier' or key not in known_fields:
      continue
    # JSON has lists where a config has tuples.
    if descriptions.as_tuple(file_value) == descriptions.as_tuple(model_value):
      continue
    logging.warning(
      f'These weights were made for {key.rpartition(".")[2]}={file_value}, this model '
      f'computes with {model_value}: to get the same features, set {key}={file_value} '
      f'in the config of the model (--config.{place}.{key}={file_value})'
    )


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

  Args:
    kernel: [height, width, C, D].
    size: (height, width) in pixels.

  Returns:
    float32 [*size, C, D].
  """
  kernel = np.asarray(kernel, np.float64)
  for axis, new in enumerate(size):
    old = kernel.shape[axis]
    centres = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
    matrix = np.maximum(0, 1 - abs(centres[:, None] - np.arange(old)))  # [new, old]
    inverse = np.linalg.pinv(matrix.T)  # [new, old]
    kernel = np.moveaxis(np.tensordot(inverse, kernel, axes=(1, axis)), 0, axis)
  return kernel.astype(np.float32)


def adapt_channels(kernel: Any, channels: int) -> np.ndarray:
  """Adapts a kernel that reads colour images to another number of channels.

  As timm's `in_chans` does (`adapt_input_conv`): the kernels of red, green and blue are
  repeated in this order and multiplied by 3 / `channels`, so that an image whose channels
  are equal gives about the same features; for one channel they are added up.

  Args:
    kernel: [height, width, 3, D].
    channels: C.

  Returns:
    float32 [height, width, C, D].
  """
  kernel = np.asarray(kernel, np.float32)
  if channels == 1:
    return kernel.sum(axis=2, keepdims=True)
  repeated = np.take(kernel, np.arange(channels) % _COLOURS, axis=2)
  return repeated * np.float32(_COLOURS / channels)


def interpolate_posembed(
  posemb: Any,
  num_tokens: int,
  has_class_token: bool | int,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> np.ndarray:
  """Resizes position embeddings to another number of patches (section 3.2).

  Interpolates bilinearly with corners aligned, as
  `scipy.ndimage.zoom(order=1)` does. The class token's embedding is kept.

  Args:
    posemb: [1, N, D]; the class token's embedding, if any, comes first.
    num_tokens: number of tokens wanted, including the class token.
    has_class_token: whether the first token is a class token, or how many such tokens
      there are.
    grid: (height, width) of `posemb` in patches; None: a square.
    new_grid: (height, width) wanted; None: a square.

  Returns:
    float32 [1, num_tokens, D].

  Raises:
    ValueError: if a grid does not match its number of tokens.
  """
  posemb = np.asarray(posemb, np.float32)
  num_first = int(has_class_token)
  grid = _check_grid(grid, posemb.shape[1] - num_first, 'the weights')
  new_grid = _check_grid(new_grid, num_tokens - num_first, 'the model')
  return positions.resize_grid(posemb, grid, new_grid).astype(np.float32)


def at_crop(model: Any) -> Any:
  """Returns a vit_jax.weights.writing.Model for images of its preparation's size.

  Position embeddings are resized as the program of its file does, with bicubic
  interpolation: with antialiasing in timm, open_clip and DINOv2 with registers.
  ValueError if the model has parameters that belong to one size.
  """
  old_size = model.image_size
  size = model.preparation.crop
  if size is None or old_size is None or size == old_size:
    return model
  config = model_configs.vit_of(model.config)
  antialias = model.source != 'hf' or bool(config.get('registers'))
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  for path in filter(_POSEMB.fullmatch, flat):
    grid = models.count_patches(config, old_size)
    new_grid = models.count_patches(config, size)
    table = np.asarray(flat[path], np.float32)
    resized = positions.resize_bicubic(table, grid, new_grid, antialias)
    flat[path] = resized.astype(flat[path].dtype)
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  family = families.from_config(model.config)
  expected = family.shapes(model.config, params, model.num_classes, size)
  model_leaves = flax.traverse_util.flatten_dict(expected['params'], sep='/')
  fail_for(
    identify.misfits(flat, model_leaves),
    summary=f'images are cropped to {size[0]} x {size[1]} pixels, but parameters are for '
    f'{old_size[0]} x {old_size[1]}: pass that size as image_size (--image_size), since '
    'some cannot be resized',
  )
  return model._replace(params=params, image_size=size)


def _check_grid(
  grid: tuple[int, int] | None, patches: int, where: str
) -> tuple[int, int]:
  """Returns the grid of patches, by default a square; ValueError if it has others."""
  side = math.isqrt(max(patches, 0))
  height, width = grid or (side, side)
  if height * width != patches:
    raise ValueError(
      f'the {patches} position embeddings of {where} are not a grid of {height} x '
      f'{width} patches: pass the sizes as grid=(height, width) '
      '(--config.pretrained_grid) and new_grid=(height, width)'
    )
  return height, width
