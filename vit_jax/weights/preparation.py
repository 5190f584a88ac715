"""How images are prepared for weights: reads and writes the files that say it.

  hf         preprocessor_config.json of transformers, or processor_config.json, which
             holds the same below 'image_processor' and is preferred there
  timm       'pretrained_cfg' in config.json
  open_clip  'preprocess_cfg' in open_clip_config.json

Keys that are absent have the defaults of the program that reads the file. What
`config.pp` cannot say is an error.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Annotated, Any, Literal

from absl import logging
from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.weights import descriptions

_HALF = (0.5, 0.5, 0.5)
_IMAGENET = {'image_mean': (0.485, 0.456, 0.406), 'image_std': (0.229, 0.224, 0.225)}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Numbers of Pillow's filters, `resample` of transformers.
_RESAMPLE = {1: 'lanczos', 2: 'bilinear', 3: 'bicubic'}
_SQUARE = {'height': 224, 'width': 224}
_VIT = {
  'size': _SQUARE, 'resample': 2, 'image_mean': _HALF, 'image_std': _HALF,
  'crop_size': _SQUARE, 'int_size': ('height', 'width'),
}  # fmt: skip
_CLIP = {
  'size': {'shortest_edge': 224}, 'resample': 3, 'int_size': ('shortest_edge',),
  'do_center_crop': True, 'crop_size': _SQUARE,
  'image_mean': _CLIP_MEAN, 'image_std': _CLIP_STD,
}  # fmt: skip
_DETR = {
  'size': {'shortest_edge': 800, 'longest_edge': 1333}, 'resample': 2,
  'int_size': ('shortest_edge',), **_IMAGENET,
}  # fmt: skip
# Image processors of transformers without the ending of their names -> their defaults,
# and the keys of a size that is a number (`int_size`).
_PROCESSORS: dict[str, dict[str, Any]] = {
  'ViT': _VIT,
  'DeiT': {
    **_VIT, 'size': {'height': 256, 'width': 256}, 'resample': 3, 'do_center_crop': True
  },
  'Beit': {**_VIT, 'resample': 3},
  'DINOv3ViT': {**_VIT, **_IMAGENET},
  'Bit': _CLIP,
  'CLIP': _CLIP,
  'ChineseCLIP': _CLIP,
  'Siglip': {**_VIT, 'resample': 3, 'int_size': ('shortest_edge',)},
  'Siglip2': {**_VIT, 'size': None},
  'ImageGPT': {**_VIT, 'size': {'height': 256, 'width': 256}},
  'Detr': _DETR,
  'ConditionalDetr': _DETR,
  'DeformableDetr': _DETR,
}  # fmt: skip
# Those of models whose files name none, by `model_type`.
_BY_MODEL_TYPE = {
  'deit': 'DeiT', 'dinov2': 'Bit', 'dinov2_with_registers': 'Bit',
  'dinov3_vit': 'DINOv3ViT', 'clip': 'CLIP', 'clip_vision_model': 'CLIP',
  'chinese_clip': 'ChineseCLIP', 'siglip': 'Siglip', 'siglip_vision_model': 'Siglip',
  'siglip2': 'Siglip2', 'siglip2_vision_model': 'Siglip2', 'beit': 'Beit',
  'detr': 'Detr', 'imagegpt': 'ImageGPT',
}  # fmt: skip
# Steps of transformers that change nothing here: images always become RGB, padding has
# a mask, and labels of segmentation are not read.
_NEUTRAL_STEPS = ('do_convert_rgb', 'do_pad', 'do_reduce_labels', 'do_color_quantize')
# Keys of steps that this package lacks; None, False and 1 leave them out.
_UNSUPPORTED = (
  'rescale_offset', 'include_top', 'pad_size', 'keep_aspect_ratio',
  'ensure_multiple_of', 'size_divisor',
)  # fmt: skip
_STEPS = ('do_resize', 'do_center_crop', 'do_rescale', 'do_normalize', *_NEUTRAL_STEPS)
# Keys of `config.pp` that `Preparation.fields` may return for images of one size.
KEYS = (
  'crop', 'resize', 'resize_mode', 'interpolation', 'antialias', 'crop_rounding',
  'jpeg_shrink',
)  # fmt: skip
# Further keys that are read, and those that say nothing about pixels.
_READ_KEYS = {
  'size', 'max_size', 'resample', 'crop_size', 'rescale_factor', 'offset', 'image_mean',
  'image_std', 'image_processor_type', 'feature_extractor_type',
}  # fmt: skip
_OTHER_KEYS = {
  'processor_class', 'auto_map', 'data_format', 'input_data_format', 'default_to_square',
  'device', 'disable_grouping', 'return_tensors', 'format', 'return_segmentation_masks',
  'pad_and_return_pixel_mask', 'return_row_col_info', 'patch_size', 'max_num_patches',
}  # fmt: skip
_LONGEST = 16_384  # In pixels, of what a file may say.
_Values = schema.NonNegative | tuple[schema.NonNegative, ...]
_Deviation = Annotated[float, schema.Range(ge=1e-3, le=1e6)]
_Deviations = _Deviation | tuple[_Deviation, ...]
_TimmSize = tuple[schema.Count, schema.Count, schema.Count]  # Channels, height, width.


@dataclasses.dataclass(frozen=True)
class Preparation:
  """How images become the inputs of a model; the defaults are the original's.

  Attributes:
    size: what images are resized to in pixels, a shorter side or (height, width); None:
      the size of the model's input.
    resize_mode: 'squash' or 'cover', if `size` is (height, width), see `config.pp`.
    longest_side: greatest length of the longer side, of detectors.
    crop: (height, width) of the model's input, the centre of the resized image; None:
      the size that the parameters are for.
    interpolation, antialias, crop_rounding: see `config.pp`.
    mean, std: pixels from 0 to 1 are normalised by them; numbers for all channels, or
      one for each. They include the factor by which a file rescales.
    source: name of the file that says so, 'config.pp' of a run; '' for none.
  """

  size: int | tuple[int, int] | None = None
  resize_mode: str = 'squash'
  longest_side: int | None = None
  crop: tuple[int, int] | None = None
  interpolation: str = 'bilinear'
  antialias: bool = False
  crop_rounding: str = 'down'
  mean: tuple[float, ...] | float = 0.5
  std: tuple[float, ...] | float = 0.5
  source: str = ''

  @property
  def is_scaled(self) -> bool:
    """Whether normalised pixels have another range than [-1, 1]."""
    return not self.scales_as(0.5, 0.5)

  def scales_as(self, mean, std) -> bool:
    """Returns whether pixels are normalised by this mean and this deviation."""
    channels = max(map(np.size, (self.mean, self.std, mean, std)))
    try:
      mine = self.by_channel(channels).values()
      other = (
        dataclasses.replace(self, mean=mean, std=std).by_channel(channels).values()
      )
    except ValueError:  # Other numbers of channels.
      return False
    return np.allclose([*mine], [*other], rtol=1e-3)

  def unscaled(self) -> 'Preparation':
    """Returns the same for a model that takes pixels in [-1, 1]."""
    return dataclasses.replace(self, mean=0.5, std=0.5)

  def by_channel(self, channels: int) -> dict[str, tuple[float, ...]]:
    """Returns `mean` and `std` with a number for each channel."""
    values = {'mean': self.mean, 'std': self.std}
    return {
      name: tuple(np.broadcast_to(value, [channels]).tolist())
      for name, value in values.items()
    }

  def at_size(self, image_size: tuple[int, int]) -> 'Preparation':
    """Returns the same for inputs of another size, (height, width) in pixels.

    Images are resized to a size that is as much greater or smaller.
    """
    if self.longest_side is not None:
      return dataclasses.replace(self, size=None, longest_side=None, crop=image_size)
    crop, size = self.crop or image_size, self.size
    if isinstance(size, int):
      size = round(size * min(image_size) / min(crop))
    elif size is not None:
      size = tuple(round(x * new / old) for x, new, old in zip(size, image_size, crop))
    return dataclasses.replace(self, size=size, crop=image_size)

  def fields(self, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Returns the keys of `config.pp` for inputs of `image_size`; None: of any size."""
    how = {
      'interpolation': self.interpolation,
      'antialias': self.antialias,
      'crop_rounding': self.crop_rounding,
    }
    if self.antialias:  # Decodes as Pillow does, too.
      how['jpeg_shrink'] = False
    if image_size is not None:
      mode = self.resize_mode
      return {**how, 'crop': image_size, 'resize': self.size, 'resize_mode': mode}
    if self.longest_side is None:
      return how
    return {**how, 'eval_side': self.size, 'longest_side': self.longest_side}

  def __str__(self) -> str:
    """Describes the steps: 'shorter side 256, bicubic, centre crop 224 x 224'."""
    if isinstance(self.size, int):
      steps = [f'shorter side {self.size}']
    else:
      size = self.size or self.crop
      verb = 'covering' if self.resize_mode == 'cover' else 'whole image to'
      steps = [f'{verb} {_times(size)}' if size else 'whole image']
    if self.longest_side is not None:
      steps[0] += f', longer side at most {self.longest_side}'
    steps.append(self.interpolation)
    if not self.antialias:
      steps[-1] += ' without antialiasing'
    if self.crop is not None and self.size not in (None, self.crop):
      steps.append(f'centre crop {_times(self.crop)}')
    return ', '.join(steps)


