"""Tests of captions in COCO's format as image-text pairs."""

import json

import numpy as np
from PIL import Image
import pytest

from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.tasks.image_text import captions, image_text

TEXTS = {3: ['A cat.', ' A small cat on a mat. '], 8: ['A dog.'], 9: []}


@pytest.fixture
def root(tmp_path):
  (tmp_path / 'annotations').mkdir()
  (tmp_path / 'train2017').mkdir()
  for number in TEXTS:
    pixels = np.full((6, 7, 3), number, np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'train2017' / f'{number}.png')
  write(tmp_path, [(i, text) for i, texts in TEXTS.items() for text in texts])
  return tmp_path


def write(root, annotations):
  content = {
    'images': [{'id': i, 'file_name': f'{i}.png', 'width': 7} for i in TEXTS],
    'annotations': [
      {'image_id': i, 'id': n, 'caption': text}
      for n, (i, text) in enumerate(annotations)
    ],
  }
  path = root / 'annotations' / 'captions_train2017.json'
  path.write_text(json.dumps(content))


def open_split(root, features=image_text.Task.FEATURES):
  config = common.set_dataset(common.get_config(), str(root))
  return sources.open_split(config, 'train', features)


def test_each_image_has_its_captions(root, capsys):
  source = open_split(root)
  assert source.num_examples == 2
  assert captions.feature(source) == 'captions'
  found = {}
  for i in range(2):
    record = source.read(source.record(i))
    name = source.name(i).rsplit('/')[-1]
    found[name] = [text.decode() for text in captions.from_record(record).numpy()]
  assert found == {
    '3.png': ['A cat.', 'A small cat on a mat.'],
    '8.png': ['A dog.'],
  }
  assert '1 image of' in capsys.readouterr().out


def test_invalid_files(root):
  write(root, [(3, 'A cat.'), (4, 'A bird.')])
  with pytest.raises(ValueError, match="image_id 4 .*'A bird.'"):
    open_split(root)
  write(root, [])
  with pytest.raises(ValueError, match='has no captions'):
    open_split(root)
  path = root / 'annotations' / 'captions_train2017.json'
  path.write_text('{"images": 3}')
  with pytest.raises(ValueError, match='captions_train2017.json.*images'):
    open_split(root)
