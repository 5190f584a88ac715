"""Converts weights between this package, timm and Hugging Face, bit for bit.

`vit_jax convert` (vit_jax/commands/convert.py) is the command.
"""

from collections.abc import Mapping, Sequence
import copy
import tempfile
from typing import Any, Literal

from etils import epath
import flax.traverse_util
import ml_collections
import numpy as np

from vit_jax import console, models
from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import files
from vit_jax.layers import encoder, position_kinds, positions
from vit_jax.weights import arrays, card, fitting, hub, identify, reading, writing
from vit_jax.weights.families import base as families_base, families

KINDS = tuple(writing.WRITERS)
# Kind of weights that are only a part of a model -> what they are.
_PARTS = {
  'resnet': 'the backbone of a detector',
  'bert': 'the text tower of an image-text model',
}


def read(
  src: str,
  class_names: Sequence[str] | None = None,
  image_size: tuple[int, int] | None = None,
  num_heads: int | tuple[int, int] | None = None,
  dtype: str | None = None,
  gelu: str | None = None,
  entry: str | None = None,
  base: str | None = None,
) -> writing.Model:
  """Reads weights, see vit_jax.weights.reading.read, and identifies their model.

  Args:
    src: see vit_jax.weights.reading.read; likewise num_heads, dtype, entry and
      base.
    class_names: names of the classes; override the names in `src`. For a detector,
      some names of `src` in any order select these classes, such as the 80 classes
      of COCO in a model for its 91 ids.
    image_size: (height, width) in pixels; needed if `src` does not contain it and
      the grid of patches is not square.
    gelu: 'erf', 'tanh' or 'quick', see vit_jax.layers.encoder.GELUS; needed if the
      config of `src` does not contain it.

  Raises:
    FileNotFoundError, OSError, ImportError: see vit_jax.weights.reading.read.
    ValueError: if the file is damaged, or names, size and weights do not fit together.
  """
  schema.check('image_size', image_size, schema.HeightWidth | None, '--')
  weights = reading.read(src, num_heads, dtype, entry, base)
  if weights.kind in _PARTS:
    raise ValueError(
      f"'{src}' holds only {_PARTS[weights.kind]}: start a run from it "
      '(--config.pretrained) and convert that'
    )
  config = _config(src, weights, gelu)
  if class_names:
    weights = _with_names(weights, class_names)
  num_classes = identify.num_classes(weights.params)
  _check_multiple(config, image_size)
  stored_heads = fitting.heads(config)
  if type(num_heads) is type(stored_heads) and num_heads != stored_heads:
    raise ValueError(
      f"num_heads={num_heads}, but the model in '{src}' has {stored_heads}: leave it "
      'out (--num_heads)'
    )
  names = weights.class_names or ()
  family = families.from_config(config)
  with arrays.file_errors(src):
    preparation = weights.preparation
    size = _trained_size(family, config, weights, image_size)
    size = size or image_size or preparation.crop
    new_size = image_size or size
    is_unknown = preparation.crop is None and preparation.longest_side is None
    if new_size is not None and (image_size or is_unknown):
      preparation = preparation.at_size(new_size)
    if weights.kind != 'workdir':
      _check_shapes(weights, config, num_classes, size)
    model = writing.Model(
      params=weights.params,
      config=config,
      class_names=names if len(names) == num_classes else None,
      num_classes=num_classes,
      image_size=size,
      extra=weights.extra,
      metadata=weights.metadata,
      source=weights.kind,
      preparation=preparation,
      adapters=weights.adapters,
      omitted=weights.omitted,
    )
    family.check(model)
  return model if image_size in (None, size) else fitting.at_crop(model)


def _with_names(
  weights: reading.Weights, class_names: Sequence[str]
) -> reading.Weights:
  """Names the classes of a head, or selects some of a detector's classes."""
  num_classes = identify.num_classes(weights.params)
  if len(class_names) < num_classes:
    weights = fitting.with_classes(weights, class_names)
    num_classes = identify.num_classes(weights.params)
  if len(class_names) != num_classes:
    raise ValueError(
      f'class_names has {console.pluralize(len(class_names), "name")}, but the head '
      f'{console.pluralize(num_classes, "class")}: pass as many names as classes '
      '(--class_names)'
    )
  return weights._replace(class_names=tuple(class_names))


