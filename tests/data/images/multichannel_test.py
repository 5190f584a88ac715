"""Images that are not 8-bit colour, against tifffile, NumPy and Pillow."""

import io

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf
import tifffile

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data.images import images, listing, multichannel

VALUES = np.random.RandomState(0).randint(0, 2**16, (10, 12, 6)).astype(np.uint16)
PLANES = np.ascontiguousarray(VALUES.transpose(2, 0, 1))  # [C, H, W]


def npy(values):
  file = io.BytesIO()
  np.save(file, values)
  return file.getvalue()


def tiff(values, photometric='minisblack', **kwargs):
  file = io.BytesIO()
  tifffile.imwrite(file, values, photometric=photometric, **kwargs)
  return file.getvalue()


def page_by_page(pages):
  """Returns a TIFF in which each page is an image of its own."""
  file = io.BytesIO()
  with tifffile.TiffWriter(file) as writer:
    for page in pages:
      writer.write(page, photometric='minisblack')
  return file.getvalue()


def make_pp(**fields):
  pp = common.get_config().pp
  with pp.ignore_type():
    pp.update({'channels': 6, 'range': (0, 65535), 'crop_area': None, **fields})
  return pp


FILES = {
  'npy': npy(VALUES),
  'npy, columns first': npy(np.asfortranarray(VALUES)),
  'npy, big-endian': npy(VALUES.astype('>u2')),
  'samples': tiff(VALUES, planarconfig='contig'),
  'planes': tiff(PLANES, planarconfig='separate'),
  'pages': tiff(PLANES),
  'page by page': page_by_page(PLANES),
  'deflate': tiff(VALUES, planarconfig='contig', compression='zlib', rowsperstrip=3),
  'tiles': tiff(VALUES, planarconfig='contig', compression='zlib', tile=(16, 16)),
  'BigTIFF': tiff(VALUES, planarconfig='contig', bigtiff=True, byteorder='>'),
  'ImageJ': tiff(PLANES, imagej=True, metadata={'axes': 'CYX'}),
  'OME': tiff(PLANES, ome=True, metadata={'axes': 'CYX'}),
}


@pytest.mark.parametrize('name', FILES)
def test_values_are_those_stored(name):
  assert multichannel.shape(FILES[name]) == VALUES.shape
  np.testing.assert_array_equal(multichannel.read(FILES[name]), VALUES)
  np.testing.assert_array_equal(images.shape_of(FILES[name]), VALUES.shape[:2])
  values = images.decode_values(FILES[name], 6)
  assert values.dtype == tf.float32
  np.testing.assert_array_equal(values, VALUES)


@pytest.mark.parametrize('orientation', range(1, 9))
def test_orientation_of_a_tiff_is_applied_as_pillow_does(orientation):
  grey = (VALUES[..., :1] >> 8).astype(np.uint8)
  tag = (274, 'H', 1, orientation, True)
  encoded = tiff(grey[..., 0], extratags=[tag])
  shown = np.asarray(Image.open(io.BytesIO(encoded)))  # Turned by Pillow.
  np.testing.assert_array_equal(multichannel.read(encoded)[..., 0], shown)
  assert multichannel.shape(encoded)[:2] == shown.shape


def test_png_of_16_bits_and_8_bit_formats_keep_their_values():
  grey = VALUES[..., 0]
  file = io.BytesIO()
  Image.fromarray(grey).save(file, 'PNG')
  np.testing.assert_array_equal(images.decode_values(file.getvalue(), 1)[..., 0], grey)
  colour = tf.io.encode_png(VALUES[..., :3])
  np.testing.assert_array_equal(images.decode_values(colour, 3), VALUES[..., :3])
  photo = images.encode_png(VALUES[..., :3].astype(np.uint8))
  np.testing.assert_array_equal(
    images.decode_values(photo, 3), VALUES[..., :3].astype(np.uint8)
  )
  with pytest.raises(images.decode_errors(), match=r'3 channels, and pp\.channels=6'):
    images.decode_values(photo, 6)
  with pytest.raises(images.decode_errors(), match=r'3 channels, and pp\.channels=1'):
    images.decode_values(colour, 1)


