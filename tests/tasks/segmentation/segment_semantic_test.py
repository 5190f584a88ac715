"""Tests of semantic segmentation, from a folder of images and masks to the report."""

import io
import json
import re
import shutil
import struct
import time
import zlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd
from PIL import Image
import pytest
from sklearn import metrics
import tensorflow as tf
import torch

from tests import conftest, processes, tiny_models
from vit_jax import predict, train
from vit_jax.commands import (
  convert as convert_command,
  evaluate as evaluate_command,
  predict as predict_command,
)
from vit_jax.data import masks, sources
from vit_jax.data.augmentation import geometry
from vit_jax.data.images import image_files
from vit_jax.evaluators import evaluation
from vit_jax.figures import visualize
from vit_jax.run import config as run_config
from vit_jax.tasks.segmentation import class_maps, linear, losses, scores

NAMES = ['sky', 'sea', 'sand']
COLORS = np.array([(250, 0, 0), (0, 250, 0), (0, 0, 250), (90, 90, 90)], np.uint8)
IDS = np.array([3, 7, 40, 255])  # Numbers of the classes in masks; 255 is ignored.
SIZES = ((24, 32), (40, 20), (33, 47))


def make_classes(rng, size):
  """Draws the class of each pixel in blocks; 3 stands for ignored pixels."""
  blocks = rng.integers(0, 4, (3, 3))
  rows, columns = (np.arange(n) * 3 // n for n in size)
  return blocks[rows][:, columns]


def write_data(root):
  """Writes images of several sizes, whose colours are those of the classes."""
  rng = np.random.default_rng(0)
  for split, count in (('train', 8), ('test', 5)):
    for name in ('images', 'masks'):
      (root / split / name).mkdir(parents=True)
    for i in range(count):
      classes = make_classes(rng, SIZES[i % len(SIZES)])
      Image.fromarray(COLORS[classes]).save(root / split / 'images' / f'{i}.png')
      mask = Image.fromarray(IDS[classes].astype(np.uint8))
      mask.save(root / split / 'masks' / f'{i}.png')
  write_classes(root)
  return root


def write_classes(root):
  classes = []
  for name, number, color in zip(NAMES, IDS.tolist(), COLORS.tolist()):
    classes.append({'name': name, 'id': number, 'color': color})
  (root / 'classes.json').write_text(json.dumps(classes))


def make_config(root, **options):
  config = conftest.make_tiny_config(None)
  config.update(task='segment_semantic', dataset=str(root), batch_eval=8)
  config.pp.update(crop=16, channels=3)
  config.model.transformer.num_layers = 2
  config.task_options = {'layers': (1, 2), **options}
  return run_config.complete(config)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return write_data(tmp_path_factory.mktemp('segmentation') / 'data')


@pytest.fixture(scope='module')
def workdir(data):
  """A finished run."""
  folder = data.parent / 'run'
  train.train_and_evaluate(make_config(data), str(folder))
  return folder


@pytest.fixture(scope='module')
def model(workdir):
  """The predictor of the run."""
  return predict.load(workdir)


def read_mask(path):
  """Reads the classes of a mask, -1 for ignored pixels."""
  numbers = np.asarray(Image.open(path))
  classes = np.full(numbers.shape, -1)
  for i, number in enumerate(IDS[:3]):
    classes[numbers == number] = i
  return classes


def enlarged(values, size):
  """Resizes scores [h, w, C] as PyTorch does."""
  tensor = torch.from_numpy(np.array(values)).permute(2, 0, 1)[None]
  tensor = torch.nn.functional.interpolate(tensor, size, mode='bilinear')
  return tensor[0].permute(1, 2, 0).numpy()


def test_measures_agree_with_scikit_learn_on_masks_of_any_size(model, workdir, data):
  paths = [str(data / 'test/images' / f'{i}.png') for i in range(5)]
  true, predicted = [], []
  for path, class_map, values in zip(paths, model.predict(paths), model.outputs(paths)):
    classes = read_mask(path.replace('images', 'masks'))
    assert class_map.shape == classes.shape
    expected = enlarged(enlarged(values, (16, 16)), classes.shape).argmax(axis=-1)
    assert np.mean(class_map != expected) < 0.01  # Ties.
    true.append(classes[classes >= 0])
    predicted.append(class_map[classes >= 0])
  true, predicted = np.concatenate(true), np.concatenate(predicted)
  values = [json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()]
  values = next(x for x in values if x['step'] == 6 and 'miou_test' in x)
  iou = metrics.jaccard_score(true, predicted, average='macro')
  assert values['miou_test'] == pytest.approx(iou)
  accuracy = metrics.accuracy_score(true, predicted)
  assert values['pixel_accuracy_test'] == pytest.approx(accuracy)
  balanced = metrics.balanced_accuracy_score(true, predicted)
  assert values['mean_accuracy_test'] == pytest.approx(balanced)


def test_the_confusion_matrix_is_that_of_scikit_learn():
  rng = np.random.default_rng(0)
  true, predicted = rng.integers(-1, 4, (3, 9, 7)), rng.integers(0, 4, (3, 9, 7))
  counts = jax.jit(class_maps.confusion, static_argnums=2)(true, predicted, 5)
  for i in range(3):
    mask = true[i] >= 0
    expected = metrics.confusion_matrix(
      true[i][mask], predicted[i][mask], labels=range(5)
    )
    np.testing.assert_array_equal(counts[i], expected)
  counts = np.sum(scores.pixel_counts(counts), axis=0)
  measures = scores.measure(counts, np.zeros((3, 5)))
  assert np.isnan(measures['iou'][4])  # The fifth class never occurs.
  mask = true >= 0
  expected = metrics.jaccard_score(true[mask], predicted[mask], average=None)
  np.testing.assert_allclose(measures['iou'][:4], expected)


def test_the_loss_of_a_head_is_that_of_pytorch():
  rng = np.random.default_rng(0)
  values = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
  classes = rng.integers(-1, 5, (2, 12, 8))
  weights = np.array([1, 2, 0.5, 1, 3], np.float32)
  total, weight = jax.jit(losses.cross_entropy)(values, classes, weights)
  logits = torch.stack([torch.from_numpy(enlarged(x, (12, 8))) for x in values])
  expected = torch.nn.functional.cross_entropy(
    logits.permute(0, 3, 1, 2),
    torch.from_numpy(classes),
    weight=torch.from_numpy(weights),
    ignore_index=-1,
  )
  assert total / weight == pytest.approx(expected.item(), rel=1e-5)


def torch_dice(logits, classes):
  """Computes mmsegmentation's Dice loss of PyTorch's logits [B, C, H, W] by image."""
  count = logits.shape[1]
  targets = torch.nn.functional.one_hot(classes.clamp(0), count).permute(0, 3, 1, 2)
  is_counted = (classes >= 0)[:, None]
  probabilities = logits.softmax(dim=1) * is_counted
  targets = targets * is_counted
  shared = 2 * (probabilities * targets).sum(dim=(2, 3)) + 1
  total = (probabilities**2 + targets**2).sum(dim=(2, 3)) + 1
  return (1 - shared / total).mean(dim=1)


def test_the_dice_loss_joins_the_cross_entropy(data):
  """Of the whole batch, whose images have unequal numbers of pixels with a class."""
  config = make_config(data, dice_weight=2.0, layers=())
  config.model.transformer.num_layers = 1
  with config.ignore_type():
    config.class_weights = ml_collections.ConfigDict({'sea': 3.0})
  cls = run_config.get_task(config.task)
  task = cls(config, cls.make_metadata(config, open_train(config)))
  rng = np.random.default_rng(0)
  classes = rng.integers(-1, 3, (4, 16, 16))
  classes[0, :10] = -1
  batch = {
    'image': rng.normal(size=(4, 16, 16, 3)).astype(np.float32),
    'segmentation': classes.astype(np.int32),
  }
  key = jax.random.key(0)

  shapes = jax.eval_shape(task.init, key)
  params, extra = (tiny_models.drawn(x) for x in shapes)

  @jax.jit
  def compute():
    augmented = task.augment(batch, key)
    sums, metrics = task.loss(params, extra, augmented, key, 0)
    variables = {'params': params, **extra}
    scores, _ = task.model.apply(
      variables, batch['image'], train=True, mutable=['batch_stats'], method='segment'
    )
    return sums, metrics['dice'], scores

  (total, weight), (dice, count), scores = compute()
  logits = torch.stack([torch.tensor(enlarged(x, (16, 16))) for x in scores])
  logits, classes = logits.permute(0, 3, 1, 2), torch.tensor(classes)
  expected = torch_dice(logits, classes).mean()
  assert dice / count == pytest.approx(expected.item(), rel=1e-5)
  cross_entropy = torch.nn.functional.cross_entropy(
    logits, classes, torch.tensor([1.0, 3.0, 1.0]), ignore_index=-1
  )
  expected = cross_entropy + 2 * expected
  assert total / weight == pytest.approx(expected.item(), rel=1e-5)


def test_the_norm_of_the_head_keeps_statistics_of_the_tokens(model):
  """They follow from two layers of tokens, each after the last norm, as in DINOv2."""
  task = model.task
  rng = jax.random.key(0)
  images = jax.random.normal(rng, (2, 16, 16, 3))
  batch = {'image': images, 'segmentation': jnp.zeros((2, 16, 16), jnp.int32)}

  @jax.jit
  def compute():
    params, extra = task.init(rng)
    (_, weight), sums = task.loss(params, extra, batch, rng, 0)
    means = {name: total / count for name, (total, count) in sums.items()}
    statistics = task.update_extra(extra, params, means)['batch_stats']['head_norm']
    _, sown = task.model.apply(
      {'params': params, **extra},
      images,
      train=False,
      method='segment',
      capture_intermediates=lambda module, _: module.name == 'encoder_norm',
    )
    return weight, statistics, sown

  weight, statistics, sown = compute()
  assert weight == 2 * 16 * 16
  layers = sown['intermediates']['Transformer']['encoder_norm']['__call__']
  tokens = np.concatenate([x[:, 1:] for x in layers], axis=-1)  # Without class token.
  assert tokens.shape == (2, 16, 32)
  tokens = tokens.reshape(-1, 32)
  np.testing.assert_allclose(statistics['mean'], 0.1 * tokens.mean(axis=0), atol=1e-6)
  np.testing.assert_allclose(
    statistics['var'], 0.9 + 0.1 * tokens.var(axis=0), atol=1e-5
  )


def open_train(config):
  return sources.open_split(config, 'train', ('image', masks.FEATURE))


def test_masks_follow_their_images(data):
  config = make_config(data, max_class_share=0.5)
  config.pp.update(crop=64, flip=True, rotate=30.0, color_jitter=0.1)
  config.pp.crop_area = (0.3, 1.0)
  source = open_train(config)
  cls = run_config.get_task(config.task)
  task = cls(config, cls.make_metadata(config, source))
  shares = []
  for number in range(8):
    record = source.read(source.record(number))
    example = task.example(record, tf.constant([1, number], tf.int64))
    colors = np.round((example['image'].numpy() + 1) * 127.5)
    classes = example['segmentation'].numpy()
    is_same = np.abs(colors - COLORS[classes]).max(axis=-1) < 60
    shares.append(is_same[classes >= 0].mean())
  assert np.mean(shares) > 0.9  # All but pixels at edges.


def test_crops_have_several_classes():
  """A crop is drawn again only if it has more than 75 % of one class."""
  classes = np.kron(make_classes(np.random.default_rng(0), (3, 3)), np.ones((20, 20)))
  classes = np.where(classes == 3, -1, classes).astype(np.int32)
  pp = make_config('folder').pp
  pp.crop_area = (0.02, 0.4)

  @tf.function
  def windows(seed):
    first = geometry.sample(classes.shape, seed, pp)
    varied = geometry.sample_varied(classes.shape, seed, pp, classes, 0.75)
    return first.window, varied.window

  def largest_share(window):
    y, x, height, width = window.numpy()
    pixels = classes[y : y + height, x : x + width]
    counts = np.bincount(pixels[pixels >= 0], minlength=1)
    return counts.max() / counts.sum() if counts.sum() else 1

  num_redrawn, shares = 0, []
  for number in range(60):
    first, varied = windows(tf.constant([1, number], tf.int64))
    is_same = np.array_equal(first, varied)
    assert is_same == (largest_share(first) <= 0.75)
    num_redrawn += not is_same
    shares.append(largest_share(varied))
  assert num_redrawn > 20
  assert np.mean(np.array(shares) <= 0.75) > 0.95


def encoded(image):
  file = io.BytesIO()
  image.save(file, 'PNG')
  return file.getvalue()


def palette_png(numbers, **kwargs):
  image = Image.fromarray(numbers.astype(np.uint8), 'P')
  image.putpalette(np.arange(768).astype(np.uint8).tobytes())
  file = io.BytesIO()
  image.save(file, 'PNG', **kwargs)
  return file.getvalue()


def test_masks_of_all_forms_have_the_same_classes():
  rng = np.random.default_rng(0)
  expected = rng.integers(-1, 3, (6, 5))
  numbers = IDS[expected]
  reader = masks.Reader(
    [masks.MaskClass(*row) for row in zip(NAMES, IDS.tolist(), map(tuple, COLORS))]
    + [masks.MaskClass('void', 255, tuple(COLORS[3]), True)]
  )
  forms = [
    encoded(Image.fromarray(numbers.astype(np.uint8))),
    encoded(Image.fromarray(numbers.astype(np.uint16))),
    palette_png(numbers),
    palette_png(numbers, transparency=3),
    encoded(Image.fromarray(COLORS[expected])),
    encoded(Image.fromarray(COLORS[expected]).convert('RGBA')),
  ]
  for form in forms:
    np.testing.assert_array_equal(reader.decode(form), expected)
  reader = masks.Reader(masks.numbered('abc'), (255,), reduce_zero_label=True)
  mask = Image.fromarray(np.array([[0, 1], [3, 255]], np.uint8))
  np.testing.assert_array_equal(reader.decode(encoded(mask)), [[-1, 0], [2, -1]])


def test_lossless_webp_is_a_mask_and_lossy_webp_is_not():
  reader = masks.Reader(masks.numbered('abc'))
  expected = np.arange(64).reshape(8, 8) % 3
  image = Image.fromarray(expected.astype(np.uint8)).convert('RGB')
  for is_lossless in (True, False):
    file = io.BytesIO()
    image.save(file, 'WEBP', lossless=is_lossless)
    if is_lossless:
      np.testing.assert_array_equal(reader.decode(file.getvalue()), expected)
    else:
      with pytest.raises(ValueError, match='a lossy WebP, .* use PNG'):
        reader.decode(file.getvalue())


def png_of(depth, color_type, row, width):
  """Returns a PNG of one row."""
  chunks = [
    (b'IHDR', struct.pack('>IIBBBBB', width, 1, depth, color_type, 0, 0, 0)),
    (b'IDAT', zlib.compress(b'\0' + row)),
    (b'IEND', b''),
  ]
  content = b'\x89PNG\r\n\x1a\n'
  for name, data in chunks:
    crc = zlib.crc32(name + data)
    content += struct.pack('>I', len(data)) + name + data + struct.pack('>I', crc)
  return content


@pytest.mark.parametrize(
  'depth, color_type, row, width',
  [
    (2, 0, bytes([0b00110011]), 4),  # Grey; Pillow reads 0, 255, 0, 255.
    (4, 0, bytes([0x01, 0x0F]), 4),  # 0, 17, 0, 255.
    (16, 4, struct.pack('>4H', 1, 65_535, 2, 65_535), 2),  # Grey and alpha: 0, 0.
    (16, 2, struct.pack('>6H', 1, 1, 1, 2, 2, 2), 2),  # Colours: 0, 0.
  ],
)
def test_masks_that_pillow_scales_are_refused(depth, color_type, row, width):
  reader = masks.Reader(masks.numbered([str(i) for i in range(20)]), (255,))
  with pytest.raises(ValueError, match='Pillow scales to 8 bits: use grey of 8 or 16'):
    reader.decode(png_of(depth, color_type, row, width))


@pytest.mark.parametrize(
  'kind, options',
  [('TIFF', {'compression': 'jpeg'}), ('JPEG2000', {})],
)
def test_masks_whose_compression_may_be_lossy_are_refused(kind, options):
  reader = masks.Reader(masks.numbered('abcd'))
  file = io.BytesIO()
  Image.new('RGB', (16, 16)).save(file, kind, **options)
  with pytest.raises(ValueError, match=f'is {kind} with a compression .* use PNG'):
    reader.decode(file.getvalue())


def test_mask_of_another_size_in_a_table_is_named_in_one_line():
  """Before its pixels are decoded."""
  reader = masks.Reader(masks.numbered('abc'))
  content = encoded(Image.new('L', (2, 4)))[:44]  # The header and few pixels.
  data = tf.data.Dataset.from_tensors(content)
  data = data.map(lambda mask: reader.read(mask, tf.constant([2, 3])))
  with pytest.raises(tf.errors.InvalidArgumentError) as error:
    list(data)
  assert image_files.first_line(error.value) == (
    'a mask cannot be read: it has 2 x 4 pixels, and its image 3 x 2: write a mask of the '
    'size of its image'
  )


def test_damaged_pixels_of_a_png_are_noticed():
  """Pillow reads these files."""
  reader = masks.Reader(masks.numbered([str(i) for i in range(256)]))
  numbers = np.arange(30, dtype=np.uint8).reshape(5, 6)
  content = encoded(Image.fromarray(numbers))
  start = content.index(b'IDAT') + 4
  size = int.from_bytes(content[start - 8 : start - 4])
  for content_of_mask in (
    content[: start + size],  # Without the checksum.
    content[: start + size] + b'    ' + content[start + size + 4 :],
  ):
    with pytest.raises(ValueError, match='damaged: their checksum differs'):
      reader.decode(content_of_mask)
  for position in range(start, start + size):
    damaged = bytearray(content)
    damaged[position] ^= 1
    with pytest.raises(ValueError, match='damaged|truncated'):
      reader.decode(bytes(damaged))
  row = png_of(8, 0, b'123', 3)
  assert reader.decode(row).tolist() == [[49, 50, 51]]
  # Two rows of three pixels, of which there is one.
  header = struct.pack('>IIBBBBB', 3, 2, 8, 0, 0, 0, 0)
  checksum = struct.pack('>I', zlib.crc32(b'IHDR' + header))
  with pytest.raises(ValueError, match='fewer rows than the 2 of its header'):
    reader.decode(row[:16] + header + checksum + row[33:])


def test_negative_numbers_and_arrays_are_named():
  reader = masks.Reader(masks.numbered('abc'))
  file = io.BytesIO()
  Image.fromarray(np.array([[-4, 2]], np.int32)).save(file, 'TIFF')
  with pytest.raises(ValueError, match='it has the number -4: use masks of 8'):
    reader.decode(file.getvalue())
  file = io.BytesIO()
  np.save(file, np.zeros((2, 2)))
  with pytest.raises(ValueError, match=r'it is an array \(.npy\): use PNG'):
    reader.decode(file.getvalue())


def test_many_classes_are_checked_in_linear_time(tmp_path):
  names = [f'class {i}' for i in range(65_536)]
  (tmp_path / 'classes.json').write_text(json.dumps(names))
  start = time.monotonic()
  assert len(masks.read_classes(str(tmp_path))) == len(names)
  assert time.monotonic() - start < 10  # Seconds; in quadratic time more than a minute.


@pytest.mark.parametrize(
  'class_id, ignore, shifted, number',
  [(0, (70_000,), False, 70_000), (65_535, (), True, 65_536)],
)
def test_numbers_above_16_bits_are_named(class_id, ignore, shifted, number):
  with pytest.raises(ValueError, match=f'numbers up to 65535, not {number}: change'):
    masks.Reader([masks.MaskClass('sky', class_id)], ignore, shifted)


def test_damaged_mask_of_a_table_is_called_a_mask():
  reader = masks.Reader(masks.numbered('abc'))
  with pytest.raises(ValueError, match='a mask cannot be read: not'):
    reader.read(tf.constant(b'no image'), tf.constant([2, 2]))


def test_missing_file_of_classes_is_named():
  config = ml_collections.ConfigDict({'task_options': {'classes': '/none.json'}})
  with pytest.raises(FileNotFoundError, match="classes='/none.json' does not exist: "):
    masks.classes_for(config, None)


@pytest.fixture
def broken(data, tmp_path):
  """A copy of the training data to break, and a function that opens it."""
  root = write_data(tmp_path / 'broken')
  config = make_config(root)

  def open_it(**options):
    config.task_options.update(options)
    return sources.open_split(config, 'train', ('image', masks.FEATURE))

  return root, open_it


def test_faults_of_masks_are_named_before_a_run(broken):
  root, open_it = broken
  folder = root / 'train/masks'
  content = (folder / '2.png').read_bytes()
  (folder / '0.png').write_bytes(content)  # Of another size.
  (folder / '1.png').write_bytes(content[: len(content) // 2])
  Image.new('L', SIZES[0][::-1], 9).save(folder / '3.png')
  Image.new('RGB', SIZES[1][::-1], (1, 2, 3)).save(folder / '4.png')
  Image.new('RGB', SIZES[2][::-1], (1, 2, 3)).save(folder / '5.png', 'JPEG')
  exif = Image.Exif()
  exif[274] = 6  # To be rotated by 90 degrees.
  image = Image.open(root / 'train/images/7.png')
  image.save(root / 'train/images/7.png', 'JPEG', exif=exif)
  mask = Image.open(folder / '7.png')
  mask.transpose(Image.Transpose.ROTATE_270).save(folder / '7.png')
  with pytest.raises(ValueError, match='6 of 8 images cannot be read') as error:
    open_it()
  for fault in (
    r'0.png: it has 47 x 33 pixels, and its image 32 x 24',
    r'1.png: ',
    "3.png: it has pixels of 9, which 'classes.json' does not have: add it",
    r'4.png: it has the colour [1, 2, 3], of no class',
    r'5.png: it is a JPEG',
    'before it is rotated by its EXIF orientation: store the image upright',
  ):
    assert fault in str(error.value)
  with pytest.raises(ValueError, match='5 of 8 images'):
    open_it(ignore=(9, 255))
  with pytest.raises(
    ValueError, match=r"ignore=\(7,\) has the number of .*'sea': leave"
  ):
    open_it(ignore=(7,))
  (folder / '6.png').unlink()
  with pytest.raises(ValueError, match=r"without a mask in .*such as \['6.png'\]"):
    open_it()


@pytest.mark.parametrize(
  'content, error',
  [
    ('{"sky": 1}', 'must be a list of classes'),
    ('[{"name": "sky", "id": 1, "colour": [1, 2, 3]}]', 'colour'),
    ('["sky", "sky"]', "two classes have the name 'sky'"),
    ('[{"name": "sky", "id": 70000}]', 'use 0 to 65535'),
    ('["sky", {"name": "sea", "id": "1"}]', 'entry 2: Expected `int`, got `str`'),
    ('[{"name": "sky", "id": 0, "ignore": true}]', 'no class to learn'),
    ('["sky", ""]', 'the class of id 1 has no name'),
    ('[{"name": "sky", "id": 0, "id": 1}]', "the key 'id' is repeated"),
  ],
)
def test_faults_of_classes_are_named(tmp_path, content, error):
  (tmp_path / 'classes.json').write_text(content)
  with pytest.raises(ValueError, match=error):
    masks.read_classes(str(tmp_path))


def test_masks_are_written_with_numbers_and_palette(
  model, workdir, data, tmp_path, capsys
):
  paths = [str(data / 'test/images' / f'{i}.png') for i in range(3)]
  flags = [f'--workdir={workdir}', f'--masks={tmp_path}/masks']
  predict_command.main([*flags, f'--out={tmp_path}/overlay.png', *paths])
  predict_command.main([*flags, *paths])
  assert capsys.readouterr().out.count('mask exists') == 3
  for i, class_map in enumerate(model.predict(paths)):
    mask = Image.open(tmp_path / 'masks' / f'{i}.png')
    np.testing.assert_array_equal(np.asarray(mask), IDS[class_map])
    np.testing.assert_array_equal(mask.convert('RGB'), COLORS[class_map])
  errors = {
    f'--masks={paths[0]}': "masks='.*' is a file: pass a folder",
    f'--out={tmp_path}/table.csv': 'masks=.* is not for a table: leave out --masks',
  }
  for flag, error in errors.items():
    with pytest.raises(ValueError, match=error):
      predict_command.run(predict_command.parse([*flags, flag, paths[0]]))
  changed = tmp_path / 'masks/1.png'
  changed.write_bytes(b'')
  predict_command.main([*flags, f'--out={tmp_path}/overlay.png', *paths])
  assert changed.read_bytes() == b''  # A mask that exists stays.
  width, height = Image.open(tmp_path / 'overlay.png').size
  assert width >= 256
  assert height >= 3 * 256


def test_masks_of_another_model_are_not_kept(model, data, tmp_path):
  path = str(data / 'test/images/0.png')
  folder = str(tmp_path / 'masks')
  list(model.report([path], masks=folder))
  assert "mask exists: '" in next(iter(model.report([path], masks=folder)))
  other = model.with_options({'window': 16})
  with pytest.raises(ValueError, match='has masks of other config: delete them'):
    list(other.report([path], masks=folder))
  (tmp_path / 'masks/.masks.json').write_text('{"weights": ')
  with pytest.raises(ValueError, match='masks of other weights, config: delete them'):
    list(model.report([path], masks=folder))
  with pytest.raises(ValueError, match='which model .*test/masks/0.png'):
    list(model.report([path], masks=str(data / 'test/masks')))


def test_predictions_never_replace_their_images(model, workdir, data, tmp_path):
  image = tmp_path / '0.png'
  shutil.copy(data / 'test/images/0.png', image)
  (tmp_path / 'link').symlink_to(tmp_path)
  content = image.read_bytes()
  for flag, error in (
    (
      f'--masks={tmp_path}/link',
      "masks='.*' is the folder of the images, .* pass another",
    ),
    ('--masks=', "masks='' is empty: pass a folder"),
    (f'--out={tmp_path}/link/0.png', "out='.*' is also an input, .* pass another path"),
  ):
    args = [f'--workdir={workdir}', flag, str(image)]
    with pytest.raises(ValueError, match=error):
      predict_command.run(predict_command.parse(args))
  assert image.read_bytes() == content
  assert sorted(x.name for x in tmp_path.iterdir()) == ['0.png', 'link']


def test_options_of_a_run_are_replaced_in_predictions(model, workdir, data, tmp_path):
  """A window of the size of the input does not squeeze the image of 24 x 32 pixels."""
  path = str(data / 'test/images/0.png')
  flags = [f'--workdir={workdir}', f'--masks={tmp_path}', '--option=window=16', path]
  predict_command.main(flags)
  [expected] = model.with_options({'window': 16}).predict([path])
  np.testing.assert_array_equal(Image.open(tmp_path / '0.png'), IDS[expected])
  assert (expected != model.predict([path])[0]).any()
  options = evaluation.parse_options(['scales=1.5', 'flips=true'])
  options = model.with_options(options).task.options
  assert (options.scales, options.flips) == ((1.5,), True)
  with pytest.raises(ValueError, match='windw'):
    model.with_options({'windw': 16})


def test_all_options_of_a_command_line_are_parsed(model):
  options = {'ignore': '9,255', 'reduce_zero_label': 'True', 'layers': '2,1'}
  changed = model.with_options(options).task
  assert changed.ids == [4, 8, 41]
  assert changed.config.task_options.layers == (2, 1)
  with pytest.raises(ValueError, match=r"ignore=\(7,\) has the number of .*'sea'"):
    model.with_options({'ignore': '7,'})


def test_kernels_of_8_bits_predict_the_same_classes(model, workdir, data):
  paths = [str(data / 'test/images' / f'{i}.png') for i in range(2)]
  maps = predict.load(workdir, dtype='int8').predict(paths)
  for class_map, expected in zip(maps, model.predict(paths)):
    assert np.mean(class_map == expected) > 0.9


OPTIONS = {'window': 16, 'stride': 8, 'flips': True}


def evaluate_flags(workdir):
  options = [f'--option={name}={value}' for name, value in OPTIONS.items()]
  return [f'--workdir={workdir}', '--split=test', *options]


@pytest.fixture(scope='module')
def report_folder(workdir):
  """The files of `vit_jax evaluate` with windows on eight devices."""
  folder = workdir.parent / 'report'
  flags = [f'--report={folder}', f'--predictions={folder}/table.csv', '--nodistributed']
  folder.mkdir()
  evaluate_command.main([*evaluate_flags(workdir), *flags])
  return folder


def test_a_report_lists_the_classes(report_folder):
  folder, table = report_folder, report_folder / 'table.csv'
  report = json.loads((folder / 'report.json').read_text())
  assert list(report['classes']) == NAMES
  iou = [x['iou'] for x in report['classes'].values()]
  assert report['overall']['miou'] == pytest.approx(np.mean(iou))
  boundary_iou = [x['boundary_iou'] for x in report['classes'].values()]
  assert report['overall']['boundary_iou'] == pytest.approx(np.mean(boundary_iou))
  assert len(pd.read_csv(folder / 'report.csv')) == 4  # With the mean.
  assert set(pd.read_csv(table).columns) == {'image', 'miou', 'pixel_accuracy'}


def test_masks_with_other_numbers_are_not_evaluated(model, data, tmp_path):
  """The model keeps its config."""
  config = model.config.to_json_best_effort()
  root = tmp_path / 'data'
  shutil.copytree(data, root)
  entries = json.loads((root / 'classes.json').read_text())
  entries[0]['id'], entries[1]['id'] = entries[1]['id'], entries[0]['id']
  (root / 'classes.json').write_text(json.dumps(entries))
  with pytest.raises(ValueError, match='other classes, numbers or colours .*training'):
    evaluation.evaluate(model, 'test', str(root))
  assert model.config.to_json_best_effort() == config


def test_masks_without_an_image_are_reported(broken, caplog):
  root, open_it = broken
  (root / 'train/images/3.png').unlink()
  assert open_it().num_examples == 7
  assert "Left out 1 mask without an image in '" in caplog.text
  assert "such as '3' in '" in caplog.text


def test_a_moved_folder_has_the_same_fingerprint(broken):
  root, open_it = broken
  fingerprint = open_it().fingerprint()
  moved = root.parent / 'moved'
  shutil.copytree(root, moved)
  config = make_config(moved)
  source = sources.open_split(config, 'train', ('image', masks.FEATURE))
  assert source.fingerprint() == fingerprint
  (moved / 'train/masks/0.png').rename(moved / 'train/masks/0.tif')
  source = sources.open_split(config, 'train', ('image', masks.FEATURE))
  assert source.fingerprint() != fingerprint
  shutil.copy(root / 'train/masks/0.png', moved / 'train/masks/0.png')
  with pytest.raises(ValueError, match="two masks in .* have the name '0'"):
    sources.open_split(config, 'train', ('image', masks.FEATURE))


def test_layers_that_do_not_exist_are_rejected(data):
  with pytest.raises(ValueError, match='the model has the layers 1 to 2'):
    linear.Linear(make_config(data, layers=(3,)), 3, None)


@pytest.mark.parametrize(
  'key, value, error',
  [
    (
      'class_weights',
      ml_collections.ConfigDict({'lake': 2.0}),
      "'lake', which is not one of the 3 classes",
    ),
    ('class_weights', 'balanced', 'set weights by name'),
    ('pp', {'resize': 32}, 'crops the centre .* set --config.pp.resize=None'),
    (
      'pp',
      {'resize': 32, 'match_pretrained': True},
      'crops the centre .* set --config.pp.match_pretrained=False, or a size',
    ),
    ('pp', {'randaugment': (2, 10)}, 'moves the pixels .* not those of masks'),
    ('label_smoothing', 0.1, 'set --config.label_smoothing=0'),
    ('loss', 'sigmoid', 'set --config.loss=softmax'),
  ],
)
def test_keys_without_an_effect_are_rejected(model, data, key, value, error):
  config = make_config(data)
  with config.ignore_type():
    config.update({key: value})
  with pytest.raises(ValueError, match=error):
    type(model.task)(config, model.task.metadata)


@pytest.mark.parametrize(
  'image, mask',
  [
    ('images/training/a.jpg', 'annotations/training/a.png'),
    ('images/train/x/a.png', 'masks/train/x/a.png'),
    (
      'leftImg8bit/train/bonn/bonn_1_leftImg8bit.png',
      'gtFine/train/bonn/bonn_1_gtFine_labelIds.png',
    ),
    ('train2017/a.jpg', 'stuffthingmaps/train2017/a.png'),
  ],
)
def test_published_layouts_are_read(tmp_path, image, mask):
  for name in (image, mask):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new('L', (4, 3), 1).save(tmp_path / name)
  other = mask.replace('labelIds', 'color').replace('a.png', 'notes.txt')
  (tmp_path / other).write_bytes((tmp_path / mask).read_bytes())
  (tmp_path / 'classes.json').write_text('["sky", "sea"]')
  config = make_config(tmp_path)
  source = sources.open_split(config, 'train', ('image', masks.FEATURE))
  assert source.name(0) == str(tmp_path / image)
  encoded_mask = source.read(source.record(0))[masks.FEATURE].numpy()
  assert encoded_mask == (tmp_path / mask).read_bytes()


EVALUATE = """
import sys
from vit_jax.commands import evaluate
address, index, *flags = sys.argv[1:]
place = [f'--coordinator={address}', '--num_processes=2', f'--process_id={index}']
sys.exit(evaluate.main([*flags, *place]))
"""


def test_windows_are_the_same_on_one_and_eight_devices_and_two_processes(
  model, workdir, report_folder, tmp_path
):
  two, one = tmp_path / 'two', tmp_path / 'one'
  flags = [*evaluate_flags(workdir), f'--report={two}']
  statuses, outputs = processes.run_two(EVALUATE, *flags, devices=2)
  assert statuses == [0, 0], outputs
  evaluation.evaluate(model, 'test', options=OPTIONS, report=str(one))
  expected = json.loads((one / 'report.json').read_text())
  for folder in (two, report_folder):
    report = json.loads((folder / 'report.json').read_text())
    assert report['num_examples'] == 5
    assert report['overall'] == pytest.approx(expected['overall'], abs=2e-3)  # Ties.
    pixels = [x['pixels'] for x in report['classes'].values()]
    assert pixels == [x['pixels'] for x in expected['classes'].values()]


def test_converting_names_the_parameters_that_are_left_out(workdir, tmp_path, capsys):
  convert_command.main([str(workdir), f'{tmp_path}/encoder.npz'])
  assert re.search('not written.* head/', capsys.readouterr().out)
  assert not any('head' in name for name in np.load(tmp_path / 'encoder.npz'))


def test_the_demo_has_a_legend_and_names_masks(model, data):
  from vit_jax.inference import demo  # Gradio takes seconds to import.

  show, _, (picture, legend) = model.page()
  path = str(data / 'test/images/0.png')
  result = show(demo.read_photo(path, model.config))
  [class_map] = model.predict([path])
  drawn = model.draw(np.asarray(Image.open(path)), class_map)
  np.testing.assert_array_equal(result[picture], drawn)
  for number, name in enumerate(NAMES):
    if (class_map == number).any():
      red, green, blue = COLORS[number]
      color = f'#{red:02x}{green:02x}{blue:02x}'
      assert re.search(f'{color}.*{name}</td><td>', result[legend])
  mask = str(data / 'test/masks/0.png')
  with pytest.raises(ValueError, match='is a mask, .*: upload the photo'):
    show(demo.read_photo(mask, model.config))


def test_figures_show_true_and_predicted_classes(model, data):
  [figure] = visualize.figures(model, names=['segmentation'], num_images=3).values()
  [axes] = figure.axes
  titles = [x.get_text() for x in axes.get_yticklabels()]
  assert titles == ['images', 'true', 'predicted', 'errors']
  labels = {x.get_text() for x in figure.legends[0].get_texts()}
  assert labels <= {*NAMES}
  images = [str(data / 'test/images/0.png')]
  [figure] = visualize.figures(model, images, names=['segmentation']).values()
  titles = [x.get_text() for x in figure.axes[0].get_yticklabels()]
  assert titles == ['images', 'predicted']