def _times(size: tuple[int, int]) -> str:
  return ' x '.join(map(str, size))


def of_run(pp) -> Preparation:
  """Returns how the `config.pp` of a run prepares images in evaluation."""
  how = dict(
    interpolation=pp.interpolation,
    antialias=pp.antialias,
    crop_rounding=pp.crop_rounding,
    source='config.pp',
  )
  if pp.sides:
    return Preparation(size=pp.eval_side, longest_side=pp.longest_side, **how)
  return Preparation(pp.resize, pp.resize_mode, crop=_pair(pp.crop), **how)


def read(sibling: Callable[[str], epath.Path], naming: str) -> Preparation | None:
  """Returns what the files next to weights say; None without such a file.

  `sibling` returns the path of a file next to them by its name, and `naming` is one of
  the formats above, or another one. ValueError if a key has a wrong value, or one that
  `config.pp` cannot say; names file, key and value.
  """
  if naming == 'timm':
    return descriptions.read(sibling('config.json'), _from_timm)
  if naming == 'open_clip':
    return descriptions.read(sibling('open_clip_config.json'), _from_open_clip)
  if naming != 'hf':
    return None
  model_type = descriptions.read(sibling('config.json')).get('model_type')
  nested = lambda config: _from_hf(
    descriptions.field(config, 'image_processor', dict, {}), model_type,
    'processor_config.json',
  )  # fmt: skip
  whole = lambda config: _from_hf(config, model_type, 'preprocessor_config.json')
  return descriptions.read(
    sibling('processor_config.json'), nested
  ) or descriptions.read(sibling('preprocessor_config.json'), whole)