def header_only(shape, dtype='<u2'):
  """Returns a .npy file that states a shape, and has 10 bytes."""
  file = io.BytesIO()
  header = {'shape': shape, 'fortran_order': False, 'descr': dtype}
  np.lib.format.write_array_header_1_0(file, header)
  return file.getvalue() + bytes(10)


HOSTILE = {
  'pickle': (npy(np.array([[{}]], object)), 'object.*save real numbers'),
  'complex': (npy(np.zeros((2, 2), complex)), 'complex128.*save real numbers'),
  'vector': (npy(np.zeros(4)), 'save real numbers'),
  'many channels': (npy(np.zeros((2, 2, 65))), '1 to 64 channels'),
  'no pixels': (npy(np.zeros((0, 2))), 'at least one pixel'),
  'nan': (npy(np.full((2, 2), np.nan)), 'not finite.*replace'),
  'large': (npy(np.full((2, 2), 1e300)), 'range of float32.*replace'),
  'huge': (header_only((2**20, 2**20)), 'more than 268,435,456'),
  'lying': (header_only((100, 100)), 'truncated or damaged'),
  'truncated': (FILES['npy'][:-1], 'truncated or damaged'),
  'no header': (FILES['npy'][:9], 'header is damaged'),
  'truncated tiff': (FILES['samples'][:-1], 'truncated'),
  'cut tiff': (FILES['deflate'][:40], 'damaged|IFD'),
  'palette': (
    tiff(np.zeros((4, 4), np.uint8), 'palette', colormap=np.zeros((3, 256), np.uint16)),
    'PALETTE',
  ),
  'inverted': (tiff(np.zeros((4, 4), np.uint8), 'miniswhite'), 'MINISWHITE'),
  'pages of colour': (tiff(np.zeros((5, 4, 4, 3), np.uint8), 'rgb'), 'axes QYXS'),
  'pages of several sizes': (
    page_by_page([np.zeros((4, 4), np.uint8), np.zeros((2, 2), np.uint8)]),
    r'2 pages differ: uint8\[4, 4\] and uint8\[2, 2\]: save one image',
  ),
  'pages of several types': (
    page_by_page([np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint16)]),
    r'2 pages differ: uint8\[4, 4\] and uint16\[4, 4\]',
  ),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_other_files_are_refused(name):
  encoded, message = HOSTILE[name]
  with pytest.raises(ValueError, match=message):
    multichannel.read(encoded)


def test_a_strip_that_expands_beyond_its_size_is_refused():
  small, large = (
    tiff(np.zeros((side, 64), np.uint8), compression='zlib', rowsperstrip=side)
    for side in (8, 1024)
  )
  with tifffile.TiffFile(io.BytesIO(large)) as file:
    begin, count = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
  strip = large[begin : begin + count]
  with tifffile.TiffFile(io.BytesIO(small)) as file:
    tags = file.pages[0].tags
    places = {
      name: tags[name].valueoffset for name in ('StripOffsets', 'StripByteCounts')
    }
    kinds = {name: tags[name].dtype for name in places}
  bomb = bytearray(small) + strip
  for name, number in (('StripOffsets', len(small)), ('StripByteCounts', len(strip))):
    size = 2 if kinds[name] == 3 else 4
    bomb[places[name] : places[name] + size] = number.to_bytes(size, 'little')
  with pytest.raises(ValueError, match='larger than it says'):
    multichannel.read(bytes(bomb))


def test_range_mean_and_deviation_are_applied():
  mean, std = VALUES.mean((0, 1)), VALUES.std((0, 1))
  scaled = preprocess.prepare(FILES['npy'], None, make_pp(crop=(10, 12)))
  np.testing.assert_allclose(scaled, VALUES / 32767.5 - 1, atol=1e-6)
  pp = make_pp(crop=(10, 12), mean=tuple(mean), std=tuple(std), antialias=True)
  standardised = preprocess.prepare(FILES['npy'], None, pp)
  np.testing.assert_allclose(standardised, (VALUES - mean) / std, atol=1e-5)
  pp.range = (tuple(range(6)), 30_000)
  clipped = preprocess.prepare(FILES['npy'], None, pp)
  expected = (VALUES.clip(np.arange(6), 30_000) - mean) / std
  np.testing.assert_allclose(clipped, expected, atol=1e-5)


