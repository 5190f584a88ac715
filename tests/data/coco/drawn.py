"""Small folders of images with annotations in COCO's format, for tests."""

import json

import numpy as np
from PIL import Image

CATEGORIES = [
  {'id': 7, 'name': 'dog', 'supercategory': 'animal'},
  {'id': 3, 'name': 'cat', 'supercategory': 'animal'},
  {'id': 90, 'name': 'cup', 'supercategory': 'thing'},
]
WIDTH, HEIGHT = 60, 40


def image(i, **changes):
  """The entry of image i."""
  entry = {'id': 100 + i, 'width': WIDTH, 'height': HEIGHT}
  return {**entry, 'file_name': f'{i}.{"png" if i % 2 else "jpg"}', **changes}


def thing(i, of, bbox=(10, 4, 30, 20), category=3, **changes):
  """The entry of annotation i."""
  entry = {'id': i, 'image_id': 100 + of, 'category_id': category}
  return {**entry, 'bbox': list(bbox), **changes}


def content(images=3, things=(), categories=CATEGORIES):
  """The content of an annotation file with this number of images."""
  return {
    'images': [image(i) for i in range(images)],
    'annotations': list(things),
    'categories': list(categories),
  }


def write(path, found):
  """Writes an annotation file; returns its path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(found if isinstance(found, str) else json.dumps(found))
  return str(path)


def draw(folder, found, grey=()):
  """Draws the images of an annotation file; those in `grey` have one channel."""
  folder.mkdir(parents=True, exist_ok=True)
  rng = np.random.RandomState(0)
  for entry in found['images']:
    shape = entry['height'], entry['width'], 3
    pixels = rng.randint(0, 256, shape).astype(np.uint8)
    mode = 'L' if entry['id'] - 100 in grey else 'RGB'
    Image.fromarray(pixels).convert(mode).save(folder / entry['file_name'])


def make(root, images=3, things=(), splits=('train', 'val'), turned=(), **kwargs):
  """Writes a folder with COCO's layout and the same images in every split.

  Images whose numbers are in `turned` are in portrait format.
  """
  found = content(images, things)
  for i in turned:
    found['images'][i].update(width=HEIGHT, height=WIDTH)
  for split in splits:
    write(root / 'annotations' / f'instances_{split}2017.json', found)
    draw(root / f'{split}2017', found, **kwargs)
  return root