def _from_hf(
  config: Mapping[str, Any], model_type: str | None, source: str
) -> Preparation | None:
  """Returns what an image processor of transformers does; None for {}."""
  if not config:
    return None
  _check_steps(config)
  keys = {key for key in config if not key.startswith(('do_', '_'))}
  if unread := keys - _READ_KEYS - _OTHER_KEYS - {*_UNSUPPORTED}:
    logging.warning('Keys of %s are not read: %s', source, ', '.join(sorted(unread)))
  defaults = _defaults(config, model_type)
  field = lambda key, kind: _field(config, key, kind, defaults)
  does = lambda step: field(step, bool)
  resample = field('resample', int)
  if resample not in _RESAMPLE:
    raise ValueError(
      f'resample is {resample}, but this package resizes only with {_RESAMPLE}: change it'
    )
  size, longest = _hf_size(config, defaults)
  crop = None
  if does('do_center_crop'):
    crop = _square_or_pair('crop_size', field('crop_size', int | dict))
  if not does('do_resize'):
    if crop is not None:
      raise ValueError(
        'do_resize is False with do_center_crop, but this package crops only images '
        'that it has resized: set do_resize to true, and size to the size of your images'
      )
    size, longest = None, None  # Images must have the size of the model's input.
  _check_sizes(size, longest, crop)
  if isinstance(size, int) and crop is None and longest is None:
    raise ValueError(
      f'size is {config.get("size")!r:.80} without do_center_crop, so that images keep '
      'their shapes, but the model takes one shape: set do_center_crop to true with a '
      'crop_size, or size to {"height": ..., "width": ...}'
    )
  if longest is None and crop is None and size is not None:
    crop = size
  mean, std = _hf_scaling(field, does)
  return Preparation(
    size if size != crop else None, 'squash', longest, crop, _RESAMPLE[resample], True,
    mean=mean, std=std, source=source,
  )  # fmt: skip


