"""Times the input pipeline next to others, in images per second of processor time.

  python -m benchmarks --only pipeline

Every pipeline reads JPEG photographs and returns batches of random crops of 224 px,
mirrored and scaled to [-1, 1]: ours; TensorFlow's operations as tutorials write them,
which decode whole images; Pillow in a DataLoader of PyTorch and in Grain, where these are
installed ('.[test]' brings both); DALI on the CPU, where `nvidia-dali-cuda120` is
installed. The last row of a size is the least that a pipeline can take: libjpeg-turbo
decodes the windows that ours reads, and nothing else.

Processor time is that of all threads of one process, so that the figures are those of
one core, whatever the number of cores.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import timing
from vit_jax.configs import common

BATCH = 64
SIDE = 224  # Pixels of a crop.
# (width, height) of the photographs -> number of batches to time.
BATCHES = {(500, 375): 20, (4000, 3000): 4}


def photographs(
  folder: pathlib.Path, size: tuple[int, int] = (500, 375), count: int = 64
) -> None:
  """Writes JPEGs of (width, height) pixels, crops of scikit-learn's photographs."""
  from PIL import Image
  from sklearn import datasets

  rng = np.random.RandomState(0)
  images = datasets.load_sample_images().images
  for split in ('train', 'test'):
    for i in range(count):
      image = images[i % len(images)]
      y = rng.randint(image.shape[0] - 374)
      x = rng.randint(image.shape[1] - 499)
      path = folder / split / f'class{i % len(images)}' / f'{i}.jpg'
      path.parent.mkdir(parents=True, exist_ok=True)
      crop = Image.fromarray(image[y : y + 375, x : x + 500])
      crop.resize(size, Image.Resampling.BICUBIC).save(path, quality=90)


def ours(folder: str) -> Iterator[Any]:
  """Returns the batches of `vit_jax train`."""
  from vit_jax import input_pipeline
  from vit_jax.data import sources

  config = _config(folder)
  source = sources.open_split(config, 'train')
  example = input_pipeline.labelled_example(config, len(source.class_names))
  rows = np.arange(BATCH)
  data = input_pipeline.train_dataset(config, source, example, rows)
  return data.as_numpy_iterator()


def decode_all(folder: str) -> Iterator[Any]:
  """Returns batches of tf.data that decodes whole images, then crops."""
  from vit_jax.data.lazy import tf

  def augment(path: Any) -> Any:
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      tf.shape(image), tf.zeros([0, 0, 4]), area_range=(0.05, 1.0),
      min_object_covered=0, use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = tf.slice(image, begin, size)
    image = tf.image.resize(image, (SIDE, SIDE))
    image = tf.image.random_flip_left_right(image)
    return (image - 127.5) / 127.5

  files = tf.data.Dataset.list_files(f'{folder}/train/*/*').cache().repeat()
  data = files.shuffle(1000).map(augment, tf.data.AUTOTUNE)
  return data.batch(BATCH).prefetch(1).as_numpy_iterator()


def torch_loader(folder: str) -> Iterator[Any]:
  """Returns batches of a DataLoader of PyTorch, which reads with Pillow."""
  import torch

  rng = np.random.RandomState(0)

  class Photographs(torch.utils.data.Dataset):
    def __init__(self) -> None:
      self.paths = _paths(folder)

    def __len__(self) -> int:
      return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
      return _with_pillow(self.paths[index], rng)

  # Without workers: the figures are those of one core.
  loader = torch.utils.data.DataLoader(
    Photographs(), BATCH, shuffle=True, drop_last=True
  )
  while True:
    yield from loader


def grain_loader(folder: str) -> Iterator[Any]:
  """Returns batches of Grain, which reads with Pillow."""
  import grain

  def read(path: str, rng: np.random.Generator) -> np.ndarray:
    return _with_pillow(path, rng)

  data = grain.MapDataset.source(_paths(folder)).seed(0).shuffle().repeat()
  data = data.random_map(read).batch(BATCH)
  return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1)))


