"""Defaults of every config, and settings of common data sets.

The comment above each key describes it. The command line overrides any key, for
example `--config.base_lr=0.01 --config.pp.crop=64`.
"""

from collections.abc import Iterable, Sequence
import copy
import dataclasses
import operator
import re
from typing import Annotated, Any, Literal

import ml_collections

from vit_jax.configs import schema

# The tasks of VTAB-1k, the data sets 'vtab/<task>', and which augmentations leave
# their labels as they are. The paper augments as BiT does (arXiv 2010.11929,
# B.1.1), and BiT omits what destroys labels (arXiv 1912.11370, section 3.3) but
# does not list the tasks; this list is ours: nothing is mirrored that has digits,
# positions or directions as labels, or cropped where labels are of geometry.
VTAB = {
  **dict.fromkeys(
    (
      'caltech101', 'cifar100', 'dtd', 'oxford_flowers102', 'oxford_iiit_pet',
      'sun397', 'patch_camelyon', 'eurosat', 'resisc45', 'diabetic_retinopathy',
    ), ('crop', 'flip'),
  ),
  'svhn': ('crop',),
  **dict.fromkeys(
    (
      'clevr_count', 'clevr_distance', 'dmlab', 'kitti_distance',
      'smallnorb_elevation',
    ), ('flip',),
  ),
  **dict.fromkeys(
    ('dsprites_x_position', 'dsprites_orientation', 'smallnorb_azimuth'), ()
  ),
}  # fmt: skip
# BiT resizes images to 448x448 and crops 384x384 at random.
_BIT_CROP_AREA = (384 / 448) ** 2

# Data set -> (training split, test split). Part of the training data is held
# out, to choose the learning rate on (arXiv 2010.11929, B.1.1).
SPLITS = {
  'cifar10': ('train[:98%]', 'test'),
  'cifar100': ('train[:98%]', 'test'),
  'imagenet2012': ('train[:99%]', 'validation'),
  'imagenet21k': ('full[102400:]', 'full[:102400]'),
  'oxford_iiit_pet': ('train[:90%]', 'test'),
  'oxford_flowers102': ('train[:90%]', 'test'),
  # The test images of COCO have no annotations; DETR's figures are on the
  # validation images (arXiv 2005.12872, section 4).
  **dict.fromkeys(
    ('coco/2014', 'coco/2017', 'coco/2017_panoptic'), ('train', 'validation')
  ),
  'coco_captions': ('train', 'val'),
  **{f'vtab/{task}': ('train800val200', 'test') for task in VTAB},
}

# Fine-tuning (table 4). Data set -> (updates, learning rates to try).
FINE_TUNING = {
  'imagenet2012': (20_000, (0.003, 0.01, 0.03, 0.06)),
  'cifar10': (10_000, (0.001, 0.003, 0.01, 0.03)),
  'cifar100': (10_000, (0.001, 0.003, 0.01, 0.03)),
  'oxford_iiit_pet': (500, (0.001, 0.003, 0.01, 0.03)),
  'oxford_flowers102': (500, (0.001, 0.003, 0.01, 0.03)),
  **{f'vtab/{task}': (2_500, (0.01,)) for task in VTAB},
}
# Any other data, such as a folder, is treated like the small sets of the table.
_OTHER_STEPS = 500
# Warm-up updates of runs of at least 2,500 updates, and of shorter runs, of
# which the paper's 500 would take up too much.
_WARMUP, _SHORT_WARMUP = 500, 100

# The settings of "How to train your ViT?" (arXiv 2106.10270). Name -> (layers
# and magnitude of RandAugment, p of mixup). A magnitude of 0 still changes
# images: it inverts them, for example.
AUGREG = {
  'none': (0, 0, 0.0),
  'light1': (2, 0, 0.0),
  'light2': (2, 10, 0.2),
  'medium1': (2, 15, 0.2),
  'medium2': (2, 15, 0.5),
  'strong1': (2, 20, 0.5),
  'strong2': (2, 20, 0.8),
}


def _preset(dataset: str, total_steps: int) -> ml_collections.ConfigDict:
  train, test = SPLITS.get(dataset, ('train', 'test'))
  warmup_steps = _WARMUP if total_steps >= 2_500 else _SHORT_WARMUP
  preset = ml_collections.ConfigDict(
    {
      'total_steps': total_steps,
      'warmup_steps': warmup_steps,
      'pp': {'train': train, 'test': test, 'crop': 384},
    }
  )
  task = dataset.removeprefix('vtab/')
  if task in VTAB and task != dataset:
    preset.base_lr = 0.01
    preset.pp.crop_area = (_BIT_CROP_AREA, _BIT_CROP_AREA)
    preset.pp.crop_ratio = None
    preset.pp.flip = True
    keep_labels(preset.pp, task)
  return preset


def keep_labels(pp: ml_collections.ConfigDict, task: str) -> None:
  """Turns off augmentation, in `pp`, that changes the labels of a task of VTAB."""
  if 'crop' not in VTAB[task]:
    with pp.ignore_type():
      pp.crop_area = None
  if 'flip' not in VTAB[task]:
    pp.flip = False


# The settings of `with_dataset`.
DATASET_PRESETS = {
  dataset: _preset(dataset, total_steps)
  for dataset, (total_steps, _) in FINE_TUNING.items()
}


# The optimisers of this package, and the keys of the config that are arguments of each.
OPTIMIZERS = {
  'adam': ('b1', 'b2'),
  'sgd': ('momentum',),
  'lion': ('b1', 'b2'),
  'adafactor': ('b1', 'b2'),
  'muon': ('momentum', 'b1', 'b2'),
}
# Default number of warm-up updates, as in the original.
WARMUP_STEPS = 500