def _check_steps(config: Mapping[str, Any]):
  """Raises ValueError for steps that this package lacks."""
  for key, value in config.items():
    if key.startswith('do_') and key not in _STEPS and value is not False:
      raise ValueError(
        f'{key} is {value!r:.80}, a step that this package lacks: remove it'
      )
    is_used = value not in (None, False) and (value is True or value != 1)
    if key in _UNSUPPORTED and is_used:
      raise ValueError(
        f'{key} is {value!r:.80}, which this package cannot follow: remove it'
      )
  if 'crop_pct' in config:
    raise ValueError(
      f'crop_pct is {config["crop_pct"]!r:.80}, which this package does not read from '
      'this file: replace it by size, do_center_crop and crop_size'
    )


def _defaults(config: Mapping[str, Any], model_type: str | None) -> dict[str, Any]:
  """Returns the defaults of a file's image processor."""
  name = descriptions.field(config, 'feature_extractor_type', str)
  name = descriptions.field(config, 'image_processor_type', str, name)
  if name is None:
    kind = _BY_MODEL_TYPE.get(str(model_type), 'ViT')
  else:
    kind = name
    for ending in ('Pil', 'Fast', 'ImageProcessor', 'FeatureExtractor'):
      kind = kind.removesuffix(ending)
  steps = dict.fromkeys(('do_resize', 'do_rescale', 'do_normalize'), True)
  steps |= {'do_center_crop': False, 'offset': False, 'rescale_factor': 1 / 255}
  return {**steps, **_PROCESSORS.get(kind, {}), 'type': name or kind}


def _field(config: Mapping[str, Any], key: str, kind, defaults: Mapping[str, Any]):
  """Returns a key of an image processor, or its default; ValueError for neither."""
  if key not in config and key not in defaults:
    raise ValueError(
      f'{key} is missing, for which this package knows no default of the image '
      f'processor {defaults["type"]}: add {key}'
    )
  return descriptions.field(config, key, kind, defaults.get(key))


def _hf_size(
  config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Any, int | None]:
  """Returns `Preparation.size` and `longest_side` of an image processor."""
  size = _field(
    config, 'size', schema.Count | dict | tuple[schema.Count, ...], defaults
  )
  if size is None:
    return None, None
  if isinstance(size, list | tuple):
    size = dict(zip(_SQUARE, size))
  if isinstance(size, int):
    size = dict.fromkeys(defaults.get('int_size', ('height', 'width')), size)
    longest = descriptions.field(config, 'max_size', schema.Count)
    size |= {} if longest is None or 'height' in size else {'longest_edge': longest}
  sides = {
    key: descriptions.field(size, key, schema.Count, prefix='size.') for key in size
  }
  keys = {key for key, side in sides.items() if side is not None}
  if keys == {'height', 'width'}:
    return (sides['height'], sides['width']), None
  if keys == {'shortest_edge'}:
    return sides['shortest_edge'], None
  if keys == {'shortest_edge', 'longest_edge'}:
    return sides['shortest_edge'], sides['longest_edge']
  if keys == {'max_height', 'max_width'} and len(set(sides.values())) == 1:
    return sides['max_height'], sides['max_height']
  raise ValueError(
    f'size is {size!r:.80}, but this package has only "shortest_edge", with '
    '"longest_edge" or without, "height" and "width", and "max_height" and "max_width" '
    'of one length: change it'
  )


def _hf_scaling(field: Callable[..., Any], does: Callable[[str], bool]) -> tuple:
  """Returns mean and deviation by which pixels from 0 to 1 are normalised."""
  factor, offset = field('rescale_factor', schema.Positive), field('offset', bool)
  if not does('do_rescale'):
    factor, offset = 1.0, False
  mean, std = 0.0, 1.0
  if does('do_normalize'):
    mean, std = field('image_mean', _Values), field('image_std', _Deviations)
  if math.isclose(255 * factor, 1.0, rel_tol=1e-6) and not offset:
    return _tuple(mean), _tuple(std)
  # (255 x * factor - offset - mean) / std for pixels x from 0 to 1.
  scale = lambda x: (np.asarray(x, np.float64) / (255 * factor)).tolist()
  scaled = scale(np.add(mean, float(offset))), scale(std)
  return tuple(tuple(x) if isinstance(x, list) else x for x in scaled)


