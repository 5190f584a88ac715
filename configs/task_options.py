"""Options of the tasks of this package, `config.task_options`: types and defaults.

A task elsewhere has its own dataclass, `Task.Options`. BEST_METRIC names the metric that
`config.best_metric` selects by default, without the name of an evaluation.
"""

import dataclasses
from typing import Annotated, Literal

import ml_collections

from vit_jax.configs import schema


@dataclasses.dataclass
class Classify:
  """Options of classification."""

  BEST_METRIC = 'accuracy'

  # Mixes pairs of images and their labels (arXiv 1710.09412). The value is the
  # parameter of the Beta distribution of the weights; 0 turns mixup off.
  mixup: schema.NonNegative = 0.0
  # Pastes a box of another image into each image, and mixes the labels (arXiv
  # 1905.04899). The value has the same meaning; 0 turns CutMix off.
  cutmix: schema.NonNegative = 0.0
  # Exponent of the focal loss (arXiv 1708.02002), which reduces the loss of images that
  # are classified well; the paper's is 2. 0: the cross-entropy.
  focal_gamma: schema.NonNegative = 0.0
  # Weight of positive labels in the focal loss of `loss='sigmoid'`, and 1 minus that of
  # negative ones; the paper's is .25. None: 1 for both.
  focal_alpha: schema.Share | None = None
  # Logit adjustment (arXiv 2007.07314): the training loss adds this factor times the
  # logarithm of the frequency of each class to its logit; the paper's is 1. 0: none.
  logit_adjustment: schema.NonNegative = 0.0


@dataclasses.dataclass
class Detect:
  """Options of detection."""

  BEST_METRIC = 'AP'

  # Maximum number of objects of an image; at most the number of queries.
  max_objects: schema.Count = 100
  # Weight of the class in the matching and in the loss. The published one
  # is for a pretrained backbone.
  class_weight: schema.Positive = 1.0
  # Weight of a query without an object in the loss of the class. The published
  # one suits 100 queries, most of which have no object.
  no_object_weight: schema.Share = 0.1
  # Evaluation and detection on canvases (config.pp.sides): each image lies on
  # the smallest canvas whose sides are multiples of this number, and the
  # model is compiled for each canvas. 1: no padding at all; 0: all images lie
  # on one square.
  tight: Annotated[schema.Natural, schema.FREE] = 64


@dataclasses.dataclass
class ImageText:
  """Options of contrastive learning of images and texts."""

  BEST_METRIC = 'image_to_text_r1'

  # Sentences about a class, for zero-shot classification: 'short' (8), 'full'
  # (the 80 of CLIP), one template with {} for the name, or a file with one per
  # line.
  templates: str = 'short'
  # Names that replace the class names of the data, in their order: 'a;b;c', or a
  # file with one per line.
  classes: str = ''
  # Whether the embeddings of classes are normalised after the mean over
  # templates, as for CLIP and SigLIP, but not LiT.
  unit_classes: bool = False
  # Whether a locked image tower computes the embeddings of the training images
  # once, to a file in the workdir, instead of in each epoch.
  precompute: bool = False
  # Maximum number of texts of an image in an evaluation.
  most_texts: schema.Count = 8


def _check_corruption(options: ml_collections.ConfigDict) -> None:
  if options.masked + options.swapped > 1 + 1e-9:
    raise ValueError(
      f'masked={options.masked} and swapped={options.swapped} are shares of the '
      'corrupted patches: they must not sum to more than 1 (config.task_options.masked)'
    )


@dataclasses.dataclass
class MaskedPatches:
  """Options of masked patch prediction."""

  BEST_METRIC = 'accuracy'

  # Share of the patches that are corrupted (15 % is slightly worse). Of the
  # corrupted patches, `masked` is the share that becomes the mask token and
  # `swapped` the share that becomes another patch; the rest stay as they are.
  corruption: schema.Share = 0.5
  masked: schema.Probability = 0.8
  swapped: schema.Probability = 0.1
  # Target of a masked patch: 'mean', its mean colour in 3 bits per
  # channel; '4x4', the mean colour of each of its 4 x 4 cells; 'l2', all of
  # its pixels, by regression.
  target: Literal['mean', '4x4', 'l2'] = 'mean'

  RULES = (_check_corruption,)


@dataclasses.dataclass
class Pixels:
  """Options of prediction of pixels."""

  BEST_METRIC = 'bits_per_dim'

  # The palette: a .npy float [colours, channels] in [-1, 1], or a folder that
  # has one: the workdir of a run, or a model of Hugging Face. '': the palette of
  # config.pretrained, else one that k-means finds in the training images.
  palette: str = ''
  # Objective 'bert': probability with which a pixel is masked.
  masked: schema.Share = 0.15


@dataclasses.dataclass
class PixelsFinetune(Pixels, Classify):
  """Options of classification by models of pixels."""

  BEST_METRIC = 'accuracy'

  # Weight of the cross-entropy of the pixels; 0 to learn only the classes.
  generation: schema.NonNegative = 1.0


# Other columns of predictions and tables, and features with a meaning of their own.
_RESERVED = ('embedding', 'error', 'image', 'index', 'label', 'path')


