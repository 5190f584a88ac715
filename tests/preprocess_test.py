"""Tests of decoding and augmentation against Pillow and closed forms."""

import io
import os

import jax.numpy as jnp
import numpy as np
from PIL import Image
import pillow_heif
import pytest
from scipy import ndimage
import tensorflow as tf
import torch

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data.images import formats, images

pillow_heif.register_heif_opener()


def encode(image, fmt, **kwargs):
  buffer = io.BytesIO()
  image.save(buffer, fmt, **kwargs)
  return buffer.getvalue()


def pp(**kwargs):
  config = common.get_config().pp
  config.update(kwargs)
  return config


def smooth(height=40, width=60):
  """Returns a colour image without sharp edges, which JPEG preserves well."""
  y, x = np.mgrid[:height, :width]
  red, green = 255 * y // height, 255 * x // width
  return np.stack([red, green, 255 - red], axis=-1).astype(np.uint8)


RGB = Image.fromarray(smooth())
FILES = {
  'jpeg': (encode(RGB, 'JPEG', quality=95), 6),
  'grey jpeg': (encode(RGB.convert('L'), 'JPEG', quality=95), 6),
  'cmyk jpeg': (encode(RGB.convert('CMYK'), 'JPEG', quality=95), 6),
  'png': (encode(RGB, 'PNG'), 0),
  'grey png': (encode(RGB.convert('L'), 'PNG'), 0),
  'palette png': (encode(RGB.convert('P'), 'PNG'), 0),
  'one bit png': (encode(RGB.convert('1'), 'PNG'), 0),
  'webp': (encode(RGB, 'WEBP', lossless=True), 0),
  'bmp': (encode(RGB, 'BMP'), 0),
  'palette bmp': (encode(RGB.convert('P'), 'BMP'), 0),
  'gif': (encode(RGB, 'GIF'), 0),
  'tiff': (encode(RGB, 'TIFF'), 0),
  'grey tiff': (encode(RGB.convert('L'), 'TIFF', compression='tiff_lzw'), 0),
  'palette tiff': (encode(RGB.convert('P'), 'TIFF', compression='packbits'), 0),
  'cmyk tiff': (encode(RGB.convert('CMYK'), 'TIFF', compression='jpeg'), 0),
  'pages of tiff': (encode(RGB, 'TIFF', save_all=True, append_images=[RGB.copy()]), 0),
  'avif': (encode(RGB, 'AVIF'), 0),
  'grey avif': (encode(RGB.convert('L'), 'AVIF'), 0),
  'heic': (encode(RGB, 'HEIF'), 0),
  'jpeg 2000': (encode(RGB, 'JPEG2000'), 0),
  'grey jpeg 2000': (encode(RGB.convert('L'), 'JPEG2000', no_jp2=True), 0),
}


@pytest.mark.parametrize('name', FILES)
def test_every_format_is_decoded_like_pillow(name):
  encoded, tolerance = FILES[name]
  want = np.asarray(Image.open(io.BytesIO(encoded)).convert('RGB')).astype(int)
  got = images.decode(tf.constant(encoded)).numpy().astype(int)
  assert got.shape == (40, 60, 3)
  assert np.abs(got - want).max() <= tolerance
  grey = images.decode(tf.constant(encoded), channels=1).numpy()
  assert grey.shape == (40, 60, 1)
  weights = np.array([0.299, 0.587, 0.114])
  assert np.abs(grey[..., 0] - want @ weights).max() <= tolerance + 2


@pytest.mark.parametrize('name', ['avif', 'heic'])
def test_formats_are_told_apart_by_their_brands(name):
  """Both may begin with the brand of any HEIF file."""
  encoded, _ = FILES[name]
  other = encoded[:8] + b'mif1' + encoded[12:]
  np.testing.assert_array_equal(images.decode(other), images.decode(encoded))


def test_the_error_says_how_to_read_heic(monkeypatch, tmp_path):
  monkeypatch.setattr(formats, '_PACKAGE', 'no_such_package')
  monkeypatch.delitem(Image.OPEN, 'HEIF')
  monkeypatch.setattr(formats, '_readable', formats._readable.__wrapped__)
  path = tmp_path / 'a.heic'
  path.write_bytes(FILES['heic'][0])
  with pytest.raises(ValueError, match=r"a.heic' is not .* HEIC needs .*'.\[heif\]'"):
    preprocess.from_user(path, images.decode)
  assert 'HEIC needs' in images.broken_reason(os.fsencode(path), 10_000)
  path.write_bytes(FILES['avif'][0])
  assert not images.broken_reason(os.fsencode(path), 10_000)