def _square_or_pair(key: str, value: Any) -> tuple[int, int]:
  """Returns (height, width) of a number or of {'height': ..., 'width': ...}."""
  if isinstance(value, int):
    return value, value
  sides = [
    descriptions.field(value, x, schema.Count, prefix=f'{key}.') for x in _SQUARE
  ]
  if None in sides or len(value) != len(_SQUARE):
    raise ValueError(f'{key} is {value!r:.80} and must have "height" and "width"')
  return sides[0], sides[1]


def _check_sizes(size, longest: int | None, crop: tuple[int, int] | None):
  """Raises ValueError for sizes out of range, or a crop larger than the image."""
  sides = [x for x in (*np.ravel(size), longest, *np.ravel(crop)) if x is not None]
  if max(sides, default=0) > _LONGEST:
    raise ValueError(
      f'images are resized to {max(sides):,} pixels, more than {_LONGEST:,}: correct '
      'the sizes'
    )
  if crop is None or size is None:
    return
  resized = (size, size) if isinstance(size, int) else size
  if any(side > limit for side, limit in zip(crop, resized)):
    raise ValueError(
      f'the size {size} is smaller than the crop {crop}, so that the image would be '
      'padded, which this package does not: make the crop smaller'
    )


def _from_timm(config: Mapping[str, Any]) -> Preparation | None:
  """Returns what `pretrained_cfg` of timm says."""
  stated = descriptions.field(config, 'pretrained_cfg', dict, {})
  if not stated:
    return None
  field = lambda key, kind, default=None: descriptions.field(stated, key, kind, default)
  args = descriptions.field(config, 'model_args', dict, {})
  usual = _pair(descriptions.field(args, 'img_size', schema.Size, 224))
  crop = tuple(field('input_size', _TimmSize, (3, *usual))[1:])
  test_size = field('test_input_size', _TimmSize)
  if test_size is not None and tuple(test_size[1:]) != crop:
    console.notify(
      f'test_input_size={test_size} in config.json is not used, as by default in timm: '
      f'images have {_times(crop)} pixels'
    )
  share = field('crop_pct', schema.Positive, 0.875)
  mode = field('crop_mode', Literal['center', 'squash'], 'center')
  size: Any = tuple(math.floor(side / share) for side in crop)
  is_square = crop[0] == crop[1]
  if mode == 'center' and is_square:
    size = size[0]
  _check_sizes(size, None, crop)
  return Preparation(
    None if size == crop and mode == 'squash' else size,
    'squash' if mode == 'squash' or is_square else 'cover',
    None,
    crop,
    field('interpolation', Literal['bilinear', 'bicubic', 'lanczos'], 'bicubic'),
    antialias=True,
    crop_rounding='even',
    mean=_tuple(field('mean', _Values, _IMAGENET['image_mean'])),
    std=_tuple(field('std', _Deviations, _IMAGENET['image_std'])),
    source='config.json',
  )


def _from_open_clip(config: Mapping[str, Any]) -> Preparation | None:
  """Returns what `preprocess_cfg` of open_clip says; sizes default to the tower's."""
  if not config:
    return None
  stated = descriptions.field(config, 'preprocess_cfg', dict, {})
  model = descriptions.field(config, 'model_cfg', dict, {})
  tower = descriptions.field(model, 'vision_cfg', dict, {})
  field = lambda key, kind, default=None: descriptions.field(stated, key, kind, default)
  field('mode', Literal['RGB'])
  mode = field('resize_mode', Literal['shortest', 'squash'], 'shortest')
  usual = descriptions.field(tower, 'image_size', schema.Size, 224)
  crop = _pair(field('size', schema.Size, usual))
  is_square = crop[0] == crop[1]
  _check_sizes(None, None, crop)
  filters = Literal['bilinear', 'bicubic', 'random']  # Only training draws one.
  return Preparation(
    None if mode == 'squash' else crop[0] if is_square else crop,
    'squash' if mode == 'squash' or is_square else 'cover',
    None,
    crop,
    'bilinear' if field('interpolation', filters) == 'bilinear' else 'bicubic',
    antialias=True,
    crop_rounding='even',
    mean=_tuple(field('mean', _Values, _CLIP_MEAN)),
    std=_tuple(field('std', _Deviations, _CLIP_STD)),
    source='open_clip_config.json',
  )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
  return (size, size) if isinstance(size, int) else tuple(size)