def _check_targets(options: ml_collections.ConfigDict) -> None:
  if not options.targets:
    raise ValueError(
      'targets=() names no column to predict: set --config.task_options.targets, for '
      'example to age'
    )
  if reserved := [name for name in options.targets if name in _RESERVED]:
    raise ValueError(
      f"targets={options.targets}: '{reserved[0]}' has another meaning: rename that column "
      'of the data (config.task_options.targets)'
    )


@dataclasses.dataclass
class Regress:
  """Options of regression."""

  BEST_METRIC = 'mae'

  # Names of the columns of the data to predict, as in age or
  # --config.task_options.targets="('age', 'weight')". A column has a number in each row, or a
  # list of as many numbers in all rows.
  targets: schema.Names = ('target',)
  # Loss of an error e, in standard deviations of the target: e^2, |e|, or the Huber loss,
  # which is e^2 / 2 up to `huber_delta`, and linear from there.
  loss: Literal['squared', 'absolute', 'huber'] = 'squared'
  huber_delta: schema.Positive = 1.0

  RULES = (_check_targets,)


@dataclasses.dataclass
class Masks:
  """Options of the losses of a set of masks."""

  # EoMT (config.model.kind='eomt'): weight of the cross-entropy of masks.
  mask_weight: schema.NonNegative = 5.0
  # Weight of the Dice loss: of masks with EoMT, where None is 5; of classes with the linear
  # head, where None is 0 and the weight of the cross-entropy 1.
  dice_weight: schema.NonNegative | None = None
  # Number of points at which the losses of a mask are computed, the number of points per
  # point from which the least certain ones are taken, and their share.
  num_points: schema.Count = 12_544
  oversample: Annotated[float, schema.Range(ge=1)] = 3.0
  importance: schema.Probability = 0.75


@dataclasses.dataclass
class Segment(Masks, Detect):
  """Options of panoptic segmentation."""

  BEST_METRIC = 'PQ'

  # Names of the classes of stuff; (): as the data set says, or none.
  stuff: schema.Names = ()
  # Side of the square in which test images are compared with their segments, in
  # pixels; a larger image is shrunk.
  truth_size: schema.Count = 640
  # DETR: whether all pixels of several queries that found one class of stuff are
  # its segment. False is the released post-processing, for published PQ.
  merge_stuff: Annotated[bool, schema.FREE] = True
  # The number of an object is a byte.
  max_objects: Annotated[int, schema.Range(ge=1, le=255)] = 100
  # Weight of the class in the matching and in the loss. None: as published, 1 for DETR and
  # 2 for EoMT.
  class_weight: schema.Positive | None = None


Scales = Annotated[
  tuple[Annotated[float, schema.Range(gt=0, le=16)], ...],
  schema.Fits(
    'a tuple of one or more different numbers above 0, at most 16',
    lambda x: 0 < len(x) == len(set(x)),
  ),
]


@dataclasses.dataclass
class SegmentSemantic(Masks):
  """Options of semantic segmentation."""

  BEST_METRIC = 'miou'

  # Numbers in masks of pixels that do not count, in addition to the classes that the data
  # ignore.
  ignore: tuple[schema.Natural, ...] = (255,)
  # File that names the classes as classes.json does, for data without names; '': none.
  classes: str = ''
  # Whether number 0 in masks does not count, and 1 is the first class, as in ADE20K.
  reduce_zero_label: bool = False
  # Layers of a Vision Transformer, numbered from 1, whose tokens the linear head reads side
  # by side, as in (9, 10, 11, 12); (): the last one.
  layers: schema.Counts = ()
  # Training: greatest share of the pixels of a random crop that are of one class; otherwise
  # the crop is drawn again, up to ten times. mmsegmentation uses 0.75.
  max_class_share: schema.Share = 1.0
  # Evaluation and prediction: images are grouped by their height and width, rounded up to a
  # multiple of this number, and the measures are compiled for each group.
  tight: Annotated[schema.Count, schema.FREE] = 64
  # Evaluation and prediction: images keep their height / width, their shorter side gets the
  # length of a window, and windows of this size slide over them; a number or (height,
  # width). None resizes whole images to `pp.crop`.
  window: Annotated[schema.Size | None, schema.MEASURED] = None
  # Distance of two windows; None places as few windows as possible, evenly.
  stride: Annotated[schema.Size | None, schema.MEASURED] = None
  # Evaluation and prediction: sizes of images, as factors of the usual one, rounded to whole
  # patches, and whether images are also mirrored left and right. The probabilities of
  # classes are averaged over all of them.
  scales: Annotated[Scales, schema.MEASURED] = (1.0,)
  flips: Annotated[bool, schema.MEASURED] = False
  # EoMT: weights of the loss of classes, and of queries without a class there.
  class_weight: schema.NonNegative = 2.0
  no_object_weight: schema.NonNegative = 0.1
  # Largest number of classes of an image, at most that of queries; of more, those with most
  # pixels are learned.
  max_classes: schema.Count = 64


# By the name of the task, config.task.
OPTIONS = {
  'classify': Classify,
  'detect': Detect,
  'image_text': ImageText,
  'masked_patches': MaskedPatches,
  'pixels': Pixels,
  'pixels_finetune': PixelsFinetune,
  'regress': Regress,
  'segment': Segment,
  'segment_semantic': SegmentSemantic,
}