def test_numbers_without_a_known_white_in_a_file_are_rejected(tmp_path):
  path = tmp_path / 'a.tif'
  Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
  with pytest.raises(ValueError, match="a.tif' is not .* mode 'F'.*'L'.*'I;16'"):
    preprocess.from_user(path, images.decode)
  values = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
  Image.fromarray(values).save(path)
  got = preprocess.from_user(path, images.decode)
  np.testing.assert_array_equal(got[..., 0], values >> 8)


@pytest.mark.parametrize('fmt', ['PNG', 'WEBP', 'TIFF', 'JPEG2000'])
def test_transparent_pixels_are_white(fmt):
  image = np.zeros((4, 4, 4), np.uint8)  # Black, and fully transparent ...
  image[0, 0] = (10, 20, 30, 255)  # ... except for one pixel,
  image[1, 1] = (0, 0, 0, 128)  # and one that is half transparent.
  encoded = encode(Image.fromarray(image), fmt, lossless=True, exact=True)
  got = images.decode(tf.constant(encoded)).numpy()
  assert got[0, 0].tolist() == [10, 20, 30]
  assert got[3, 3].tolist() == [255] * 3
  np.testing.assert_allclose(got[1, 1], [127] * 3, atol=1)


def test_values_are_between_minus_one_and_one():
  image = tf.constant([[[0], [255]], [[51], [204]]], tf.uint8)
  got = preprocess.for_evaluation(image, pp(crop=2, channels=1)).numpy()
  np.testing.assert_allclose(got[..., 0], [[-1, 1], [-0.6, 0.6]], atol=1e-6)


def test_squeeze_keeps_everything_and_central_crop_the_middle():
  image = np.zeros((20, 60, 3), np.uint8)
  image[:, 20:40] = 255  # White in the middle third.
  squeezed = preprocess.for_evaluation(image, pp(crop=12)).numpy()
  np.testing.assert_array_equal(squeezed[6, :, 0], [-1] * 4 + [1] * 4 + [-1] * 4)
  cut = preprocess.for_evaluation(image, pp(crop=12, resize=12)).numpy()
  assert cut.min() == 1  # Short side 20 -> 12, then the middle 12 of 36.
  both = preprocess.for_evaluation(image, pp(crop=6, resize=(8, 12))).numpy()
  np.testing.assert_array_equal(
    both[3, :, 0], [-1, 1, 1, 1, 1, -1]
  )  # The middle 6 of 12 columns.
  rectangle = preprocess.for_evaluation(image, pp(crop=(6, 12))).numpy()
  assert rectangle.shape == (6, 12, 3)


def train(encoded, seed, **kwargs):
  fields = {'crop': 16, **kwargs}
  return preprocess.prepare(
    tf.constant(encoded), tf.constant(seed, tf.int64), pp(**fields)
  ).numpy()


def test_augmentation_is_a_function_of_its_seed():
  encoded, _ = FILES['jpeg']
  first = train(encoded, (0, 5), rotate=20.0)
  np.testing.assert_array_equal(first, train(encoded, (0, 5), rotate=20.0))
  assert np.abs(first - train(encoded, (0, 6), rotate=20.0)).max() > 0.01
  assert np.abs(first - train(encoded, (1, 5), rotate=20.0)).max() > 0.01
  assert first.shape == (16, 16, 3)
  assert first.min() >= -1
  assert first.max() <= 1


def test_training_without_augmentation_matches_evaluation():
  encoded, _ = FILES['png']
  plain = train(encoded, (0, 0), flip=False, crop_area=None)
  want = preprocess.for_evaluation(images.decode(encoded), pp(crop=16))
  np.testing.assert_array_equal(plain, want)