def _tuple(values: Any) -> Any:
  return tuple(values) if isinstance(values, list) else values


# Types of the attributes that the notes next to an .npz may hold.
_NOTES = {
  'size': schema.Size, 'resize_mode': Literal['squash', 'cover'],
  'longest_side': schema.Count, 'crop': schema.HeightWidth,
  'interpolation': Literal['bilinear', 'bicubic', 'lanczos'], 'antialias': bool,
  'crop_rounding': Literal['down', 'even'],
}  # fmt: skip


def to_notes(preparation: Preparation) -> dict[str, Any]:
  """Returns the attributes but mean and deviation that are not the original's.

  The size of the input alone is none, since readers take it as an option.
  """
  values = {name: getattr(preparation, name) for name in _NOTES}
  changed = {k: x for k, x in values.items() if x != getattr(Preparation(), k)}
  return {} if set(changed) == {'crop'} else changed


def from_notes(notes: Mapping[str, Any], source: str) -> Preparation:
  """Returns the inverse of `to_notes`, read from the file `source`."""
  prefix = 'preparation.'
  kinds = {f'{prefix}{name}': kind for name, kind in _NOTES.items()}
  descriptions.check_fields(notes, kinds, prefix)
  return Preparation(**{k: _tuple(x) for k, x in notes.items()}, source=source)


def to_hf(
  preparation: Preparation, image_size, channels: int, **more
) -> dict[str, Any]:
  """Returns preprocessor_config.json, with further keys `more`.

  `image_size` is (height, width) of the model's input; None for detectors. The classes
  that crop are CLIP's, since ViT's does not in all versions of transformers.
  """
  size, crop = preparation.size, preparation.crop or image_size
  sides = lambda pair: dict(zip(('height', 'width'), pair))
  kind = 'ViTImageProcessor'
  if preparation.longest_side is not None:
    kind, crop = 'DetrImageProcessor', None
    size = {'shortest_edge': size, 'longest_edge': preparation.longest_side}
  elif size is None:
    size, crop = sides(crop), None
  elif preparation.resize_mode == 'cover':
    raise ValueError(
      f'images are resized to cover {_times(size)} pixels, which transformers cannot do: '
      'write this model for timm, or as a run (--to)'
    )
  else:
    kind = 'CLIPImageProcessor'
    size = {'shortest_edge': size} if isinstance(size, int) else sides(size)
  filters = {name: number for number, name in _RESAMPLE.items()}
  values = preparation.by_channel(channels)
  return {
    'image_processor_type': kind, 'do_resize': True, 'size': size,
    'resample': filters[preparation.interpolation],
    **({'do_center_crop': True, 'crop_size': sides(crop)} if crop else {}),
    'do_rescale': True, 'rescale_factor': 1 / 255,
    'do_normalize': True, 'image_mean': values['mean'], 'image_std': values['std'],
    **more,
  }  # fmt: skip


def to_timm(
  preparation: Preparation, image_size, channels: int
) -> tuple[dict[str, Any], list[str]]:
  """Returns the keys of timm's `pretrained_cfg`, and notes for the user."""
  crop = preparation.crop or image_size
  fields = {
    'input_size': (channels, *crop), 'crop_mode': 'squash', 'crop_pct': 1.0,
    'interpolation': preparation.interpolation, **preparation.by_channel(channels),
  }  # fmt: skip
  if preparation.size is None:
    return fields, []
  # timm divides the sides of the crop by `crop_pct`, rounds down, and resizes both
  # sides ('squash') or the shorter one ('center') to the result. A little less, so that
  # rounding in the division does not cost a pixel.
  sides = _pair(preparation.size)
  share = math.nextafter(crop[0] / sides[0], 0.0)
  if tuple(math.floor(side / share) for side in crop) != sides:
    return fields, [
      f'timm cannot resize to {preparation.size} before cropping {crop}: it will resize '
      'the whole image, and its predictions will differ a little'
    ]
  is_squash = (
    not isinstance(preparation.size, int) and preparation.resize_mode == 'squash'
  )
  mode = 'squash' if is_squash else 'center'
  return {**fields, 'crop_mode': mode, 'crop_pct': share}, []