def _config(
  src: str, weights: reading.Weights, gelu: str | None
) -> ml_collections.ConfigDict:
  """Returns the fields of the model of weights."""
  config = identify.model_config(weights.params, weights.model)
  if config is None:
    raise ValueError(
      f"'{src}' does not hold the parameters of a ViT, hybrid, Mixer, BiT, DETR, "
      f'iGPT or LiT, but {sorted(weights.params)[:6]}: use weights of one of these'
    )
  fields = _with_gelu(src, weights.model, gelu)
  if weights.kind == 'workdir':
    return ml_collections.ConfigDict(fields)
  with config.ignore_type():
    config.update(fields)
  return config


def _trained_size(
  family: families_base.Family,
  config: ml_collections.ConfigDict,
  weights: reading.Weights,
  image_size: tuple[int, int] | None,
) -> tuple[int, int] | None:
  """Returns (height, width) of the images that parameters are for; None: of any.

  `image_size` helps where the weights do not say it.
  """
  can_resize = bool(model_configs.vit_of(config).get('patches'))
  if not can_resize:
    size = image_size or weights.image_size
    return family.image_size(config, weights.params, size)
  if weights.image_size is not None or image_size is None:
    return family.image_size(config, weights.params, weights.image_size)
  try:
    return family.image_size(config, weights.params, image_size)
  except ValueError:  # Resized from a square.
    return family.image_size(config, weights.params, None)


def _check_multiple(
  config: ml_collections.ConfigDict, image_size: tuple[int, int] | None
) -> None:
  """Raises ValueError unless patches divide the size of images."""
  model = model_configs.vit_of(config)
  if image_size is None or not model.get('patches') or model.get('resnet'):
    return
  if any(side % patch for side, patch in zip(image_size, model.patches.size)):
    raise ValueError(
      f'image_size={image_size[0]},{image_size[1]} must be multiples of the patches, '
      f'{model.patches.size[0]} x {model.patches.size[1]} pixels (--image_size)'
    )


def _with_gelu(src: str, model: Mapping[str, Any], gelu: str | None) -> dict[str, Any]:
  """Returns the fields of a model with a GELU where its files lack it."""
  fields = flax.traverse_util.flatten_dict(model)
  gelus = {path: x for path, x in fields.items() if path[-1] == 'gelu'}
  if gelu is None and None in gelus.values():
    raise ValueError(
      f"'{src}' does not say which GELU its model computes: put its config next to "
      f'it, or pass gelu, one of {", ".join(encoder.GELUS)} (--gelu)'
    )
  if gelu is not None:
    schema.check('gelu', gelu, Literal[*encoder.GELUS], '--')
    if set(gelus.values()) not in ({None}, {gelu}):
      stored = ' and '.join(map(str, {*gelus.values()})) or 'given by its format'
      raise ValueError(
        f"gelu='{gelu}', but the GELU of '{src}' is {stored}: leave it out (--gelu)"
      )
    fields |= dict.fromkeys(gelus, gelu)
  return flax.traverse_util.unflatten_dict(fields)


def _check_shapes(
  weights: reading.Weights,
  config: ml_collections.ConfigDict,
  num_classes: int,
  size: tuple[int, int] | None,
) -> None:
  """Raises ValueError for missing, unknown and misshapen leaves."""
  family = families.from_config(config)
  shapes = family.shapes(config, weights.params, num_classes, size)
  expected = flax.traverse_util.flatten_dict(
    {**shapes.pop('params'), **shapes}, sep='/'
  )
  leaves = reading.leaves_of(weights)
  fitting.fail_for(
    identify.misfits(leaves, expected),
    missing=sorted(expected.keys() - leaves.keys()),
    extra=sorted(leaves.keys() - expected.keys()),
    summary=f'it looks like {identify.describe(weights.params)}, but',
  )


def push(
  src: str, name: str, to: str = 'hf', **options: Any
) -> tuple[writing.Model, list[str]]:
  """Converts weights, and uploads them with a card to the Hugging Face Hub.

  `name` is hf://OWNER/NAME; a model that exists gets a new commit. For the rest, the
  result and the errors see `convert`. PermissionError without a token, before
  anything is read; OSError if the hub refuses.
  """
  if to not in ('hf', 'timm'):
    raise ValueError(f'push needs --to=hf|timm, not {to}: the hub loads these')
  hub.check_push(name)
  with tempfile.TemporaryDirectory() as parent:
    folder = epath.Path(parent) / 'model'
    model, notes = convert(src, str(folder), to, **options)
    owner_and_name = hub.parse(name).id
    text = card.make(model, src, folder, owner_and_name)
    (folder / 'README.md').write_text(text)
    return model, [*notes, f'the model is at {hub.push(folder, name)}']