def dali(folder: str) -> Iterator[Any]:
  """Returns batches of DALI, whose decoder crops, on one thread of the CPU."""
  from nvidia.dali import fn, pipeline, types

  with pipeline.Pipeline(BATCH, num_threads=1, device_id=None, seed=0) as pipe:
    files, _ = fn.readers.file(file_root=f'{folder}/train', random_shuffle=True)
    images = fn.decoders.image_random_crop(
      files, random_area=[0.05, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    images = fn.resize(images, size=[SIDE, SIDE], antialias=False)
    images = fn.crop_mirror_normalize(
      images,
      dtype=types.FLOAT,
      output_layout='HWC',
      mean=[127.5] * 3,
      std=[127.5] * 3,
      mirror=fn.random.coin_flip(),
    )
    pipe.set_outputs(images)
  pipe.build()
  while True:
    [batch] = pipe.run()
    yield batch.as_array()


def decode_windows(folder: str) -> Iterator[Any]:
  """Returns batches of the decoded windows of the images that `ours` reads."""
  from vit_jax.data import order, sources
  from vit_jax.data.augmentation import geometry
  from vit_jax.data.images import images, jpeg
  from vit_jax.data.lazy import tf

  config = _config(folder)
  source = sources.open_split(config, 'train')

  def plan(position: Any, record: Any) -> tuple[Any, Any, Any]:
    encoded = source.read(record)['image']
    seed = tf.stack([tf.constant(config.seed, tf.int64), position])
    shape = tf.cast(images.shape_of(encoded), tf.int32)
    window = geometry.sample(shape, seed, config.pp).window
    ratio = jpeg.ratio(window[2:], (SIDE, SIDE))
    return encoded, window // ratio, ratio

  records = order.training_records(config, source, np.arange(BATCH), 0)
  plans = records.map(plan).take(sum(BATCHES.values()) * BATCH).cache()
  for _ in plans:  # Fills the cache.
    pass

  def decode(encoded: Any, window: Any, ratio: Any) -> Any:
    return tf.size(jpeg.decode(encoded, ratio, window))

  data = plans.repeat().map(decode, tf.data.AUTOTUNE)
  return data.batch(BATCH).as_numpy_iterator()


PIPELINES: dict[str, Callable[[str], Iterator[Any]]] = {
  'ours': ours,
  'tf.data, decode all, then crop': decode_all,
  'PyTorch DataLoader, Pillow': torch_loader,
  'Grain, Pillow': grain_loader,
  'DALI': dali,
  'decode of the windows alone': decode_windows,
}
# Left out where their package is not installed.
_PACKAGES = {
  'PyTorch DataLoader, Pillow': 'torch',
  'Grain, Pillow': 'grain',
  'DALI': 'nvidia.dali',
}


def installed() -> list[str]:
  """Returns the names of the pipelines whose packages are installed."""
  names = []
  for name in PIPELINES:
    package = _PACKAGES.get(name)
    if package is None or _is_installed(package):
      names.append(name)
  return names


def _is_installed(package: str) -> bool:
  try:
    return importlib.util.find_spec(package) is not None
  except ModuleNotFoundError:  # The package that holds it.
    return False


def _config(folder: str) -> Any:
  config = common.set_dataset(common.get_config(), folder)
  config.batch = BATCH
  config.pp.crop = SIDE
  return config


def _paths(folder: str) -> list[str]:
  return sorted(str(path) for path in pathlib.Path(folder, 'train').rglob('*.jpg'))


def _with_pillow(path: str, rng: Any) -> np.ndarray:
  """Reads a random crop as torchvision's transforms on Pillow do, float32 [H, W, 3]."""
  from PIL import Image

  with Image.open(path) as file:
    image = file.convert('RGB')
  width, height = image.size
  for _ in range(10):
    area = rng.uniform(0.05, 1.0) * width * height
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w = round(math.sqrt(area * ratio))
    h = round(math.sqrt(area / ratio))
    if w <= width and h <= height:
      break
  else:
    w, h = width, height
  left = int(rng.uniform(0, width - w + 1))
  top = int(rng.uniform(0, height - h + 1))
  box = (left, top, left + w, top + h)
  image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
  if rng.uniform() < 0.5:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  return np.asarray(image, np.float32) / 127.5 - 1


def measure_one(name: str, folder: str, batches: int) -> None:
  """Prints the elapsed and the processor seconds of a pipeline, a JSON list."""
  iterator = PIPELINES[name](folder)
  for _ in range(2):
    next(iterator)
  start, processor_start = time.perf_counter(), time.process_time()
  for _ in range(batches):
    next(iterator)
  elapsed = time.perf_counter() - start
  print(json.dumps([elapsed, time.process_time() - processor_start]))


def speeds(
  names: Sequence[str], size: tuple[int, int], repeats: int
) -> dict[str, list[list[float]]]:
  """Times pipelines in turn on photographs of (width, height) pixels.

  Returns by name the images per second of each turn, and those per second of processor
  time.
  """
  batches = BATCHES[size]
  turns: dict[str, list[np.ndarray]] = {name: [] for name in names}
  with tempfile.TemporaryDirectory() as folder:
    photographs(pathlib.Path(folder), size)
    for _ in range(repeats):
      for name in names:
        # Two pipelines in one process would slow each other down.
        call = f'pipeline.measure_one({name!r}, {folder!r}, {batches})'
        command = [sys.executable, '-c', f'from benchmarks import pipeline; {call}']
        seconds = json.loads(subprocess.check_output(command, text=True))
        turns[name].append(BATCH * batches / np.array(seconds))
  return {name: np.array(values).T.tolist() for name, values in turns.items()}


def rows(args: argparse.Namespace) -> list[dict]:
  """Times training crops of 224 px from JPEG photographs of two sizes."""
  table = []
  for size in BATCHES:
    results = speeds(installed(), size, args.repeats)
    title = f'{size[0]}x{size[1]} JPEG -> {SIDE} px'
    throughput, reference = results['ours']
    table.append(timing.row(f'{title}: ours, all cores', throughput, 'img/s'))
    for name, (_, values) in results.items():
      table.append(timing.row(f'{title}: {name}', values, 'img/cpu-s'))
      ratios = [a / b for a, b in zip(reference, values)]
      if name != 'ours':
        table.append(timing.row(f'ours / {name}', ratios, 'x'))
  return table
