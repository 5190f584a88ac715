"""Scenes of handwritten digits as a TFDS data set for detectors: no download.

Each scene has one to five of scikit-learn's digits, of various sizes and
colours, partly hidden by each other, on a ground of two textures. Training scenes
use the training images of `digits`, and test scenes its test images. The features
are the same as in TFDS's `coco`:

scenes            `objects`: a box and a class for each digit
scenes/panoptic   `panoptic_image` and `panoptic_objects`: the segment of each
                  digit, and of each texture of the ground

A box bounds the visible pixels of a digit. When digits are placed, at most a
quarter of the smaller of two boxes lies within the other one. The area of an
object is the area of its box in `scenes`, and of its segment in `scenes/panoptic`.
"""

from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image
import tensorflow_datasets as tfds

from vit_jax.data.coco import panoptic
from vit_jax.data.tfds import digits

# Split -> number of scenes.
SCENES = {'train': 4_000, 'test': 400}
SIZE = 128  # Pixels of a side.
TEXTURES = ('stripes', 'checks', 'dots')
_SIZES = (24, 120)  # Least and greatest height of a digit in pixels.
_MOST = 5  # Digits of a scene.
_OVERLAP = 1 / 4  # Greatest share of a box that another one covers.
_TRIALS = 20  # Digits tried for a scene.


class Scene(NamedTuple):
  """A scene of digits on a ground of two textures."""

  pixels: np.ndarray  # uint8 [SIZE, SIZE, 3].
  # int32 [SIZE, SIZE]: 0 and 1 for the textures of the ground, then a number
  # for each digit, from 2.
  segments: np.ndarray
  textures: tuple[int, int]  # Numbers of the textures of segments 0 and 1.
  labels: list[int]  # Classes of the digits, from segment 2 on.