def test_rotation_matches_scipy():
  image = np.asarray(Image.fromarray(smooth(32, 32)).convert('L'), np.float32)
  encoded = encode(Image.fromarray(image.astype(np.uint8)), 'PNG')
  fields = dict(crop=32, channels=1, crop_area=None, flip=False, rotate=30.0)
  got = train(encoded, (0, 3), **fields)[..., 0]
  got = got * 127.5 + 127.5
  angles = np.arange(-30, 30.25, 0.25)
  errors = [
    np.abs(ndimage.rotate(image, a, reshape=False, order=1, mode='nearest') - got)[
      8:24, 8:24
    ].max()
    for a in angles
  ]
  assert min(errors) < 2
  assert abs(angles[int(np.argmin(errors))]) > 1


def load(image, config):
  """Resizes a user's image, as in prediction."""
  return preprocess.from_user(
    image, lambda encoded: preprocess.prepare(encoded, None, config).numpy()
  )


@pytest.mark.parametrize(
  'image',
  [
    np.asarray(RGB),
    RGB,
    RGB.convert('P'),
    np.dstack([np.asarray(RGB), np.full((40, 60), 255, np.uint8)]),
    FILES['png'][0],
    io.BytesIO(FILES['png'][0]),
    tf.constant(np.asarray(RGB)),
    jnp.asarray(RGB),
    torch.tensor(np.asarray(RGB)),
    torch.tensor(np.asarray(RGB)).permute(2, 0, 1),  # As torchvision reads it.
  ],
)
def test_user_images_of_any_type(image):
  want = preprocess.for_evaluation(np.asarray(RGB), pp(crop=8))
  tolerance = 0.5 if getattr(image, 'mode', '') == 'P' else 1e-6
  got = load(image, pp(crop=8))
  np.testing.assert_allclose(got, want, atol=tolerance)


def test_wrong_images_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no image file '/no/such.png'"):
    load('/no/such.png', pp())
  path = tmp_path / 'broken.jpg'
  path.write_bytes(FILES['jpeg'][0][:300])
  with pytest.raises(ValueError, match="broken.jpg' is not an image"):
    load(path, pp())
  path.write_bytes(b'A text, which is longer than any header. ' * 9)
  with pytest.raises(ValueError, match='broken.jpg.*not an image of a known form'):
    load(path, pp())
  with pytest.raises(ValueError, match=r'array float32\[8, 8, 3\]: pass uint8'):
    load(np.zeros((8, 8, 3), np.float32), pp())
  with pytest.raises(ValueError, match=r'uint8\[2, 3, 8, 8\].*a batch as a list'):
    load(torch.zeros((2, 3, 8, 8), dtype=torch.uint8), pp())
  with pytest.raises(ValueError, match='pass uint8 .height, width. or .*, 1, 3 or 4'):
    load(np.zeros((8, 8, 2), np.uint8), pp())


def test_grey_images_of_16_bits_are_read_like_their_files():
  values = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
  for dtype, mode in (('<u2', 'I;16'), ('>u2', 'I;16B')):
    image = Image.fromarray(values.astype(dtype))
    assert image.mode == mode
    got = preprocess.from_user(image, images.decode)
    np.testing.assert_array_equal(got, images.decode(encode(image, 'PNG')))
    np.testing.assert_array_equal(got[..., 0], values >> 8)


@pytest.mark.parametrize('mode, dtype', [('I', np.int32), ('F', np.float32)])
def test_modes_without_a_known_white_are_rejected(mode, dtype):
  """Pillow would read 0 to 1 as black, and 256 to 65535 as white."""
  image = Image.fromarray(np.zeros((4, 4), dtype))
  assert image.mode == mode
  with pytest.raises(ValueError, match=f"mode '{mode}'.*'L'.*'I;16'"):
    preprocess.from_user(image, images.decode)


def test_transparency_that_is_already_multiplied():
  image = Image.fromarray(np.uint8([[0, 200], [90, 255]])).convert('LA')
  image.putalpha(Image.fromarray(np.uint8([[0, 255], [255, 0]])))
  got = preprocess.from_user(image.convert('La'), images.decode)
  assert got[..., 0].numpy().tolist() == [[255, 200], [90, 255]]


def test_open_files_are_read_from_their_beginning(tmp_path):
  (tmp_path / 'a.png').write_bytes(FILES['png'][0])
  with open(tmp_path / 'a.png', 'rb') as file:
    file.read(10)
    assert preprocess.from_user(file, len) == len(FILES['png'][0])


@pytest.mark.parametrize('image', [None, 3, [[1, 2]]])
def test_other_objects_are_not_images(image):
  with pytest.raises(ValueError, match=f'{type(image).__name__}: pass a path'):
    preprocess.from_user(image, images.decode)