def convert(
  src: str,
  dst: str,
  to: str | None = None,
  class_names: Sequence[str] | None = None,
  image_size: tuple[int, int] | None = None,
  num_heads: int | tuple[int, int] | None = None,
  gelu: str | None = None,
  entry: str | None = None,
  base: str | None = None,
) -> tuple[writing.Model, list[str]]:
  """Converts weights bit for bit; returns the model, and notes about the result.

  Args:
    src: weights in any format, see vit_jax.weights.reading.read.
    dst: file (npz, pth) or folder to write; it appears only when it is complete.
    to: one of KINDS; by default npz or pth if `dst` ends so.
    class_names, image_size, num_heads, gelu, entry, base: see `read`.

  Raises:
    FileExistsError: if `dst` exists.
    ValueError: if the other library has no such model; and what `read` raises.
  """
  target, to = _check_target(dst, to)
  model = read(
    src, class_names, image_size, num_heads, gelu=gelu, entry=entry, base=base
  )
  notes = writing.check(model, to)
  crop = model.preparation.crop
  if to not in ('hf', 'peft') and crop not in (None, model.image_size):
    notes.append(
      f'position embeddings are resized from images of {model.image_size} to '
      f'{crop}, as {model.preparation.source} says: pass --image_size to keep them'
    )
    model = fitting.at_crop(model)
  if to != 'workdir':
    model, position_notes = _with_plain_positions(model, to)
    notes += position_notes
  write = writing.WRITERS[to]
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    if to in writing.FILES:  # These writers make a temporary file themselves.
      notes += write(model, target)
    else:
      with files.new_folder(target) as folder:
        notes += write(model, folder)
  except OSError as e:
    if isinstance(e, FileExistsError) and e.errno is None:
      raise  # Its message says what to do.
    raise OSError(f"DST '{dst}' cannot be written: {e}; use another") from e
  return model, notes


def _check_target(dst: str, to: str | None) -> tuple[epath.Path, str]:
  """Returns the path to write and its format; an error if they do not fit."""
  if hub.is_hub_path(dst):
    raise ValueError(f"DST '{dst}' is on the hub: pass --push={dst} instead")
  dst = files.expanded(dst)
  target = epath.Path(dst)
  to = to or {'.npz': 'npz', '.pth': 'pth'}.get(target.suffix)
  if to not in KINDS:
    raise ValueError(
      f"the format of DST '{dst}' is unknown (to={to}): pass --to={'|'.join(KINDS)}"
    )
  endings = writing.FILES.get(to)
  if endings and target.suffix not in endings:
    raise ValueError(f"DST '{dst}' must end in {' or '.join(endings)} for --to={to}")
  if to == 'workdir':
    files.check_no_pattern(target, 'DST')
  if target.exists():
    raise FileExistsError(f"DST '{dst}' exists: use another, or delete it first")
  return target, to


def _with_plain_positions(
  model: writing.Model, to: str
) -> tuple[writing.Model, list[str]]:
  """Replaces position embeddings on a grid by their table; also returns notes."""
  fields = model_configs.vit_of(model.config).get('transformer') or {}
  kind = fields.get('position_embedding', 'learned_1d')
  layers = fields.get('position_layers', 'stem')
  if (kind, layers) == ('learned_1d', 'stem') or model.image_size is None:
    return model, []
  is_tower = 'transformer' not in model.config
  is_per_layer = kind in (*position_kinds.ROPES, 'relative_bias')
  can_hold = kind == 'none' or (is_per_layer and to in ('hf', 'timm'))
  if can_hold and not is_tower:  # See `formats_of`.
    return model, []
  if kind == 'relative' or is_per_layer or layers != 'stem' or is_tower:
    raise ValueError(
      f"position_embedding='{kind}' with position_layers='{layers}' cannot be "
      f'written as {to}, whose models add one table before the first layer: use '
      '--to=workdir'
    )
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  grid = models.count_patches(model.config, model.image_size)
  table = np.asarray(positions.first_table(flat, fields, grid))
  flat = {path: x for path, x in flat.items() if '/posembed_' not in path}
  flat['Transformer/posembed_input/pos_embedding'] = table
  config = copy.deepcopy(model.config)
  config.transformer.position_embedding = 'learned_1d'
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  note = (
    f"position_embedding='{kind}' is written as the table that it makes: logits are the "
    'same'
  )
  return model._replace(params=params, config=config), [note]
