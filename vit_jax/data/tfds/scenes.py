"""Scenes of handwritten digits as a TFDS data set for detectors: no download.

Each scene has one to five of scikit-learn's digits, of various sizes and
colours, partly hidden by each other, on a ground of two textures. Training scenes
use the training images of `digits`, and test scenes its test images. The features
are the same as in TFDS's `coco`:

scenes            `objects`: a box and a class for each digit
scenes/panoptic   `panoptic_image` and `panoptic_objects`: the segment of each
                  digit, and of each texture of the ground
scenes/semantic   `segmentation_mask`: the class of each pixel

A box bounds the visible pixels of a digit. When digits are placed, at most a
quarter of the smaller of two boxes lies within the other one. The area of an
object is the area of its box in `scenes`, and of its segment in `scenes/panoptic`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

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
_MOST = 5  # Largest number of digits in a scene.
_OVERLAP = 1 / 4  # Greatest share of a box that another one covers.
_TRIALS = 20  # Number of digits tried for a scene.


class Scene(NamedTuple):
  """A scene of digits on a ground of two textures."""

  pixels: np.ndarray  # uint8 [SIZE, SIZE, 3].
  # int32 [SIZE, SIZE]: 0 and 1 for the textures of the ground, then a number
  # for each digit, from 2.
  segments: np.ndarray
  textures: tuple[int, ...]  # Numbers of the textures of segments 0 and 1.
  labels: list[int]  # Classes of the digits, from segment 2 on.


def _texture(rng: np.random.RandomState, kind: int) -> np.ndarray:
  """Draws a texture of one colour, float [SIZE, SIZE, 3] from 0 to 255."""
  y, x = np.mgrid[:SIZE, :SIZE]
  period = rng.uniform(6, 16)
  angle = rng.uniform(0, np.pi)
  cos, sin = np.cos(angle), np.sin(angle)
  along = np.sin((x * cos + y * sin) * 2 * np.pi / period)
  across = np.sin((y * cos - x * sin) * 2 * np.pi / period)
  wave = {
    'stripes': along,
    'checks': np.sign(along * across),
    'dots': 2.0 * (along * across > 0.7) - 1,
  }[TEXTURES[kind]]
  colour = rng.uniform(40, 130, 3)
  noise = rng.normal(0, 6, (SIZE, SIZE, 1))
  return colour + rng.uniform(10, 30) * wave[..., None] + noise


def _ground(
  rng: np.random.RandomState,
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
  """Returns pixels, segments and textures of the ground."""
  kinds = tuple(int(k) for k in rng.choice(len(TEXTURES), 2, replace=False))
  y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2
  angle = rng.uniform(0, 2 * np.pi)
  shift = rng.uniform(-SIZE / 4, SIZE / 4)
  segments = (x * np.cos(angle) + y * np.sin(angle) > shift).astype(np.int32)
  first, second = [_texture(rng, kind) for kind in kinds]
  pixels = np.where(segments[..., None], second, first)
  return pixels, segments, kinds


def _stamp(
  rng: np.random.RandomState, image: np.ndarray
) -> tuple[np.ndarray, int, int]:
  """Returns the ink of an enlarged digit, float [h, w], and its top left corner."""
  height = round(rng.uniform(*_SIZES))
  width = min(_SIZES[1], round(height * rng.uniform(0.7, 1.1)))
  ink = Image.fromarray((image * (255 / 16)).astype(np.uint8))
  ink = np.asarray(ink.resize((width, height), Image.BICUBIC), np.float64) / 255
  top = rng.randint(0, SIZE - height + 1)
  left = rng.randint(0, SIZE - width + 1)
  return ink, top, left


def _is_crowded(box: np.ndarray, boxes: Sequence[np.ndarray]) -> bool:
  """Returns whether a box (top, left, bottom, right) overlaps others too much."""
  for earlier in boxes:
    low = np.maximum(box[:2], earlier[:2])
    high = np.minimum(box[2:], earlier[2:])
    intersection = np.prod(np.maximum(high - low, 0))
    smaller_area = min(np.prod(x[2:] - x[:2]) for x in (box, earlier))
    if intersection > _OVERLAP * smaller_area:
      return True
  return False


def compose(
  rng: np.random.RandomState, images: np.ndarray, labels: np.ndarray
) -> Scene:
  """Composes a scene of digits [n, 8, 8], from 0 to 16, and their classes [n]."""
  pixels, segments, textures = _ground(rng)
  scene_labels: list[int] = []
  boxes: list[np.ndarray] = []
  num_digits = rng.randint(1, _MOST + 1)
  for _ in range(_TRIALS):
    if len(boxes) == num_digits:
      break
    number = rng.randint(len(images))
    ink, top, left = _stamp(rng, images[number])
    covered = np.add(np.argwhere(ink > 0.4), (top, left))
    box = np.concatenate([covered.min(axis=0), covered.max(axis=0) + 1])
    if _is_crowded(box, boxes):
      continue
    segments[tuple(covered.T)] = len(boxes) + 2
    region = slice(top, top + len(ink)), slice(left, left + ink.shape[1])
    colour = rng.uniform(170, 255, 3)
    pixels[region] += ink[..., None] * (colour - pixels[region])
    boxes.append(box)
    scene_labels.append(int(labels[number]))
  pixels = pixels.round().clip(0, 255).astype(np.uint8)
  return Scene(pixels, segments, textures, scene_labels)


def class_map(scene: Scene) -> np.ndarray:
  """Returns the class of each pixel, uint8 [SIZE, SIZE]: textures are from 10."""
  textures = [10 + kind for kind in scene.textures]
  classes = [*textures, *scene.labels]
  return np.array(classes, np.uint8)[scene.segments]


def _box(mask: np.ndarray) -> tfds.features.BBox:
  """Returns the box around the true pixels of a mask [SIZE, SIZE]."""
  positions = np.argwhere(mask)
  ymin, xmin = positions.min(axis=0) / SIZE
  ymax, xmax = (positions.max(axis=0) + 1) / SIZE
  return tfds.features.BBox(ymin, xmin, ymax, xmax)


def _number(scene: int, segment: Any) -> Any:
  """Returns a unique number of a segment; 0 is for none."""
  return 10 * scene + segment + 1


class Scenes(tfds.core.GeneratorBasedBuilder):
  """Scenes of digits, images uint8 [128, 128, 3], with boxes, segments or masks."""

  VERSION = tfds.core.Version('1.1.0')
  # TFDS uses the first one for the plain name 'scenes'.
  BUILDER_CONFIGS: ClassVar = [
    tfds.core.BuilderConfig(name=name) for name in ('boxes', 'panoptic', 'semantic')
  ]

  @property
  def _is_panoptic(self) -> bool:
    return self.builder_config.name == 'panoptic'

  @property
  def _is_semantic(self) -> bool:
    return self.builder_config.name == 'semantic'

  def _info(self) -> tfds.core.DatasetInfo:
    names = [str(i) for i in range(10)]
    if self._is_panoptic or self._is_semantic:
      names += TEXTURES
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
    elif self._is_semantic:
      features['segmentation_mask'] = tfds.features.LabeledImage(
        labels=names, shape=(SIZE, SIZE, 1)
      )
    else:
      features['objects'] = annotation
    return self.dataset_info_from_configs(
      description=__doc__,
      homepage='https://archive.ics.uci.edu/dataset/80',
      features=tfds.features.FeaturesDict(features),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing to download.
    return {name: self._generate_examples(name) for name in SCENES}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
    data = digits.load()
    indices = digits.split_indices()[split]
    first = {'train': 0, 'test': SCENES['train']}[split]
    images, labels = data.images[indices], data.target[indices]
    for i in range(first, first + SCENES[split]):
      # A seed for each scene: scenes can be made one by one.
      yield i, self._example(compose(np.random.RandomState(i), images, labels), i)

  def _example(self, scene: Scene, i: int) -> dict[str, Any]:
    def annotation(segment: int, label: int) -> dict[str, Any]:
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
    if self._is_semantic:
      return {**example, 'segmentation_mask': class_map(scene)[..., None]}
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