@pytest.mark.parametrize('fmt', ['WEBP', 'BMP'])
def test_files_ending_in_zero_bytes_are_read_as_in_training(fmt, tmp_path):
  """Prediction once rejected every WebP from Pillow, whose last byte is zero."""
  zeros = 0
  for width in range(3, 9):
    path = tmp_path / f'image{width}'
    Image.new('RGB', (width, 4), (20 * width, 0, 0)).save(path, fmt)
    zeros += path.read_bytes()[-1] == 0
    got = preprocess.from_user(path, images.decode)
    want = images.decode(tf.constant(path.read_bytes()))
    np.testing.assert_array_equal(got, want)
  assert zeros


@pytest.mark.parametrize(
  'name',
  ['cmyk jpeg', 'png', 'webp', 'bmp', 'gif', 'tiff', 'avif', 'heic', 'jpeg 2000'],
)
def test_size_is_checked_before_decoding(name, tmp_path):
  path = tmp_path / 'large.img'
  path.write_bytes(FILES[name][0])
  message = r'large.img.*60 x 40 pixels, more than max_image_pixels=2399'
  with pytest.raises(ValueError, match=message):
    preprocess.from_user(path, pytest.fail, 2399)
  assert preprocess.from_user(path, len, 2400) == len(FILES[name][0])


def test_image_at_a_url_is_not_read():
  with pytest.raises(ValueError, match="'https://x.y/a.jpg' is a URL: download it"):
    preprocess.from_user('https://x.y/a.jpg', pytest.fail)


def test_named_pipe_is_not_read(tmp_path):
  os.mkfifo(tmp_path / 'a.jpg')
  with pytest.raises(ValueError, match="a.jpg' is a named pipe, not a regular"):
    preprocess.from_user(tmp_path / 'a.jpg', pytest.fail)


# --- Images and texts ---


@pytest.fixture
def vocabulary(tmp_path):
  """Path of a BERT vocabulary."""
  path = tmp_path / 'vocab.txt'
  path.write_text('[PAD]\n[UNK]\n[CLS]\na\ncat\ndog\n##s\n')
  return str(path)


def test_images_and_texts_are_preprocessed_together(vocabulary):
  pp = preprocess.get_pp(
    tokenizer_name='bert', vocab_path=vocabulary, max_len=4, size=2
  )
  image = np.zeros((2, 4, 8, 3), np.uint8)
  image[1, :, 4:] = 255
  features = {'image': image, 'text': ['A cat', 'dogs'], 'label': [7, 8]}
  data = tf.data.Dataset.from_tensor_slices(features).map(pp)
  assert data.element_spec == {
    'image': tf.TensorSpec((2, 2, 3), tf.float32),
    'text': tf.TensorSpec((), tf.string),
    'tokens': tf.TensorSpec((4,), tf.int32),
    'label': tf.TensorSpec((), tf.int32),
  }
  [got] = data.batch(2).as_numpy_iterator()
  assert got['text'].tolist() == [b'A cat', b'dogs']
  assert got['tokens'].tolist() == [[2, 3, 4, 0], [2, 5, 6, 0]]
  assert got['label'].tolist() == [7, 8]
  assert got['image'][:, 0, :, 0].tolist() == [[-1, -1], [-1, 1]]


def test_missing_features_are_not_created(vocabulary):
  pp = preprocess.get_pp(
    tokenizer_name='bert', vocab_path=vocabulary, max_len=3, size=4
  )
  features = {'text': tf.constant('a dog'), 'label': 3}
  got = pp(features)
  assert got.pop('tokens').numpy().tolist() == [2, 3, 5]
  assert got == features
  assert pp({}) == {}


def test_tokenizer_names_of_the_original(vocabulary):
  assert preprocess.get_tokenizer('bert') is preprocess.BertTokenizer
  assert preprocess.get_tokenizer('sentencepiece') is preprocess.SentencepieceTokenizer
  tokenizer = preprocess.BertTokenizer(vocab_path=vocabulary, max_len=3)
  assert tokenizer(['cats']).tolist() == [[2, 4, 6]]
  with pytest.raises(ValueError, match="tokenizer_name='w' is unknown: use one"):
    preprocess.get_pp(tokenizer_name='w', vocab_path=vocabulary, max_len=3, size=4)
