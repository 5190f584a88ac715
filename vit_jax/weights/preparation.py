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
import functools
import math
from typing import Annotated, Any, Literal

from absl import logging
from etils import epath
import ml_collections
import numpy as np

from vit_jax import console
from vit_jax.configs import common, schema
from vit_jax.weights import descriptions

_HALF = (0.5, 0.5, 0.5)
_IMAGENET = {'image_mean': (0.485, 0.456, 0.406), 'image_std': (0.229, 0.224, 0.225)}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Numbers of Pillow's filters, `resample` of transformers.
_RESAMPLE = {1: 'lanczos', 2: 'bilinear', 3: 'bicubic'}
_SQUARE = {'height': 224, 'width': 224}
_VIT = {
  'size': _SQUARE,
  'resample': 2,
  'image_mean': _HALF,
  'image_std': _HALF,
  'crop_size': _SQUARE,
  'int_size': ('height', 'width'),
}
_CLIP = {
  'size': {'shortest_edge': 224},
  'resample': 3,
  'int_size': ('shortest_edge',),
  'do_center_crop': True,
  'crop_size': _SQUARE,
  'image_mean': _CLIP_MEAN,
  'image_std': _CLIP_STD,
}
_DETR = {
  'size': {'shortest_edge': 800, 'longest_edge': 1333},
  'resample': 2,
  'int_size': ('shortest_edge',),
  **_IMAGENET,
}
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
  'Eomt': {**_DETR, 'size': {'shortest_edge': 640, 'longest_edge': 640}},
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
  'detr': 'Detr', 'imagegpt': 'ImageGPT', 'eomt': 'Eomt', 'eomt_dinov3': 'Eomt',
}  # fmt: skip
# Steps of transformers that change nothing here: images always become RGB, padding has
# a mask except with EoMT, and labels of segmentation are not read.
_NEUTRAL_STEPS = ('do_convert_rgb', 'do_pad', 'do_reduce_labels', 'do_color_quantize')
# Keys of steps that this package lacks; False and 1 leave them out.
_UNSUPPORTED = {
  'rescale_offset', 'include_top', 'pad_size', 'keep_aspect_ratio',
  'ensure_multiple_of', 'size_divisor', 'crop_pct',
}  # fmt: skip
_DEFAULT_STEPS = {
  'do_resize': True,
  'do_rescale': True,
  'do_normalize': True,
  'do_center_crop': False,
  'do_split_image': False,
  'do_pad': False,
  'offset': False,
  'rescale_factor': 1 / 255,
}
_STEPS = (
  'do_resize', 'do_center_crop', 'do_split_image', 'do_rescale', 'do_normalize',
  *_NEUTRAL_STEPS,
)  # fmt: skip
# Keys of `config.pp` that `Preparation.fields` may return for images of one size.
KEYS = (
  'crop', 'resize', 'resize_mode', 'interpolation', 'antialias', 'crop_rounding',
  'jpeg_shrink', 'range', 'mean', 'std',
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


def _is_height_and_width(size: Mapping[str, Any]) -> bool:
  sides = size.values()
  return size.keys() == {'height', 'width'} and all(
    schema.accepts(side, schema.Count) for side in sides
  )


_HeightAndWidth = Annotated[
  dict, schema.Fits('an object of "height" and "width"', _is_height_and_width)
]
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
    longest_side: greatest length of the longer side, of models of objects.
    windows: whether the shorter side gets the length of `crop`, and windows of that size
      spread over the longer side (EoMT).
    crop: (height, width) of the model's input, the centre of the resized image; None:
      the size that the parameters are for.
    interpolation, antialias, crop_rounding: see `config.pp`.
    mean, std: pixels from 0 to 1 are normalised by them; numbers for all channels, or
      one for each. They include the factor by which a file rescales.
    value_range, value_mean, value_std: `config.pp.range`, `mean` and `std` of images that
      are not 8-bit colour; None for 0 to 255.
    source: name of the file that says so, 'config.pp' of a run; '' for none.
  """

  size: int | tuple[int, int] | None = None
  resize_mode: str = 'squash'
  longest_side: int | None = None
  windows: bool = False
  crop: tuple[int, int] | None = None
  interpolation: str = 'bilinear'
  antialias: bool = False
  crop_rounding: str = 'down'
  mean: tuple[float, ...] | float = 0.5
  std: tuple[float, ...] | float = 0.5
  value_range: common.ValueRange | None = None
  value_mean: common.ChannelValues | None = None
  value_std: common.ChannelValues | None = None
  source: str = ''

  @property
  def is_scaled(self) -> bool:
    """Whether normalised pixels have another range than [-1, 1]."""
    return not self.scales_as(0.5, 0.5)

  def scales_as(self, mean: Any, std: Any) -> bool:
    """Returns whether pixels are normalised by this mean and this deviation."""
    channels = max(map(np.size, (self.mean, self.std, mean, std)))
    reference = dataclasses.replace(self, mean=mean, std=std)
    try:
      values = self.by_channel(channels)
      reference_values = reference.by_channel(channels)
    except ValueError:  # Other numbers of channels.
      return False
    return np.allclose(
      list(values.values()), list(reference_values.values()), rtol=1e-3
    )

  def unscaled(self) -> 'Preparation':
    """Returns the same for a model that takes pixels in [-1, 1]."""
    return dataclasses.replace(self, mean=0.5, std=0.5)

  def by_channel(self, channels: int) -> dict[str, tuple[float, ...]]:
    """Returns `mean` and `std` with a number for each channel."""
    values = {'mean': self.mean, 'std': self.std}
    by_channel = {}
    for name, value in values.items():
      by_channel[name] = tuple(np.broadcast_to(value, [channels]).tolist())
    return by_channel

  def at_size(self, image_size: tuple[int, int]) -> 'Preparation':
    """Returns the same for inputs of another size, (height, width) in pixels.

    Images are resized to a size that is as much greater or smaller.
    """
    if self.longest_side is not None:
      return dataclasses.replace(self, size=None, longest_side=None, crop=image_size)
    crop = self.crop or image_size
    size: int | tuple[int, int] | None = None
    if isinstance(self.size, int):
      size = round(self.size * min(image_size) / min(crop))
    elif self.size is not None:
      size = (
        round(self.size[0] * image_size[0] / crop[0]),
        round(self.size[1] * image_size[1] / crop[1]),
      )
    return dataclasses.replace(self, size=size, crop=image_size)

  def fields(self, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Returns the keys of `config.pp` for inputs of `image_size`; None: of any size."""
    fields: dict[str, Any] = {
      'interpolation': self.interpolation,
      'antialias': self.antialias,
      'crop_rounding': self.crop_rounding,
    }
    if self.antialias:  # Decodes as Pillow does, too.
      fields['jpeg_shrink'] = False
    if self.value_range is not None:
      fields['range'] = self.value_range
      fields['mean'] = self.value_mean
      fields['std'] = self.value_std
    if image_size is not None:
      fields['crop'] = image_size
      fields['resize'] = self.size
      fields['resize_mode'] = self.resize_mode
    elif self.longest_side is not None:
      fields['eval_side'] = self.size
      fields['longest_side'] = self.longest_side
    return fields

  def __str__(self) -> str:
    """Describes the steps: 'shorter side 256, bicubic, centre crop 224 x 224'."""
    size = self.size or self.crop
    if self.windows and size is not None:
      resizing = f'windows of {_times(_pair(size))} over the longer side'
    elif isinstance(size, int):
      resizing = f'shorter side {size}'
    elif size is None:
      resizing = 'whole image'
    elif self.resize_mode == 'cover':
      resizing = f'covering {_times(size)}'
    else:
      resizing = f'whole image to {_times(size)}'
    if self.longest_side is not None:
      resizing += f', longer side at most {self.longest_side}'
    filter_name = self.interpolation
    if not self.antialias:
      filter_name += ' without antialiasing'
    steps = [resizing, filter_name]
    if self.crop is not None and self.size not in (None, self.crop):
      steps.append(f'centre crop {_times(self.crop)}')
    if self.value_range is not None:
      steps.append(f'values {self.value_range}')
    return ', '.join(steps)


def _times(size: Sequence[int]) -> str:
  return ' x '.join(map(str, size))


def from_pp(pp: ml_collections.ConfigDict) -> Preparation:
  """Returns how the `config.pp` of a run prepares images in evaluation."""
  preparation = Preparation(
    interpolation=pp.interpolation,
    antialias=pp.antialias,
    crop_rounding=pp.crop_rounding,
    value_range=pp.range,
    value_mean=pp.mean,
    value_std=pp.std,
    source='config.pp',
  )
  if pp.sides:
    return dataclasses.replace(
      preparation, size=pp.eval_side, longest_side=pp.longest_side
    )
  return dataclasses.replace(
    preparation, size=pp.resize, resize_mode=pp.resize_mode, crop=_pair(pp.crop)
  )


def from_run(config: ml_collections.ConfigDict) -> Preparation:
  """Returns how a run prepares images in evaluation."""
  preparation = from_pp(config.pp)
  options: Mapping[str, Any] = config.get('task_options') or {}
  window = options.get('window')
  if window is None or options.get('stride') is not None:
    return preparation
  return dataclasses.replace(preparation, windows=True, crop=_pair(window))


def read(sibling: Callable[[str], epath.Path], naming: str) -> Preparation | None:
  """Returns what the files next to weights say; None without such a file.

  Args:
    sibling: returns the path of a file next to the weights by its name.
    naming: one of the formats above, or another one.

  Raises:
    ValueError: if a key has a wrong value, or one that `config.pp` cannot say; names
      file, key and value.
  """
  if naming == 'timm':
    return descriptions.read(sibling('config.json'), _from_timm)
  if naming == 'open_clip':
    return descriptions.read(sibling('open_clip_config.json'), _from_open_clip)
  if naming == 'hf':
    return _read_hf(sibling)
  return None


def _read_hf(sibling: Callable[[str], epath.Path]) -> Preparation | None:
  model_type = descriptions.read(sibling('config.json')).get('model_type')

  def nested(config: Mapping[str, Any]) -> Preparation | None:
    processor = descriptions.field(config, 'image_processor', dict, {})
    return _from_hf(processor, model_type, 'processor_config.json')

  def whole(config: Mapping[str, Any]) -> Preparation | None:
    return _from_hf(config, model_type, 'preprocessor_config.json')

  return descriptions.read(
    sibling('processor_config.json'), nested
  ) or descriptions.read(sibling('preprocessor_config.json'), whole)


def _from_hf(
  config: Mapping[str, Any], model_type: str | None, source: str
) -> Preparation | None:
  """Returns what an image processor of transformers does; None for {}."""
  if not config:
    return None
  _check_keys(config, source)
  processor = _with_defaults(config, model_type)
  resample = _field(processor, 'resample', Literal[*_RESAMPLE])
  size, longest_side = _hf_size(processor)
  crop = None
  if _field(processor, 'do_center_crop', bool):
    crop = _hf_crop(processor)
  if not _field(processor, 'do_resize', bool):
    if crop is not None:
      raise ValueError(
        'do_resize is False with do_center_crop, but this package crops only images '
        'that it has resized: set do_resize to true, and size to the size of your images'
      )
    size, longest_side = None, None  # Images must have the size of the model's input.
  windows = _field(processor, 'do_split_image', bool)
  if windows:
    if not isinstance(size, int) or longest_side is not None or crop is not None:
      raise ValueError(
        f'do_split_image is True with size {config.get("size")!r:.80}, but windows need '
        'the length of the shorter side: set size to {"shortest_edge": ...}, without '
        'do_center_crop'
      )
    crop = size = (size, size)
  _check_sizes(size, longest_side, crop)
  if processor['is_eomt'] and longest_side is not None:
    if not _field(processor, 'do_pad', bool):
      raise ValueError(
        'do_pad is False without do_split_image, so that images keep their shapes, but '
        'the model takes one shape: set do_pad or do_split_image to true'
      )
  if longest_side is None and crop is None:
    if isinstance(size, int):
      raise ValueError(
        f'size is {config.get("size")!r:.80} without do_center_crop, so that images '
        'keep their shapes, but the model takes one shape: set do_center_crop to true '
        'with a crop_size, or size to {"height": ..., "width": ...}'
      )
    crop = size
  mean, std = _hf_scaling(processor)
  return Preparation(
    size=None if size == crop else size,
    longest_side=longest_side,
    windows=windows,
    crop=crop,
    interpolation=_RESAMPLE[resample],
    antialias=True,
    mean=mean,
    std=std,
    source=source,
  )


def _check_keys(config: Mapping[str, Any], source: str) -> None:
  """Raises ValueError for steps that this package lacks; warns of unknown keys."""
  known_keys = _READ_KEYS | _OTHER_KEYS | _UNSUPPORTED
  unread = []
  for key, value in config.items():
    is_step = key.startswith('do_')
    if is_step:
      is_lacking = key not in _STEPS and value is not False
    else:
      is_one = value == 1 and value is not True
      is_lacking = key in _UNSUPPORTED and bool(value) and not is_one
    if is_lacking:
      raise ValueError(
        f'{key} is {value!r:.80}, which this package cannot follow: remove it'
      )
    if not is_step and key not in known_keys and not key.startswith('_'):
      unread.append(key)
  if unread:
    logging.warning('Keys of %s are not read: %s', source, ', '.join(sorted(unread)))


def _with_defaults(config: Mapping[str, Any], model_type: str | None) -> dict[str, Any]:
  """Returns the keys of an image processor, with its defaults."""
  kind = _BY_MODEL_TYPE.get(str(model_type), 'ViT')
  kind = descriptions.field(config, 'feature_extractor_type', str, kind)
  kind = descriptions.field(config, 'image_processor_type', str, kind)
  for ending in ('Pil', 'Fast', 'ImageProcessor', 'FeatureExtractor'):
    kind = kind.removesuffix(ending)
  defaults = _PROCESSORS.get(kind, {})
  int_size = defaults.get('int_size', ('height', 'width'))
  return {
    **_DEFAULT_STEPS,
    **defaults,
    **config,
    'int_size': int_size,
    'is_eomt': kind == 'Eomt',
  }


def _field(processor: Mapping[str, Any], key: str, kind: Any) -> Any:
  """Returns a key of an image processor; ValueError if it has none."""
  if key not in processor:
    raise ValueError(
      f'{key} is missing, and this package knows no default of it for this image '
      f'processor: add {key}'
    )
  return descriptions.field(processor, key, kind)


def _hf_size(
  processor: Mapping[str, Any],
) -> tuple[int | tuple[int, int] | None, int | None]:
  """Returns `Preparation.size` and `longest_side` of an image processor."""
  kind = schema.Count | dict | tuple[schema.Count, ...] | None
  size = _field(processor, 'size', kind)
  if size is None:
    return None, None
  if isinstance(size, list | tuple):
    size = dict(zip(_SQUARE, size))
  if isinstance(size, int):
    size = dict.fromkeys(processor['int_size'], size)
    longest_edge = descriptions.field(processor, 'max_size', schema.Count)
    if longest_edge is not None and 'height' not in size:
      size['longest_edge'] = longest_edge
  sides = {}
  for key in size:
    sides[key] = descriptions.field(size, key, schema.Count, prefix='size.')
  match sides:
    case {'height': height, 'width': width} if len(sides) == 2:
      return (height, width), None
    case {'shortest_edge': side} if len(sides) == 1:
      return side, None
    case {'shortest_edge': side, 'longest_edge': None} if len(sides) == 2:
      return side, None
    case {'shortest_edge': side, 'longest_edge': longest} if len(sides) == 2:
      return side, longest
    case {'max_height': side, 'max_width': width} if len(sides) == 2 and side == width:
      return side, side
  raise ValueError(
    f'size is {size!r:.80}, but this package has only "shortest_edge", with '
    '"longest_edge" or without, "height" and "width", and "max_height" and "max_width" '
    'of one length: change it'
  )


def _hf_crop(processor: Mapping[str, Any]) -> tuple[int, int]:
  """Returns (height, width) of `crop_size`: a number, or both by name."""
  crop = _field(processor, 'crop_size', schema.Count | _HeightAndWidth)
  return (crop, crop) if isinstance(crop, int) else (crop['height'], crop['width'])


def _hf_scaling(processor: Mapping[str, Any]) -> tuple[Any, Any]:
  """Returns mean and deviation by which pixels from 0 to 1 are normalised."""
  mean: Any = 0.0
  std: Any = 1.0
  if _field(processor, 'do_normalize', bool):
    mean = _field(processor, 'image_mean', _Values)
    std = _field(processor, 'image_std', _Deviations)
  factor = _field(processor, 'rescale_factor', schema.Positive)
  offset = _field(processor, 'offset', bool)
  if not _field(processor, 'do_rescale', bool):
    factor, offset = 1.0, False
  if math.isclose(255 * factor, 1.0, rel_tol=1e-6) and not offset:
    return descriptions.as_tuple(mean), descriptions.as_tuple(std)
  # (255 x * factor - offset - mean) / std for pixels x from 0 to 1.
  scale = 255 * factor
  scaled_mean = (np.add(mean, float(offset)) / scale).tolist()
  scaled_std = (np.asarray(std, np.float64) / scale).tolist()
  return descriptions.as_tuple(scaled_mean), descriptions.as_tuple(scaled_std)


def _check_sizes(
  size: int | tuple[int, int] | None,
  longest_side: int | None,
  crop: tuple[int, int] | None,
) -> None:
  """Raises ValueError for sizes out of range, or a crop larger than the image."""
  for pixels in (size, longest_side, crop):
    if pixels is not None and max(_pair(pixels)) > _LONGEST:
      raise ValueError(
        f'images are resized to {max(_pair(pixels)):,} pixels, more than {_LONGEST:,}: '
        'correct the sizes'
      )
  if crop is None or size is None:
    return
  height, width = _pair(size)
  if crop[0] > height or crop[1] > width:
    raise ValueError(
      f'the size {size} is smaller than the crop {crop}, so that the image would be '
      'padded, which this package does not: make the crop smaller'
    )


def _from_timm(config: Mapping[str, Any]) -> Preparation | None:
  """Returns what `pretrained_cfg` of timm says."""
  stated = descriptions.field(config, 'pretrained_cfg', dict, {})
  if not stated:
    return None
  field = functools.partial(descriptions.field, stated)
  args = descriptions.field(config, 'model_args', dict, {})
  usual = _pair(descriptions.field(args, 'img_size', schema.Size, 224))
  _, height, width = field('input_size', _TimmSize, (3, *usual))
  test_size = field('test_input_size', _TimmSize)
  if test_size is not None and tuple(test_size[1:]) != (height, width):
    console.notify(
      f'test_input_size={test_size} in config.json is not used, as by default in timm: '
      f'images have {_times((height, width))} pixels'
    )
  mode = field('crop_mode', Literal['center', 'squash'], 'center')
  return _as_in_timm(
    crop=(height, width),
    crop_pct=field('crop_pct', schema.Positive, 0.875),
    is_squash=mode == 'squash',
    interpolation=field(
      'interpolation', Literal['bilinear', 'bicubic', 'lanczos'], 'bicubic'
    ),
    mean=descriptions.as_tuple(field('mean', _Values, _IMAGENET['image_mean'])),
    std=descriptions.as_tuple(field('std', _Deviations, _IMAGENET['image_std'])),
    source='config.json',
  )


def _from_open_clip(config: Mapping[str, Any]) -> Preparation | None:
  """Returns what `preprocess_cfg` of open_clip says; sizes default to the tower's."""
  if not config:
    return None
  stated = descriptions.field(config, 'preprocess_cfg', dict, {})
  model = descriptions.field(config, 'model_cfg', dict, {})
  tower = descriptions.field(model, 'vision_cfg', dict, {})
  field = functools.partial(descriptions.field, stated)
  field('mode', Literal['RGB'])
  mode = field('resize_mode', Literal['shortest', 'squash'], 'shortest')
  usual = descriptions.field(tower, 'image_size', schema.Size, 224)
  filters = Literal['bilinear', 'bicubic', 'random']  # Only training draws one.
  is_bilinear = field('interpolation', filters) == 'bilinear'
  return _as_in_timm(
    crop=_pair(field('size', schema.Size, usual)),
    crop_pct=1.0,
    is_squash=mode == 'squash',
    interpolation='bilinear' if is_bilinear else 'bicubic',
    mean=descriptions.as_tuple(field('mean', _Values, _CLIP_MEAN)),
    std=descriptions.as_tuple(field('std', _Deviations, _CLIP_STD)),
    source='open_clip_config.json',
  )


def _as_in_timm(
  crop: tuple[int, int], crop_pct: float, is_squash: bool, **options: Any
) -> Preparation:
  """Returns a preparation that crops the fraction `crop_pct` of a resized image's sides."""
  height, width = (math.floor(side / crop_pct) for side in crop)
  _check_sizes((height, width), None, crop)
  size: int | tuple[int, int] | None = (height, width)
  if is_squash and size == crop:
    size = None
  is_square = crop[0] == crop[1]
  if is_square and not is_squash:
    size = height  # The shorter side.
  return Preparation(
    size=size,
    resize_mode='squash' if is_squash or is_square else 'cover',
    crop=crop,
    antialias=True,
    crop_rounding='even',
    **options,
  )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
  """Returns (height, width) for one number or two."""
  if isinstance(size, int):
    return size, size
  height, width = size
  return height, width


# Types of the attributes that the notes next to an .npz may hold.
_NOTES = {
  'size': schema.Size,
  'resize_mode': Literal['squash', 'cover'],
  'longest_side': schema.Count,
  'crop': schema.HeightWidth,
  'interpolation': Literal['bilinear', 'bicubic', 'lanczos'],
  'antialias': bool,
  'crop_rounding': Literal['down', 'even'],
  'value_range': common.ValueRange,
  'value_mean': common.ChannelValues,
  'value_std': common.Deviations,
}


def to_notes(preparation: Preparation) -> dict[str, Any]:
  """Returns the attributes but mean and deviation that are not the original's.

  The size of the input alone is none, since readers take it as an option.
  """
  original = Preparation()
  changed = {}
  for name in _NOTES:
    value = getattr(preparation, name)
    if value != getattr(original, name):
      changed[name] = value
  return {} if set(changed) == {'crop'} else changed


def from_notes(notes: Mapping[str, Any], source: str) -> Preparation:
  """Returns the inverse of `to_notes`, read from the file `source`."""
  prefix = 'preparation.'
  kinds = {f'{prefix}{name}': kind for name, kind in _NOTES.items()}
  descriptions.check_fields(notes, kinds, prefix)
  return Preparation(
    **{k: descriptions.as_tuple(x) for k, x in notes.items()}, source=source
  )


def to_hf(
  preparation: Preparation,
  image_size: tuple[int, int] | None,
  channels: int,
  **fields: Any,
) -> dict[str, Any]:
  """Returns preprocessor_config.json.

  Args:
    preparation: how images are prepared.
    image_size: (height, width) of the model's input; None for detectors.
    channels: number of channels of images.
    **fields: further fields of the file.
  """
  filters = {name: number for number, name in _RESAMPLE.items()}
  values = preparation.by_channel(channels)
  return {
    **_hf_resizing(preparation, image_size),
    'resample': filters[preparation.interpolation],
    'do_rescale': True,
    'rescale_factor': 1 / 255,
    'do_normalize': True,
    'image_mean': values['mean'],
    'image_std': values['std'],
    **fields,
  }


def _hf_resizing(
  preparation: Preparation, image_size: tuple[int, int] | None
) -> dict[str, Any]:
  """Returns the fields of preprocessor_config.json that concern sizes.

  The class that crops is CLIP's, since ViT's does not in all versions of transformers.
  """
  size = preparation.size
  crop = preparation.crop or image_size
  if preparation.windows and crop is not None:
    side = {'shortest_edge': crop[0], 'longest_edge': None}
    return {**_resizer('EomtImageProcessor', side), 'do_split_image': True}
  if preparation.longest_side is not None or crop is None:
    edges = {'shortest_edge': size, 'longest_edge': preparation.longest_side}
    return _resizer('DetrImageProcessor', edges)
  if size is None:
    return _resizer('ViTImageProcessor', _height_and_width(crop))
  if isinstance(size, int):
    fields = _resizer('CLIPImageProcessor', {'shortest_edge': size})
  elif preparation.resize_mode == 'squash':
    fields = _resizer('CLIPImageProcessor', _height_and_width(size))
  else:
    raise ValueError(
      f'images are resized to cover {_times(size)} pixels, which transformers cannot do: '
      'write this model for timm, or as a run (--to)'
    )
  return {**fields, 'do_center_crop': True, 'crop_size': _height_and_width(crop)}


def _resizer(kind: str, size: Mapping[str, Any]) -> dict[str, Any]:
  return {'image_processor_type': kind, 'do_resize': True, 'size': size}


def _height_and_width(size: tuple[int, int]) -> dict[str, int]:
  return {'height': size[0], 'width': size[1]}


def to_timm(
  preparation: Preparation, image_size: tuple[int, int], channels: int
) -> tuple[dict[str, Any], list[str]]:
  """Returns the keys of timm's `pretrained_cfg`, and notes for the user."""
  crop = preparation.crop or image_size
  fields: dict[str, Any] = {
    'input_size': (channels, *crop),
    'crop_mode': 'squash',
    'crop_pct': 1.0,
    'interpolation': preparation.interpolation,
    **preparation.by_channel(channels),
  }
  if preparation.size is None:
    return fields, []
  # timm divides the sides of the crop by `crop_pct`, rounds down, and resizes both
  # sides ('squash') or the shorter one ('center') to the result. A little less, so that
  # rounding in the division does not cost a pixel.
  sides = _pair(preparation.size)
  crop_pct = math.nextafter(crop[0] / sides[0], 0.0)
  if tuple(math.floor(side / crop_pct) for side in crop) != sides:
    return fields, [
      f'timm cannot resize to {preparation.size} before cropping {crop}: it will resize '
      'the whole image, and its predictions will differ a little'
    ]
  keeps_shape = isinstance(preparation.size, int) or preparation.resize_mode == 'cover'
  fields['crop_mode'] = 'center' if keeps_shape else 'squash'
  fields['crop_pct'] = crop_pct
  return fields, []