def test_pillow_images_and_arrays_are_prepared_like_their_files():
  pp = make_pp(channels=1, crop=(10, 12))
  grey = VALUES[..., 0]
  colour = VALUES[..., :3].astype(np.uint8)
  file = io.BytesIO()
  Image.fromarray(colour).save(file, 'PNG')
  for image, encoded in (
    (grey, npy(grey)),
    (Image.fromarray(grey), npy(grey)),
    (Image.fromarray(grey.astype(np.float32)), npy(grey)),
    (Image.fromarray(colour), file.getvalue()),  # Becomes grey.
  ):
    expected = preprocess.prepare(encoded, None, pp)
    got = preprocess.from_user(
      image, lambda content: preprocess.prepare(content, None, pp), channels=1
    )
    np.testing.assert_array_equal(got, expected)


def test_8_bit_images_with_a_range_are_prepared_like_colour():
  photo = images.encode_png(VALUES[..., :3].astype(np.uint8))
  seed = tf.constant([1, 2], tf.int64)
  options = dict(crop=8, rotate=20.0, color_jitter=0.4, random_erasing=0.5)
  colour = make_pp()
  colour.update(channels=3, crop_area=(0.2, 0.8), **options)
  with colour.ignore_type():
    colour.range = None
    expected = preprocess.prepare(photo, seed, colour)
    colour.range = (0, 255)
  np.testing.assert_allclose(
    preprocess.prepare(photo, seed, colour), expected, atol=1e-5
  )


def test_arrays_are_listed_where_there_are_no_other_images(tmp_path, caplog):
  (tmp_path / 'train' / 'a').mkdir(parents=True)
  (tmp_path / 'train' / 'a' / '1.npy').write_bytes(FILES['npy'])
  (tmp_path / 'train' / 'a' / 'notes.txt').touch()
  index = listing.list_folder(str(tmp_path), 'train')
  assert index.names([0]) == [b'a/1.npy']
  (tmp_path / 'train' / 'a' / '1.TIF').write_bytes(FILES['pages'])
  index = listing.list_folder(str(tmp_path), 'train')
  assert index.names(range(len(index))) == [b'a/1.TIF']
  listing.warn_of_ignored(index)
  assert '1 .npy' in caplog.text
  path = bytes(tmp_path / 'train' / 'a' / '1.npy')
  assert images.broken_reason(path, 120, channels=6) == ''
  assert 'max_image_pixels=119' in images.broken_reason(path, 119, channels=6)
  assert '6 channels' in images.broken_reason(path, 120, channels=5)
  assert 'config.pp.range' in images.broken_reason(path, 120)


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(range=None), r'channels=6: .*config\.pp\.range'),
    (dict(range=None, channels=3, mean=1.0), 'mean=1.0.*config.pp.range'),
    (dict(mean=1.0), r'mean=1\.0 and std=None'),
    (dict(range=((0, 1), 2)), 'range=.* has 2 values, and channels=6'),
    (dict(randaugment=(2, 10)), 'randaugment.*8-bit colour'),
    (dict(color_jitter=0.5), 'color_jitter=0.5 .*1 or 3 channels, not channels=6'),
    (dict(range=(5, 5)), 'lowest.*below the highest'),
    (dict(range=(0, (1, 2, 3, 4, 5, 0))), 'lowest.*below the highest'),
    (dict(channels=65), 'at most 64'),
    (dict(mean=0.0, std=0.0), 'above 0'),
  ],
)
def test_contradicting_keys_are_refused(fields, message):
  from vit_jax.run import config as run_config

  pp = make_pp()
  with pp.ignore_type():
    pp.update(fields)
  with pytest.raises(ValueError, match=message):
    run_config.check_preprocessing(pp)