def _texture(rng, kind: int) -> np.ndarray:
  """Draws a texture of one colour, float [SIZE, SIZE, 3] from 0 to 255."""
  y, x = np.mgrid[:SIZE, :SIZE]
  period, angle = rng.uniform(6, 16), rng.uniform(0, np.pi)
  along = (x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period
  across = (y * np.cos(angle) - x * np.sin(angle)) * 2 * np.pi / period
  wave = {
    'stripes': np.sin(along),
    'checks': np.sign(np.sin(along) * np.sin(across)),
    'dots': 2.0 * (np.sin(along) * np.sin(across) > 0.7) - 1,
  }[TEXTURES[kind]]
  colour = rng.uniform(40, 130, 3)
  noise = rng.normal(0, 6, (SIZE, SIZE, 1))
  return colour + rng.uniform(10, 30) * wave[..., None] + noise


def _ground(rng):
  """Returns pixels, segments and textures of the ground."""
  kinds = tuple(int(k) for k in rng.choice(len(TEXTURES), 2, replace=False))
  y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2
  angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(-SIZE / 4, SIZE / 4)
  segments = (x * np.cos(angle) + y * np.sin(angle) > shift).astype(np.int32)
  both = np.stack([_texture(rng, kind) for kind in kinds])
  pixels = np.where(segments[..., None], both[1], both[0])
  return pixels, segments, kinds


def _stamp(rng, image):
  """Returns the ink of an enlarged digit, float [h, w], and its top left corner."""
  height = round(rng.uniform(*_SIZES))
  width = min(_SIZES[1], round(height * rng.uniform(0.7, 1.1)))
  ink = Image.fromarray((image * (255 / 16)).astype(np.uint8))
  ink = np.asarray(ink.resize((width, height), Image.BICUBIC), np.float64) / 255
  top = rng.randint(0, SIZE - height + 1)
  left = rng.randint(0, SIZE - width + 1)
  return ink, top, left


def _crowded(box, others) -> bool:
  """Returns whether a box (top, left, bottom, right) overlaps others too much."""
  for other in others:
    low, high = np.maximum(box[:2], other[:2]), np.minimum(box[2:], other[2:])
    shared = np.prod(np.maximum(high - low, 0))
    least = min(np.prod(x[2:] - x[:2]) for x in (box, other))
    if shared > _OVERLAP * least:
      return True
  return False


def compose(rng: np.random.RandomState, images, labels) -> Scene:
  """Composes a scene of digits [n, 8, 8], from 0 to 16, and their classes [n]."""
  pixels, segments, textures = _ground(rng)
  found, boxes = [], []
  wanted = rng.randint(1, _MOST + 1)
  for _ in range(_TRIALS):
    if len(found) == wanted:
      break
    chosen = rng.randint(len(images))
    ink, top, left = _stamp(rng, images[chosen])
    covers = np.add(np.argwhere(ink > 0.4), (top, left))
    box = np.concatenate([covers.min(axis=0), covers.max(axis=0) + 1])
    if _crowded(box, boxes):
      continue
    boxes.append(box)
    segments[tuple(covers.T)] = len(found) + 2
    here = slice(top, top + len(ink)), slice(left, left + ink.shape[1])
    colour = rng.uniform(170, 255, 3)
    pixels[here] += ink[..., None] * (colour - pixels[here])
    found.append(int(labels[chosen]))
  pixels = pixels.round().clip(0, 255).astype(np.uint8)
  return Scene(pixels, segments, textures, found)


def _box(mask) -> tfds.features.BBox:
  """Returns the box around the true pixels of a mask [SIZE, SIZE]."""
  places = np.argwhere(mask)
  return tfds.features.BBox(
    *(places.min(axis=0) / SIZE), *((places.max(axis=0) + 1) / SIZE)
  )


def _number(scene, segment):
  """Returns a unique number of a segment; 0 is for none."""
  return 10 * scene + segment + 1


class Scenes(tfds.core.GeneratorBasedBuilder):
  """Scenes of digits, images uint8 [128, 128, 3], with boxes or segments."""

  VERSION = tfds.core.Version('1.1.0')
  # TFDS uses the first one for the plain name 'scenes'.
  BUILDER_CONFIGS: ClassVar = [
    tfds.core.BuilderConfig(name=name) for name in ('boxes', 'panoptic')
  ]

  @property
  def _is_panoptic(self):
    return self.builder_config.name == 'panoptic'

  def _info(self) -> tfds.core.DatasetInfo:
    names = [str(i) for i in range(10)] + list(TEXTURES) * self._is_panoptic
    annotation = tfds.features.Sequence(
      {
        'id': np.int64,
        'area': np.int64,
        'bbox': tfds.features.BBoxFeature(),
        'label': tfds.features.ClassLabel(names=names),
        'is_crowd': np.bool_,
      }
    )
    features = {
      'image': tfds.features.Image(shape=(SIZE, SIZE, 3), encoding_format='jpeg'),
      'image/filename': tfds.features.Text(),
      'image/id': np.int64,
    }
    if self._is_panoptic:
      features['panoptic_image'] = tfds.features.Image(shape=(SIZE, SIZE, 3))
      features['panoptic_image/filename'] = tfds.features.Text()
      features['panoptic_objects'] = annotation
    else:
      features['objects'] = annotation
    return self.dataset_info_from_configs(
      description=__doc__,
      homepage='https://archive.ics.uci.edu/dataset/80',
      features=tfds.features.FeaturesDict(features),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # Nothing to download.
    return {name: self._generate_examples(name) for name in SCENES}

  def _generate_examples(self, split):
    data = digits.load()
    chosen = digits.split_indices()[split]
    first = {'train': 0, 'test': SCENES['train']}[split]
    images, labels = data.images[chosen], data.target[chosen]
    for i in range(first, first + SCENES[split]):
      # A seed for each scene: scenes can be made one by one.
      yield i, self._example(compose(np.random.RandomState(i), images, labels), i)

  def _example(self, scene, i):
    def annotation(segment, label):
      mask = scene.segments == segment
      rows, columns = (np.ptp(np.nonzero(mask), axis=1) + 1).tolist()
      return {
        'id': _number(i, segment),
        'area': int(mask.sum()) if self._is_panoptic else rows * columns,
        'bbox': _box(mask),
        'label': label,
        'is_crowd': False,
      }

    name = f'{i:06d}'
    example = {'image': scene.pixels, 'image/filename': f'{name}.jpg', 'image/id': i}
    objects = [annotation(k + 2, label) for k, label in enumerate(scene.labels)]
    if not self._is_panoptic:
      return {**example, 'objects': objects}
    ground = [
      annotation(k, 10 + scene.textures[k]) for k in (0, 1) if k in scene.segments
    ]
    return {
      **example,
      'panoptic_image': panoptic.colours(_number(i, scene.segments)),
      'panoptic_image/filename': f'{name}.png',
      'panoptic_objects': ground + objects,
    }