def default_warmup(total_steps: int) -> int:
  """Returns the default number of warm-up updates, at most a tenth of a run."""
  return min(WARMUP_STEPS, total_steps // 10)


# --- Keys of a run ---

_DIFFERENT = schema.Fits(
  'a tuple of different integers of at least 0', lambda x: len(set(x)) == len(x)
)
Trackers = Annotated[
  tuple[Literal['wandb', 'mlflow'], ...],
  schema.Fits(
    "a tuple of different names of 'wandb', 'mlflow'", lambda x: len(set(x)) == len(x)
  ),
]
NamedFunction = Annotated[
  str,
  schema.Fits(
    "'MODULE:NAME', one of optax's, such as 'optax:NAME' or 'optax.contrib:NAME', or your "
    'own',
    lambda x: re.fullmatch(r'\w+(\.\w+)*:\w+', x) is not None,
  ),
]
Optimizer = Literal[tuple(OPTIMIZERS)] | NamedFunction  # type: ignore[valid-type]
DecayType = (
  Literal['cosine', 'linear', 'constant', 'staircase', 'rsqrt'] | NamedFunction
)
_SHARES = schema.Fits(
  '(smallest, largest), numbers above 0 and at most 1', lambda x: x[1] <= 1
)
Steps = Annotated[int, schema.Range(ge=1, le=2**31 - 1)]
WarmupSteps = Annotated[int, schema.Range(ge=0, le=2**31 - 1)]
SmallestLargest = Annotated[
  tuple[schema.Positive, schema.Positive],
  schema.Fits('(smallest, largest), finite numbers above 0', lambda x: x[0] <= x[1]),
]


def _by_channel(value: float | Sequence[float], channels: int = 1) -> list[float]:
  """Returns values by channel; a single number applies to all channels."""
  if isinstance(value, Sequence):
    return list(value)
  return channels * [value]


def _is_increasing(bounds: Sequence[float | Sequence[float]]) -> bool:
  """Returns whether the lowest values of all channels are below the highest ones."""
  channels = max(len(_by_channel(bound)) for bound in bounds)
  low, high = (_by_channel(bound, channels) for bound in bounds)
  return len(low) == len(high) and all(map(operator.lt, low, high))


# A number for all channels, or one for each.
ChannelValues = float | Annotated[tuple[float, ...], schema.Fits('a tuple of numbers')]
ValueRange = Annotated[
  tuple[ChannelValues, ChannelValues],
  schema.Fits(
    '(lowest, highest), with each lowest value below the highest', _is_increasing
  ),
]
Deviations = Annotated[
  ChannelValues,
  schema.Fits(
    'a number above 0, or one for each channel',
    lambda x: min(_by_channel(x), default=0) > 0,
  ),
]
ShownChannels = Annotated[
  tuple[schema.Natural, ...],
  schema.Fits('one or three numbers from 0, or ()', lambda x: len(x) in (0, 1, 3)),
]
SizeRange = Annotated[
  tuple[schema.Count, schema.Count],
  schema.Fits('(smallest, largest), integers of at least 1', lambda x: x[0] <= x[1]),
]
RandAugment = Annotated[
  tuple,
  schema.Fits(
    '(layers, magnitude), with at least 1 layer and a magnitude from 0 to 30, or ()',
    lambda x: (
      x in ((), [])
      or schema.accepts(
        x, tuple[schema.Count, Annotated[int, schema.Range(ge=0, le=30)]]
      )
    ),
  ),
]
Mixture = Annotated[
  tuple[tuple[schema.Text, schema.Positive], ...],
  schema.Fits(
    "data sets with weights above 0, as in (('cifar10', 0.7), ('/data/photos', 0.3))",
    bool,
  ),
]
WeightsByPart = Annotated[
  dict[schema.Text, schema.Text],
  schema.Fits("paths by part of the model, such as {'backbone': 'ViT-B_16.npz'}", bool),
]
ClassWeights = Annotated[
  dict[str, schema.Positive],
  schema.Fits("weights above 0 by class name, such as {'cat': 2.0}", bool),
]
Evaluators = Annotated[
  dict,
  schema.Fits(
    "evaluators by name, such as {'ece': {'type': 'my_module:Calibration'}}",
    lambda x: all(_is_evaluator(entry) for entry in x.values()),
  ),
]


def _is_evaluator(entry: Any) -> bool:
  return schema.is_mapping(entry) and isinstance(entry.get('type'), str)


Moments = Annotated[
  tuple[Annotated[float, schema.Range(gt=0, lt=1)], ...],
  schema.Fits(
    'increasing shares of the run, between 0 and 1',
    lambda x: list(x) == sorted(set(x)),
  ),
]
_PAIRS = (
  "pairs of a regular expression and a factor of at least 0, as in (('head/', 1.0),)"
)
_Factor = tuple[schema.Regex, schema.NonNegative]
# One pair needs no outer tuple.
Multipliers = Annotated[
  tuple,
  schema.Fits(
    _PAIRS,
    lambda x: schema.accepts(x, _Factor) or schema.accepts(x, tuple[_Factor, ...]),
  ),
]
_Axes = str | tuple[str, ...] | None
ShardingRules = Annotated[
  tuple[tuple[schema.Regex, tuple[_Axes, ...]], ...],
  schema.Fits(
    'pairs of a regular expression and the mesh axes of each dimension, as in '
    "(('head/kernel', (None, 'model')),)"
  ),
]
Mesh = Annotated[
  dict[str, schema.Count | Literal[-1] | None],
  schema.Fits('a size of at least 1 for each axis, or -1 for all remaining devices'),
]


@dataclasses.dataclass(kw_only=True)
class Seeded:
  """Key of the programs that train runs with several seeds."""

  # A seed also replaces '{seed}' in the names of splits, for draws of labels.
  seeds: schema.Seeds


def _check_resize(pp: ml_collections.ConfigDict) -> None:
  """Checks that the centre can be cropped from the resized image."""
  if pp.interpolation != 'bilinear' and not pp.antialias:
    raise ValueError(
      f"interpolation='{pp.interpolation}' needs antialiasing: set "
      '--config.pp.antialias=True'
    )
  crop = (pp.crop, pp.crop) if isinstance(pp.crop, int) else tuple(pp.crop)
  resize = pp.resize
  if isinstance(resize, tuple | list):
    resize = tuple(resize)
    least: Any = tuple(map(max, resize, crop))
  else:
    least = max(*crop, resize or 0)
  if resize not in (None, least):
    raise ValueError(
      f'resize={pp.resize} is smaller than crop={pp.crop}, so the centre '
      f'cannot be cropped: use at least {least} or None (config.pp.resize)'
    )


def _check_channels(pp: ml_collections.ConfigDict) -> None:
  """Checks the keys of images that are not 8-bit colour."""
  if pp.range is None:
    if pp.channels not in (1, 3):
      raise ValueError(
        f'channels={pp.channels}: images of 8-bit colour have 3, or 1 for grey; for others '
        'set the range of their values, as in --config.pp.range="(0, 65535)"'
      )
    for name in ('mean', 'std'):
      if pp[name] is not None:
        raise ValueError(
          f'{name}={pp[name]} is for images with a range of values: set --config.pp.range, '
          f'or leave out --config.pp.{name}'
        )
    return
  _check_channel_values(pp)
  if pp.randaugment:
    raise ValueError(
      f'randaugment={pp.randaugment} is for images of 8-bit colour, without '
      '--config.pp.range: leave it out'
    )
  if pp.color_jitter and pp.channels not in (1, 3):
    raise ValueError(
      f'color_jitter={pp.color_jitter} is for images of 1 or 3 channels, not '
      f'channels={pp.channels}: leave out --config.pp.color_jitter'
    )


def _check_channel_values(pp: ml_collections.ConfigDict) -> None:
  """Checks range, mean and deviation of the channels against each other."""
  if (pp.mean is None) != (pp.std is None):
    raise ValueError(
      f'mean={pp.mean} and std={pp.std}: set both or none of them (config.pp.mean, '
      'config.pp.std)'
    )
  if max(pp.shown_channels, default=0) >= pp.channels:
    raise ValueError(
      f'shown_channels={pp.shown_channels}: images have the channels 0 to '
      f'{pp.channels - 1} (config.pp.shown_channels)'
    )
  low, high = (None, None) if pp.range == 'percentile' else pp.range
  values = (('range', low), ('range', high), ('mean', pp.mean), ('std', pp.std))
  for name, value in values:
    if isinstance(value, tuple | list) and len(value) != pp.channels:
      raise ValueError(
        f'{name}={pp[name]} has {len(value)} values, and channels={pp.channels}: use one '
        f'for each channel, or a number for all (config.pp.{name})'
      )


def _check_canvases(pp: ml_collections.ConfigDict) -> None:
  if not pp.sides:
    return
  for name in ('rotate', 'randaugment', 'random_erasing'):
    if pp[name]:
      raise ValueError(
        f'{name}={pp[name]} is not possible for images on canvases '
        f'(pp.sides={pp.sides}): leave out --config.pp.{name}'
      )
  longest = max(*pp.sides, pp.eval_side)
  if pp.longest_side < longest:
    raise ValueError(
      f'longest_side={pp.longest_side} is shorter than the shorter side, '
      f'{longest} (pp.sides, pp.eval_side): raise --config.pp.longest_side'
    )


@dataclasses.dataclass
class Preprocessing:
  """Keys of `config.pp`."""

  # Splits in the notation of TFDS ('train[:90%]'), or folds with the same fraction of each
  # class, 'train[fold!=0/5]' (vit_jax/data/folds.py). A folder without `test` is tested on
  # its validation split (val, valid or validation). If a folder has test/ (or test.jsonl),
  # a `test` cut from the training images is ignored, as in the original, which tests on
  # test/: use `evals` for other splits.
  train: Annotated[schema.Split, schema.SWEPT] = 'train'
  test: Annotated[schema.Split, schema.SWEPT] = 'test'
  # Size of the model's input images in pixels: an int, or (height, width).
  crop: schema.Size = 224
  # Evaluation: None resizes the whole image to `crop`. A number resizes the
  # short side to that length, (height, width) the whole image to that size;
  # then the centre is cropped.
  resize: schema.Size | None = None
  # Evaluation, if `resize` is (height, width): 'squash' changes the shapes of images,
  # 'cover' keeps them and makes both sides at least as long.
  resize_mode: Literal['squash', 'cover'] = 'squash'
  # How images are resized, in training and evaluation. 'bilinear' without antialiasing
  # is the original's way. The files of many published weights say 'bicubic'.
  interpolation: Literal['bilinear', 'bicubic', 'lanczos'] = 'bilinear'
  # Resizes as Pillow does: when an image shrinks, all of its pixels count; the longer
  # side is truncated to an integer, and values are rounded to 0 to 255.
  antialias: bool = False
  # The pixel by which the margin of a centre crop is odd: 'down' crops it from the end,
  # as transformers do; 'even' leaves an even margin at the beginning, as torchvision
  # does, and so timm and open_clip.
  crop_rounding: Literal['down', 'even'] = 'down'
  # Prepares images as the files next to the weights in `pretrained` say, where the six
  # keys above have their defaults. Recipes for fine-tuning set this,
  # unless their argument has a size. Weights without such files change nothing.
  match_pretrained: bool = False
  # Channels of images: 3 for colour, 1 for grey, or another number with `range`.
  channels: Annotated[int, schema.Range(ge=1, le=64)] = 3
  # Images that are not 8-bit colour, such as .npy, TIFF and PNG of 16 bits: the (lowest,
  # highest) value, numbers for all channels or tuples of one for each, which become -1
  # and 1. Values outside are clipped. 'percentile': percentiles 0.5 and 99.5 of the
  # training images, which `vit_jax index FOLDER --statistics` measures. None: 8-bit
  # colour.
  range: Literal['percentile'] | ValueRange | None = None
  # With `range`: mean and deviation of the values, a number for all channels or one for
  # each, by which they are standardised in place of -1 to 1. 'measured': taken from the
  # training images, as measured by `vit_jax index FOLDER --statistics`.
  mean: Literal['measured'] | ChannelValues | None = None
  std: Literal['measured'] | Deviations | None = None
  # With `range`: numbers from 0 of the channels that pictures show as red, green and
  # blue, or of one as grey. (): the first three principal components of the pixels.
  shown_channels: Annotated[ShownChannels, schema.FREE] = ()
  # Training: least and greatest share of the image's area, and least and
  # greatest width / height, of a random crop. None for `crop_area` resizes the
  # whole image; None for `crop_ratio` keeps the width / height of the image.
  crop_area: Annotated[SmallestLargest, _SHARES] | None = (0.05, 1.0)
  crop_ratio: SmallestLargest | None = (3 / 4, 4 / 3)
  # Decodes a JPEG, or only its crop, at 1/2, 1/4 or 1/8 of its size if that is
  # still at least as high and wide as `crop`. Photographs of many megapixels
  # take half of the time. Pixels differ a little, and more where an image is only a
  # few times as large as `crop` and full of fine detail; predictions decode alike.
  jpeg_shrink: bool = True
  # Training: mirrors an image with probability 1/2.
  flip: bool = True
  # Training: rotates the image by a random angle of up to this many degrees.
  rotate: Annotated[float, schema.Range(ge=0, le=360)] = 0.0
  # Training: RandAugment as (layers, magnitude), for example (2, 15); () for
  # none. Magnitudes range from 0 to 30, and suit images of about 224 pixels.
  randaugment: RandAugment = ()
  # Training: strength, from 0 to 1, of random changes of brightness, contrast
  # and saturation.
  color_jitter: schema.Probability = 0.0
  # Training: probability of erasing a random rectangle.
  random_erasing: schema.Probability = 0.0
  # Detectors only: images keep their height / width and lie on canvases, see
  # vit_jax/data/augmentation/canvases.py; `crop`, `crop_area`, `crop_ratio` and
  # `resize` then have no effect. Training: lengths of the shorter side in
  # pixels, one of which is drawn for each image. (): no canvases.
  sides: schema.Counts = ()
  # Evaluation: length of the shorter side.
  eval_side: schema.Count = 800
  # Greatest length of the longer side, at the greatest length of the shorter
  # side; in proportion at smaller lengths.
  longest_side: schema.Count = 1333
  # Training: half of the images are resized to one of these lengths of the
  # shorter side first, and a part is cropped whose height and width are uniform
  # in `crop_range`. () for no crops.
  crop_sides: schema.Counts = (400, 500, 600)
  crop_range: SizeRange = (384, 600)
  # Training: greatest number of sizes of a canvas; the update is compiled for
  # each. More sizes mean less padding.
  canvases: schema.Count = 3
  # Height and width of a canvas are multiples of this number.
  canvas_multiple: schema.Count = 32

  RULES = (_check_resize, _check_channels, _check_canvases)


@dataclasses.dataclass
class FewShot:
  """Keys of `config.fewshot`: few-shot linear probes, nearest neighbours."""

  # Training images per class, for example (1, 5, 10, 25); (): no probes.
  shots: schema.Counts = ()
  # Numbers k of nearest neighbours among all training images, for example (20,), which
  # adds 'knn_20_test' to each evaluation; (): none.
  knn: schema.Counts = ()
  # Data set of the probes, a TFDS name, a folder or hf://OWNER/NAME, with its splits to
  # train and to test on. None: the run's own.
  dataset: schema.Text | None = None
  train: schema.Split | None = None
  test: schema.Split | None = None
  # Seeds that choose the training images; metrics are means over them.
  seeds: Annotated[tuple[schema.Natural, ...], _DIFFERENT] = (0, 1, 2)
  # Factor of the squared weights, added to the sum of the squared errors.
  l2: schema.Positive = 1024.0
  # Layer of the model, see vit_jax/evaluators/features.py.
  layer: schema.Text = 'features'
  # Images are squeezed to this factor times `pp.crop`, then cropped. None: 8/7, or as
  # published weights say (`pp.antialias`).
  squeeze: Annotated[float, schema.Range(ge=1, le=8)] | None = None


@dataclasses.dataclass
class Lora:
  """Keys of `config.lora`: low-rank adapters (vit_jax/learning/lora.py)."""

  # Rank r of the adapters. Only they and the heads are trained, and what
  # `lr_multipliers` name with another factor than 0. 0: no adapters.
  rank: schema.Natural = 0
  # The adapter is multiplied by alpha / r. None: by 1.
  alpha: schema.Positive | None = None
  # Which kernels have adapters: a regex for their paths in the parameters, such as
  # '(query|key|value|out|Dense_[01])/'.
  on: schema.Regex = '(query|value)'


@dataclasses.dataclass
class EarlyStopping:
  """Keys of `config.early_stopping` (vit_jax/run/early_stopping.py)."""

  # Evaluations in a row without progress of `best_metric` after which the run ends.
  # Each evaluation that is better than all before saves a checkpoint. 0: no early
  # stopping.
  patience: schema.Natural = 0
  # Progress is a gain of more than this number over the last progress, such as .001 for
  # .1 % of accuracy.
  min_delta: schema.NonNegative = 0.0


def _check_lengths(config: ml_collections.ConfigDict) -> None:
  for name in ('total', 'warmup'):
    steps, epochs = config[f'{name}_steps'], config[f'{name}_epochs']
    if steps is not None and epochs is not None:
      raise ValueError(
        f'{name}_steps={steps} and {name}_epochs={epochs} are both given: set '
        f'one of them to None, --config.{name}_epochs=None or '
        f'--config.{name}_steps=None'
      )
  if None not in (config.warmup_steps, config.total_steps):
    check_warmup(config.warmup_steps, config.total_steps)


def check_warmup(warmup: int, total: int) -> None:
  """Raises ValueError unless a warm-up is shorter than its run, in steps."""
  if warmup >= total:
    raise ValueError(
      f'warmup_steps={warmup} must be below total_steps={total}: lower '
      '--config.warmup_steps or train longer'
    )


def _check_decay(config: ml_collections.ConfigDict) -> None:
  if (config.decay_type == 'staircase') != bool(config.decay_at):
    raise ValueError(
      f"decay_type='{config.decay_type}' and decay_at={config.decay_at}: a "
      'staircase needs the shares of the run at which it drops, as in '
      '--config.decay_at="(0.3, 0.6, 0.9)", and other decays take none'
    )
  if config.decay_args and not (
    config.decay_type == 'rsqrt' or is_named_function(config.decay_type)
  ):
    raise ValueError(
      f"decay_args={config.decay_args.to_dict()} are for decay_type='rsqrt' or a "
      f"schedule 'MODULE:NAME', not for '{config.decay_type}': leave them out "
      '(config.decay_args)'
    )


def is_named_function(value: str) -> bool:
  """Returns whether an optimiser or a decay is a function 'MODULE:NAME'."""
  return ':' in value


def _check_optimizer(config: ml_collections.ConfigDict) -> None:
  if is_named_function(config.optimizer):
    _check_named_optimizer(config)
  else:
    _check_optimizer_keys(config)
  if config.independent_weight_decay and not config.base_lr:
    raise ValueError(
      'independent_weight_decay=True divides by base_lr, which is 0: set '
      '--config.base_lr above 0 or --config.independent_weight_decay=False'
    )


def _check_optimizer_keys(config: ml_collections.ConfigDict) -> None:
  """Checks that an optimiser of this package reads the keys that are set."""
  if config.optimizer_args:
    raise ValueError(
      f'optimizer_args={config.optimizer_args.to_dict()} are for an optimiser '
      f"'MODULE:NAME', such as 'optax:{config.optimizer}': leave them out, or change the "
      'optimiser (config.optimizer_args, config.optimizer)'
    )
  defaults = dict(schema.defaults(Config))
  for key in sorted(set().union(*OPTIMIZERS.values())):
    if config[key] != defaults[key] and key not in OPTIMIZERS[config.optimizer]:
      having = [name for name in OPTIMIZERS if key in OPTIMIZERS[name]]
      raise ValueError(
        f"{key}={config[key]} is not an argument of optimizer='{config.optimizer}', "
        f'only of {", ".join(having)}: set --config.{key}={defaults[key]}'
      )


def _check_named_optimizer(config: ml_collections.ConfigDict) -> None:
  """Checks that no key is set that an optimiser 'MODULE:NAME' does not read."""
  defaults = dict(schema.defaults(Config))
  changed = {
    key: config[key]
    for key in ('b1', 'b2', 'momentum', 'weight_decay')
    if (config[key] or 0) != defaults[key]
  }
  if changed:
    keys = ', '.join(f'{key}={value!r}' for key, value in changed.items())
    resets = ' '.join(f'--config.{key}={defaults[key]}' for key in changed)
    raise ValueError(
      f"optimizer='{config.optimizer}' does not read {keys}: set {resets}, and what "
      'the optimiser needs in --config.optimizer_args, such as '
      "\"{'weight_decay': 0.1, 'mask': 'kernels'}\""
    )


def _check_lora(config: ml_collections.ConfigDict) -> None:
  if config.lora.rank and config.ema_decay:
    raise ValueError(
      f'ema_decay={config.ema_decay} averages all parameters, and lora.rank='
      f'{config.lora.rank} trains few: set --config.ema_decay=0'
    )


def _check_early_stopping(config: ml_collections.ConfigDict) -> None:
  if config.early_stopping.patience and not config.eval_every:
    raise ValueError(
      f'early_stopping.patience={config.early_stopping.patience} counts evaluations '
      'during the run, and eval_every=0 makes none: set --config.eval_every=100'
    )


def _check_pictures(config: ml_collections.ConfigDict) -> None:
  if config.log_attention and not config.log_images:
    raise ValueError(
      'log_attention=True draws attention maps of images, and log_images=0: set '
      '--config.log_images=8 or --config.log_attention=False'
    )


@dataclasses.dataclass
class Config:
  """Keys of a run, `config`; the fields of `config.model` are in models.py."""

  # The objective: a task of vit_jax/run/config.py (TASKS), or the dotted name
  # of a module with a class Task, see vit_jax/tasks/base.py.
  task: schema.Text = 'classify'
  # Options of the task, listed in configs/task_options.py, for example
  # --config.task_options.mixup=0.2.
  task_options: dict = dataclasses.field(default_factory=dict)
  # The program to run: 'train' ('inference_time', 'study', 'transfer' and 'vtab'
  # have their own configs).
  trainer: Annotated[Literal['train'], schema.SWEPT] = 'train'
  # Seed of all random numbers: initial weights, order, augmentation, dropout.
  seed: Annotated[int, schema.Range(ge=0, le=2**63 - 1), schema.SWEPT] = 0

  # --- Data ---
  # A TFDS name, or a folder with train/<class>/* and test/<class>/*, with
  # train.jsonl and test.jsonl, or metadata.csv (vit_jax/data/manifest.py), with Parquet files
  # as on the Hugging Face Hub (vit_jax/data/parquet.py), or with boxes in
  # COCO's format (vit_jax/data/coco/layout.py), or hf://OWNER/NAME of a data set on the
  # Hugging Face Hub (vit_jax/data/hub_datasets.py). Or a weighted mixture
  # to train on: (('cifar10', 0.7), ('/data/photos', 0.3)); evaluation then
  # reads the first data set.
  dataset: Annotated[schema.Text | Mixture | None, schema.MOVABLE] = None
  # Folder of TFDS data sets (default: ~/tensorflow_datasets).
  tfds_data_dir: Annotated[schema.Text | None, schema.FREE] = None
  # Folder of files that must be downloaded by hand (ImageNet).
  tfds_manual_dir: Annotated[schema.Text | None, schema.FREE] = None
  # Images per update, over all devices and hosts together.
  batch: schema.Count = 512
  # Images per evaluation step, over all devices and hosts together.
  batch_eval: Annotated[schema.Count, schema.FREE] = 512
  # How often training images are drawn: 'uniform', each equally often; 'balanced', each
  # class equally often (vit_jax/data/balance.py).
  sampling: Literal['uniform', 'balanced'] = 'uniform'
  # Batches kept ready on the devices.
  prefetch: Annotated[int, schema.Range(ge=0, le=1_000), schema.FREE] = 2
  # How to handle images of a folder that cannot be decoded. 'error' decodes
  # all images once before training, names the broken ones and stops; 'skip'
  # leaves them out and counts them; 'trust' checks nothing, and a broken image
  # stops the run when it is read. Results are kept in the workdir, or next to
  # the images by vit_jax.data.indexing.
  broken_images: Annotated[Literal['error', 'skip', 'trust'], schema.FREE] = 'error'
  # How to handle boxes of an annotation file (COCO's JSON) that reach beyond
  # their image, have no area or a negative size, or that are absent, empty or
  # NaN. 'refuse' names them and stops; 'skip' leaves them out and counts them;
  # 'clip' cuts them off at the border of the image, and drops boxes of which
  # nothing remains.
  broken_boxes: Literal['refuse', 'skip', 'clip'] = 'refuse'
  # Greatest number of pixels, height times width, of an image file; a larger
  # image counts as broken and is not decoded. The default is Pillow's.
  max_image_pixels: Annotated[schema.Count, schema.FREE] = 89_478_485

  pp: Preprocessing = dataclasses.field(default_factory=Preprocessing)

  # --- Model: set from models.py ---
  model: ml_collections.ConfigDict | None = None

  # Weights to start from, except the head: a published .npz, a .safetensors or
  # .bin of timm or Hugging Face, a URL or gs:// path of one, a model on the hub
  # (hf://OWNER/NAME), or the workdir of a run. Position embeddings are resized
  # to the image, patch embeddings to the patch size. Parts of a model may start
  # from different files, by the first name of their parameters:
  # --config.pretrained="{'backbone': 'ViT-B_16.npz'}"; the rest is new. The
  # parts of an image-text model are 'img' and 'txt', whose weights may be a BERT.
  pretrained: schema.Text | WeightsByPart | None = None
  # Folder of published files named after their models: if `pretrained` is None,
  # the weights are <pretrained_dir>/<model.model_name>.npz. None: random
  # weights (--config.pretrained_dir=None).
  pretrained_dir: schema.Text | None = '.'
  # With pretrained_dir, a model of the AugReg paper ('R_Ti_16': its best 21k
  # checkpoint by the folder's index.csv) or the name of one checkpoint.
  model_or_filename: schema.Text | None = None
  # Which model of a checkpoint with several to start from, such as 'student'; None:
  # the averaged weights, if it has some.
  pretrained_entry: schema.Text | None = None
  # Grid of the weights, patches (height, width), if it is neither square nor
  # given by their file.
  pretrained_grid: schema.HeightWidth | None = None

  # --- Objective ---
  # 'softmax' or 'sigmoid' cross-entropy (for several labels per image).
  loss: Literal['softmax', 'sigmoid'] = 'softmax'
  label_smoothing: schema.Rate = 0.0
  # Weights of the classes in the loss: 'balanced' for n / (classes * count), as in
  # scikit-learn, or a dict by class name, in which a missing class has weight 1. The loss
  # is divided by the sum of the images' weights, as in PyTorch's cross_entropy. The sigmoid
  # loss weights positive labels, as `pos_weight` does.
  class_weights: Literal['balanced'] | ClassWeights | None = None

  # --- Optimiser ---
  # Number of updates, or of epochs (set one of the two).
  total_steps: Annotated[Steps | None, schema.LENGTH] = None
  total_epochs: Annotated[schema.Positive | None, schema.LENGTH] = None
  # 'sgd' (with momentum), 'adam', 'lion', 'adafactor' or 'muon', compared in
  # docs/train.md, or 'MODULE:NAME', an optimiser of optax, such as 'optax:lamb', or your
  # own.
  optimizer: Optimizer = 'sgd'  # type: ignore[valid-type]
  # Keyword arguments of an optimiser 'MODULE:NAME', which replace the keys of the others,
  # as in {'b2': 0.95, 'weight_decay': 0.1, 'mask': 'kernels'}. A mask of 'kernels' selects
  # the kernels of dense and convolutional layers.
  optimizer_args: dict = dataclasses.field(default_factory=dict)
  # Momentum of SGD, and of Muon, which is published with 0.95.
  momentum: schema.Rate = 0.9
  # Adam, Lion and Adafactor: decay of the first moment; also for the parameters
  # that Muon leaves to Adam.
  b1: schema.Rate = 0.9
  # The same optimisers: decay of Adam's second moment, its greatest value for
  # Adafactor, and decay of Lion's momentum, which is published with 0.99.
  b2: schema.Rate = 0.999
  # Type of the accumulator: momentum, or the first moment. Other optimisers have their
  # own, such as optax's `mu_dtype` in `optimizer_args`.
  optim_dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  # Learning rate after the warm-up.
  base_lr: schema.NonNegative = 0.03
  # The decay after the warm-up: 'cosine', 'linear', 'constant', 'staircase', 'rsqrt' (the
  # reciprocal square root of the steps), or 'MODULE:NAME', a schedule of optax, such as
  # 'optax:exponential_decay', or your own, whose values are multiplied by `base_lr`.
  decay_type: DecayType = 'cosine'
  # Keyword arguments of 'rsqrt' (vit_jax/learning/schedules.py) or of a schedule
  # 'MODULE:NAME', as in {'decay_rate': 0.1}. By default, its `init_value` is 1, and
  # `decay_steps` or `transition_steps` is the number of updates after the warm-up.
  decay_args: dict = dataclasses.field(default_factory=dict)
  # Staircase: divides the learning rate by 10 after each of these shares of all
  # updates, for example (0.3, 0.6, 0.9).
  decay_at: Moments = ()
  # Updates, or epochs, of linear warm-up (set one of the two). None for both:
  # 500 updates, or a tenth of the run if that is less.
  warmup_steps: Annotated[WarmupSteps | None, schema.LENGTH] = None
  warmup_epochs: Annotated[schema.NonNegative | None, schema.LENGTH] = None
  # Decoupled weight decay, multiplied by the learning rate.
  weight_decay: schema.NonNegative | None = 0.0
  # The parameters that decay: 'kernels' of dense and convolutional layers, or
  # 'all' parameters.
  weight_decay_on: Literal['kernels', 'all'] = 'kernels'
  # Multiplies weight decay only by the schedule, learning rate / base_lr, as
  # big_vision does: weight decay is then independent of `base_lr`. With a
  # `base_lr` of 1e-3, independent weight decay of 1e-4 equals weight decay of
  # 0.1.
  independent_weight_decay: bool = False
  # Classical weight decay of SGD: this number times the kernels is added to the
  # gradient, before the momentum. With a momentum of 0.9 it takes as much off
  # as a `weight_decay` of ten times the number.
  l2_decay: schema.NonNegative = 0.0
  # Factors on the learning rate, as ordered (regex, factor) pairs; the first
  # regex found in a parameter's path decides, and 0 freezes. A linear probe:
  # (('head/', 1.0), ('', 0.0)).
  lr_multipliers: Multipliers = ()
  # Layer-wise decay: each block of a Vision Transformer has this factor times the
  # learning rate of the block above it (timm's `layer_decay`), in addition to
  # `lr_multipliers`. 1: the same rate for all.
  layer_decay: Annotated[float, schema.Range(gt=0, le=1)] = 1.0
  lora: Lora = dataclasses.field(default_factory=Lora)
  # Greatest global norm of the gradient (0: no limit).
  grad_norm_clip: schema.NonNegative | None = 1.0
  # Number of micro-batches that a batch is split into, to save memory; results
  # are the same except for dropout's noise.
  accum_steps: Annotated[schema.Count, schema.FREE] = 1
  # Decay of the exponential average of the weights (0: no average). After t
  # updates the decay is at most (1 + t) / (10 + t). Evaluation and prediction
  # use the averaged weights.
  ema_decay: schema.Rate | None = 0.0

  # --- Devices ---
  # Size of each axis of the mesh; -1 for all remaining devices. 'data' and
  # 'fsdp' split the batch, 'fsdp' also splits the parameters and the optimiser
  # state, 'model' splits heads and hidden layers, 'sequence' the tokens of each
  # image: see vit_jax/distributed/sharding.py.
  mesh: Annotated[Mesh, schema.FREE] = dataclasses.field(
    default_factory=lambda: {'data': -1, 'fsdp': 1, 'model': 1, 'sequence': 1}
  )
  # Ordered (regex, spec) pairs, which override the sharding by the mesh.
  sharding_rules: Annotated[ShardingRules, schema.FREE] = ()

  # --- Log, evaluation, checkpoints ---
  # Evaluations: (name, split) or (name, split, data set) each; the names of the
  # metrics end in `name`. Empty: (('test', pp.test),).
  evals: Annotated[tuple, schema.MEASURED, schema.SWEPT] = ()
  # Steps between two lines of progress, evaluations and checkpoints; 0 for only
  # those at the end of the run.
  progress_every: Annotated[schema.Natural, schema.FREE] = 10
  eval_every: Annotated[schema.Natural, schema.FREE] = 100
  checkpoint_every: Annotated[schema.Natural, schema.FREE] = 1_000
  # Number of newest checkpoints to keep; the best one by `best_metric` is kept
  # too.
  keep_checkpoints: Annotated[schema.Count, schema.FREE] = 2
  # Name of a metric and of an evaluation, such as 'accuracy_test'. None: the task's main
  # metric in the first evaluation.
  best_metric: Annotated[schema.Text | None, schema.FREE, schema.SWEPT] = None
  early_stopping: Annotated[EarlyStopping, schema.FREE] = dataclasses.field(
    default_factory=EarlyStopping
  )
  # Trackers to write to, next to TensorBoard: 'wandb', 'mlflow'. Their environment
  # variables apply, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.
  trackers: Annotated[Trackers, schema.FREE] = ()
  # Images that TensorBoard shows: of the first training batch as the model sees
  # it, and, at each evaluation, of the first test images with predictions, which
  # the last evaluation also saves as PNGs in the workdir. 0: none.
  log_images: Annotated[int, schema.Range(ge=0, le=1_000), schema.FREE] = 8
  # Adds attention maps of these test images: the last layer, and the rollout
  # through all layers.
  log_attention: Annotated[bool, schema.FREE] = False
  # Evaluators by name, in addition to the task's. `type` is a class,
  # 'MODULE:CLASS', `evals` are the names of its evaluations (default: all), and the other
  # keys are arguments of the class, as in
  # --config.evaluators="{'ece': {'type': 'my_module:Calibration', 'bins': 10}}"; see
  # vit_jax/evaluators/base.py.
  evaluators: Annotated[Evaluators, schema.MEASURED] = dataclasses.field(
    default_factory=dict
  )
  # Few-shot linear probes at each evaluation: metrics such as 'fewshot_5_test',
  # named after the first evaluation (vit_jax/evaluators/probes.py).
  fewshot: Annotated[FewShot, schema.MEASURED] = dataclasses.field(
    default_factory=FewShot
  )
  # Training images per class of linear probes of all layers, after the last
  # update: a table, and probe.png and probe.json in the workdir
  # (vit_jax/evaluators/probes.py). 0: none.
  layer_probe: Annotated[schema.Natural, schema.FREE] = 0
  # File of ImageNet ReaL labels (vit_jax/evaluators/real.py); adds
  # 'accuracy_real' to the first evaluation, which must be on the validation
  # images of ImageNet.
  real_labels: Annotated[schema.Text | None, schema.MEASURED] = None
  # Steps to record with the profiler, shown by TensorBoard (0: none).
  profile_steps: Annotated[schema.Natural, schema.FREE] = 0

  RULES = (
    _check_lengths,
    _check_decay,
    _check_optimizer,
    _check_lora,
    _check_early_stopping,
    _check_pictures,
  )


def get_config() -> ml_collections.ConfigDict:
  """Returns the defaults: every key that exists, without the model's fields."""
  return schema.make(Config)


def set_dataset(
  config: ml_collections.ConfigDict, dataset: str | Sequence[tuple[str, float]]
) -> ml_collections.ConfigDict:
  """Sets the data set, and its splits if they are known."""
  config.dataset = dataset
  splits = SPLITS.get(dataset) if isinstance(dataset, str) else None
  config.pp.train, config.pp.test = splits or ('train', 'test')
  return config


# How the argument of a config names a folder that has a comma in its name.
COMMA = 'for a folder with a comma in its name, pass a link to it without one (ln -s)'


def with_dataset(
  config: ml_collections.ConfigDict, dataset: str
) -> ml_collections.ConfigDict:
  """Returns a copy with the settings for fine-tuning (table 4, B.1.1).

  Sets the data set (a key of DATASET_PRESETS, any other TFDS name, or a
  folder), its splits, the image size, and the numbers of updates.
  """
  config = copy.deepcopy(config)
  config.dataset = dataset
  preset = DATASET_PRESETS.get(dataset) or _preset(dataset, _OTHER_STEPS)
  config.update(copy.deepcopy(preset))
  return config


def split_argument(arg: str, forms: str, example: str) -> list[str]:
  """Splits the argument of a config at its commas; rejects too few or too many.

  `forms` has the shortest first, as 'MODEL,DATA or MODEL,DATA,SIZE'. Returns as many
  values as the last form has, with '' for those left out.
  """
  values = arg.split(',')
  least, *_, most = 2 * [form.count(',') + 1 for form in forms.split(' or ')]
  if not all(values[:least]) or not least <= len(values) <= most:
    hint = f'; {COMMA}' if len(values) > most else ''
    raise ValueError(f"'{arg}' must be {forms}: --config=configs/{example}{hint}")
  return values + (most - len(values)) * ['']


def choose(
  arg: str, settings: dict[str, Iterable[str]], example: str
) -> tuple[str, str, dict]:
  """Splits an argument MODEL,DATA,... with options of settings in any order.

  `settings` has for each setting (a noun, such as 'recipe') its options, all of them
  different. Returns model, data, and for each noun the option in `arg`, or None.
  """
  model, _, remainder = arg.partition(',')
  dataset, *names = remainder.split(',')
  if not dataset:
    raise ValueError(
      f"'{arg}' must be MODEL,DATA, and any of {', '.join(settings).upper()}: "
      f'--config=configs/{example}'
    )
  choices = dict.fromkeys(settings)
  for name in names:
    kind = next((kind for kind in settings if name in settings[kind]), None)
    if kind is None:
      lists = []
      for setting, options in settings.items():
        lists.append(f'{setting} {", ".join(options)}')
      raise ValueError(f"'{name}' is unknown: use {'; '.join(lists)}; {COMMA}")
    if choices[kind] is not None:
      raise ValueError(f"'{choices[kind]}' and '{name}': use only one {kind}")
    choices[kind] = name
  return model, dataset, choices


def set_augmentation(
  config: ml_collections.ConfigDict, name: str
) -> ml_collections.ConfigDict:
  """Sets RandAugment and mixup in a config to a key of AUGREG; returns it."""
  if name not in AUGREG:
    raise ValueError(
      f"augmentation '{name}' is unknown: use one of {', '.join(AUGREG)}"
    )
  layers, magnitude, mixup = AUGREG[name]
  config.pp.randaugment = (layers, magnitude) if layers else ()
  with config.unlocked():
    if config.get('task_options') is None:
      config.task_options = ml_collections.ConfigDict()
    config.task_options.mixup = mixup
  return config


def flatten(
  config: ml_collections.ConfigDict, prefix: tuple[str, ...] = ('config',)
) -> Iterable[tuple]:
  """Yields pairs such as ('config.pp.crop', 384), for sweeps."""
  for key, value in config.items():
    if isinstance(value, dict | ml_collections.ConfigDict):
      yield from flatten(value, (*prefix, key))
    else:
      yield '.'.join((*prefix, key)), value
