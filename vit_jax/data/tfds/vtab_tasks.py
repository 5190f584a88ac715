"""The 19 tasks of VTAB-1k (arXiv 1910.04867), as a table, and their labels."""

from collections.abc import Callable, Sequence
import difflib
import itertools
import math
from typing import NamedTuple

from vit_jax.data import registry
from vit_jax.data.lazy import tf

GROUPS = ('natural', 'specialised', 'structured')


class Label(NamedTuple):
  """The label of a task."""

  reads: tuple[str, ...] = ('label',)  # Features that it is computed from.
  class_names: tuple[str, ...] | None = None  # None: the feature's.
  # Function from these features of an example to the number of its class.
  compute: Callable = lambda label: label


class Task(NamedTuple):
  """A task of VTAB."""

  title: str  # Name in the tables of papers.
  group: str  # One of GROUPS.
  dataset: str  # Name of the TFDS data set.
  # Splits that begin with `train800` and with `val200`, and the test split.
  splits: tuple[str, str, str]
  label: Label = Label()
  pixel_scale: int = 1  # Factor on the values of the pixels.
  module: str = ''  # Python module that TFDS needs to prepare the data set.


def _ranges(edges: Sequence[float], unit: str) -> tuple[str, ...]:
  """Names the ranges between ascending numbers, and below and above them."""
  inner = [f'{a:g} to {b:g}{unit}' for a, b in itertools.pairwise(edges)]
  return (f'up to {edges[0]:g}{unit}', *inner, f'over {edges[-1]:g}{unit}')


def _range_of(value: 'tf.Tensor', edges: Sequence[float]) -> 'tf.Tensor':
  """Returns the number of a value's range: how many edges are below it."""
  return tf.reduce_sum(tf.cast(tf.constant(edges) < value, tf.int64))


def _binned(feature: str, num_classes: int, largest: float, unit: str) -> Label:
  """Returns a label whose 16 classes are ranges of the classes of a feature.

  Args:
    feature: a class label.
    num_classes: its number of classes, for values from 0 to `largest`.
    largest: the value of the last class.
    unit: unit of the values, for the names of the ranges.
  """
  starts = [math.ceil(i * num_classes / 16) for i in range(17)]
  values = [largest * i / (num_classes - 1) for i in range(num_classes)]
  names = []
  for start, end in itertools.pairwise(starts):
    names.append(f'{values[start]:.3g} to {values[end - 1]:.3g}{unit}')
  return Label((feature,), tuple(names), lambda label: label * 16 // num_classes)


_DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)
_METRES = (8.0, 20.0, 999.0)
# From 3 to 10 objects, whose sizes are [n].
_CLEVR_COUNT = Label(
  ('objects/size',),
  tuple(f'{n} objects' for n in range(3, 11)),
  lambda sizes: tf.size(sizes) - 3,
)
# The depth of the nearest object, of coordinates [n, 3].
_CLEVR_DISTANCE = Label(
  ('objects/pixel_coords',),
  _ranges(_DEPTHS, ''),
  lambda coordinates: _range_of(tf.reduce_min(coordinates[:, 2]), _DEPTHS),
)


def _kitti_distance(types: 'tf.Tensor', locations: 'tf.Tensor') -> 'tf.Tensor':
  """Returns the range of the nearest vehicle's depth, of types [n], locations [n, 3]."""
  # The first three types of objects are Car, Van and Truck.
  depths = tf.where(types < 3, locations[:, 2], math.inf)
  return _range_of(tf.reduce_min(depths), _METRES)


_KITTI_DISTANCE = Label(
  ('objects/type', 'objects/location'),
  (*_ranges(_METRES[:2], ' m'), 'no vehicle'),
  _kitti_distance,
)
_TENTH = ('train', 'train[90%:]', 'test')
_FIFTH = ('train', 'train[80%:]', 'test')  # Published only for Pets.
_OFFICIAL = ('train', 'validation', 'test')
_FIFTHS = ('train', 'train[60%:80%]', 'train[80%:]')
_CLEVR = ('train', 'train[90%:]', 'validation')
_DSPRITES = ('train', 'train[80%:90%]', 'train[90%:]')
_SMALLNORB = ('train', 'test[:50%]', 'test[50%:]')
_GRADES = ('none', 'mild', 'moderate', 'severe', 'proliferative')

TASKS: dict[str, Task] = {
  'caltech101': Task('Caltech101', 'natural', 'caltech101', _TENTH),
  'cifar100': Task('CIFAR-100', 'natural', 'cifar100', _TENTH),
  'dtd': Task('DTD', 'natural', 'dtd', _OFFICIAL),
  'oxford_flowers102': Task('Flowers102', 'natural', 'oxford_flowers102', _OFFICIAL),
  'oxford_iiit_pet': Task('Pets', 'natural', 'oxford_iiit_pet', _FIFTH),
  'sun397': Task('Sun397', 'natural', 'sun397/tfds', _OFFICIAL, module='cv2'),
  'svhn': Task('SVHN', 'natural', 'svhn_cropped', _TENTH),
  'patch_camelyon': Task(
    'Camelyon', 'specialised', 'patch_camelyon', _OFFICIAL,
    Label(class_names=('no tumour', 'tumour')),
  ),
  'eurosat': Task('EuroSAT', 'specialised', 'eurosat/rgb', _FIFTHS),
  'resisc45': Task('Resisc45', 'specialised', 'resisc45', _FIFTHS),
  'diabetic_retinopathy': Task(
    'Retinopathy', 'specialised', 'diabetic_retinopathy_detection/btgraham-300',
    _OFFICIAL, Label(class_names=_GRADES), module='cv2',
  ),
  'clevr_count': Task('Clevr-Count', 'structured', 'clevr', _CLEVR, _CLEVR_COUNT),
  'clevr_distance': Task('Clevr-Dist', 'structured', 'clevr', _CLEVR, _CLEVR_DISTANCE),
  'dmlab': Task('DMLab', 'structured', 'dmlab', _OFFICIAL),
  'dsprites_x_position': Task(
    'dSpr-Loc', 'structured', 'dsprites', _DSPRITES,
    _binned('label_x_position', 32, 1, ' of the width'), 255,
  ),
  'dsprites_orientation': Task(
    'dSpr-Ori', 'structured', 'dsprites', _DSPRITES,
    _binned('label_orientation', 40, 360, ' degrees'), 255,
  ),
  'kitti_distance': Task(
    'KITTI-Dist', 'structured', 'kitti', _OFFICIAL, _KITTI_DISTANCE, module='cv2'
  ),
  'smallnorb_azimuth': Task(
    'sNORB-Azim', 'structured', 'smallnorb', _SMALLNORB,
    Label(('label_azimuth',), tuple(f'{20 * i} degrees' for i in range(18))),
  ),
  'smallnorb_elevation': Task(
    'sNORB-Elev', 'structured', 'smallnorb', _SMALLNORB,
    Label(('label_elevation',), tuple(f'{30 + 5 * i} degrees' for i in range(9))),
  ),
}  # fmt: skip


def find_task(dataset: str, key: str = 'dataset') -> Task:
  """Returns the task of a name with or without 'vtab/'; raises ValueError.

  `key` is the key of the config that has the name, for the message.
  """
  name = dataset.removeprefix(registry.VTAB)
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"did you mean '{registry.VTAB}{near[0]}'? " if near else ''
    raise ValueError(
      f"{key}='{dataset}' is not a task of VTAB: {hint}the tasks are "
      f'{", ".join(TASKS)} (config.{key})'
    )
  return TASKS[name]
