r"""Makes captioned, boxed, segmented or imbalanced images from Fashion-MNIST:

  python -m benchmarks.fashion captions /tmp/captions
  python -m benchmarks.fashion scenes /tmp/scenes
  python -m benchmarks.fashion segmentation_scenes /tmp/clothes
  python -m benchmarks.fashion imbalanced /tmp/imbalanced

`captions` writes the 70,000 images with English captions of their classes and the
labels, in a folder that configs/lit_digits.py reads; `scenes` composes 4,000 training
and 400 test scenes of one to five images, with boxes in COCO's format, in a folder that
configs/detr_scenes.py reads; `segmentation_scenes` writes the same scenes with masks of
ten kinds of clothes and three textures, in a folder that configs/segment_scenes.py reads;
`imbalanced` writes class folders with the first 6000 x .6^i training images of class i,
6,000 to 60, and all test images. TFDS downloads Fashion-MNIST; without a network:
`python -m benchmarks.mnist --help`.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import sys
from typing import Any

import numpy as np
from PIL import Image

from vit_jax import console
from vit_jax.commands import flags
from vit_jax.distributed import files

# Words of training captions for the ten classes, in the order of their labels.
NAMES = (
  ('T-shirt', 'top', 'tee with short sleeves'),
  ('trousers', 'pants', 'pair of pants'),
  ('pullover', 'sweater', 'knitted pullover'),
  ('dress', 'gown', 'long dress'),
  ('coat', 'jacket', 'warm coat'),
  ('sandal', 'flip-flop', 'open shoe'),
  ('shirt', 'blouse', 'shirt with buttons'),
  ('sneaker', 'trainer', 'running shoe'),
  ('bag', 'handbag', 'bag with a handle'),
  ('ankle boot', 'boot', 'high shoe'),
)
TEMPLATES = (
  'a photo of a {}', 'this is a {}', 'a {} in a shop', 'somebody bought a {}',
  'a {} to wear', 'a {} in grey', '{}',
)  # fmt: skip
# Not in the training captions.
TEST_TEMPLATE = 'a grey photo of this {}'
TEST_NAMES = (
  'top with short sleeves', 'pair of trousers', 'knitted sweater', 'long gown',
  'warm jacket', 'open sandal', 'blouse with buttons', 'running trainer',
  'handbag with a handle', 'high boot',
)  # fmt: skip


def captions(label: int) -> list[str]:
  """Returns the training captions of a class."""
  texts = []
  for name in NAMES[label]:
    for template in TEMPLATES:
      texts.append(template.replace('{}', name))
  return texts


def _write_captions(
  folder: pathlib.Path, split: str, images: np.ndarray, labels: np.ndarray
) -> None:
  classes = [name for name, *_ in NAMES]
  (folder / 'classes.json').write_text(json.dumps(classes))
  (folder / split).mkdir()
  lines = []
  for i, (image, label) in enumerate(zip(images, labels.tolist())):
    name = f'{split}/{i:05d}.png'
    Image.fromarray(image[..., 0]).save(folder / name)
    texts = captions(label)
    if split == 'test':
      texts = [TEST_TEMPLATE.replace('{}', classes[label])]
    line = {'image': name, 'label': classes[label], 'texts': texts}
    lines.append(json.dumps(line) + '\n')
  (folder / f'{split}.jsonl').write_text(''.join(lines))


def _objects(scene: Any) -> Iterator[tuple[int, list[int]]]:
  """Yields the label and the box (x, y, width, height) of the objects of a scene."""
  for k, label in enumerate(scene.labels):
    places = np.argwhere(scene.segments == k + 2)
    top, left = places.min(axis=0).tolist()
    height, width = (np.ptp(places, axis=0) + 1).tolist()
    yield label, [left, top, width, height]


def _scenes(
  split: str, images: np.ndarray, labels: np.ndarray
) -> Iterator[tuple[int, Any]]:
  """Yields the number of each scene of a split, and the scene."""
  from vit_jax.data.tfds import scenes

  # Dark clothes, whose outlines do not show, are left out.
  bright = (images > 127).mean(axis=(1, 2, 3)) > 0.1
  images = images[bright, ..., 0] * (16 / 255)
  labels = labels[bright]
  first = {'train': 0, 'test': scenes.SCENES['train']}[split]
  for i in range(first, first + scenes.SCENES[split]):
    yield i, scenes.compose(np.random.RandomState(i), images, labels)


def _write_scenes(
  folder: pathlib.Path, split: str, images: np.ndarray, labels: np.ndarray
) -> None:
  (folder / split).mkdir()
  content = {
    'images': [],
    'annotations': [],
    'categories': [{'id': k, 'name': x[0]} for k, x in enumerate(NAMES)],
  }
  for i, scene in _scenes(split, images, labels):
    name = f'{i:06d}.jpg'
    Image.fromarray(scene.pixels).save(folder / split / name, quality=95)
    height, width = scene.segments.shape
    content['images'].append(
      {'id': i, 'file_name': name, 'width': width, 'height': height}
    )
    for label, box in _objects(scene):
      content['annotations'].append(
        {
          'id': len(content['annotations']),
          'image_id': i,
          'category_id': label,
          'bbox': box,
          'area': box[2] * box[3],
          'iscrowd': 0,
        }
      )
  place = folder / 'annotations' / f'instances_{split}.json'
  place.parent.mkdir(exist_ok=True)
  place.write_text(json.dumps(content))


def _write_segmentation_scenes(
  folder: pathlib.Path, split: str, images: np.ndarray, labels: np.ndarray
) -> None:
  from vit_jax.data.tfds import scenes

  classes = [name for name, *_ in NAMES] + list(scenes.TEXTURES)
  (folder / 'classes.json').write_text(json.dumps(classes))
  for name in ('images', 'masks'):
    (folder / split / name).mkdir(parents=True)
  for i, scene in _scenes(split, images, labels):
    photo = Image.fromarray(scene.pixels)
    photo.save(folder / split / 'images' / f'{i:06d}.jpg', quality=95)
    mask = Image.fromarray(scenes.class_map(scene))
    mask.save(folder / split / 'masks' / f'{i:06d}.png')


def _write_imbalanced(
  folder: pathlib.Path, split: str, images: np.ndarray, labels: np.ndarray
) -> None:
  for i, (name, *_) in enumerate(NAMES):
    class_folder = folder / split / name
    class_folder.mkdir(parents=True)
    numbers = np.flatnonzero(labels == i)
    if split == 'train':
      numbers = numbers[: int(len(numbers) * 0.6**i)]
    for number in numbers:
      path = class_folder / f'{number:05d}.png'
      Image.fromarray(images[number, ..., 0]).save(path)


def write(kind: str, folder: str, data_dir: str | None = None) -> None:
  """Writes images of a kind, a key of _WRITERS, into a new folder.

  `data_dir` is TFDS's folder; None: ~/tensorflow_datasets. Raises FileExistsError if
  `folder` exists.
  """
  console.load_tensorflow()
  import tensorflow_datasets as tfds

  if pathlib.Path(folder).exists():
    raise FileExistsError(f"'{folder}' exists: choose a new FOLDER, or remove it")
  data = tfds.as_numpy(tfds.load('fashion_mnist', data_dir=data_dir, batch_size=-1))
  function = _WRITERS[kind]
  with files.new_folder(folder) as new:
    for split in ('train', 'test'):
      function(pathlib.Path(new), split, data[split]['image'], data[split]['label'])


_WRITERS = {
  'captions': _write_captions,
  'scenes': _write_scenes,
  'segmentation_scenes': _write_segmentation_scenes,
  'imbalanced': _write_imbalanced,
}


def main(argv: Sequence[str] | None = None) -> None:
  """Writes the images of a kind into a new folder."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.fashion'
  parser.add_argument('what', choices=[*_WRITERS], help='what to make')
  parser.add_argument('folder', metavar='FOLDER', help='new folder')
  parser.add_argument('--data_dir', help="TFDS's folder (~/tensorflow_datasets)")
  args = parser.parse_args(argv)
  write(args.what, args.folder, args.data_dir)
  console.log(f'Wrote {args.what} to {args.folder}.')


if __name__ == '__main__':
  try:
    main()
  except (ValueError, ImportError, OSError) as e:
    sys.exit(f'Error: {e}')
