"""Times the input pipeline next to the usual one."""

import argparse
from collections.abc import Callable
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
BATCHES = 20


def photographs(folder: pathlib.Path, count: int = 64) -> None:
  """Writes JPEGs of 500x375 pixels, crops of scikit-learn's photographs."""
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
      Image.fromarray(image[y : y + 375, x : x + 500]).save(path, quality=90)


def plain(folder: str) -> Any:
  """Returns the usual pipeline: decodes whole images, then crops."""
  from vit_jax.data.lazy import tf

  def augment(path: Any) -> Any:
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      tf.shape(image), tf.zeros([0, 0, 4]), area_range=(0.05, 1.0),
      min_object_covered=0, use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = tf.slice(image, begin, size)
    image = tf.image.resize(image, (224, 224))
    image = tf.image.random_flip_left_right(image)
    return (image - 127.5) / 127.5

  files = tf.data.Dataset.list_files(f'{folder}/train/*/*').cache().repeat()
  data = files.shuffle(1000).map(augment, tf.data.AUTOTUNE)
  return data.batch(BATCH).prefetch(1)


def measure_one(name: str, folder: str) -> None:
  """Prints the seconds that 20 batches of 'ours' or 'plain' take."""
  from vit_jax import input_pipeline
  from vit_jax.data import sources

  if name == 'ours':
    config = common.set_dataset(common.get_config(), folder)
    config.batch = BATCH
    source = sources.open_split(config, 'train')
    example = input_pipeline.labelled_example(config, len(source.class_names))
    rows = np.arange(BATCH)
    data = input_pipeline.train_dataset(config, source, example, rows)
  else:
    data = plain(folder)
  iterator = data.as_numpy_iterator()
  for _ in range(5):
    next(iterator)
  start = time.perf_counter()
  for _ in range(BATCHES):
    next(iterator)
  print(time.perf_counter() - start)


def _speeds(times: list[float]) -> list[float]:
  """Returns the images per second of each time."""
  return [BATCH * BATCHES / seconds for seconds in times]


def rows(args: argparse.Namespace) -> list[dict]:
  """Times training crops of 224 px from 500x375 JPEGs of photographs."""

  def run(name: str, folder: str) -> Callable[[], float]:
    # Two pipelines in one process would slow each other down.
    call = f'pipeline.measure_one({name!r}, {folder!r})'
    command = [sys.executable, '-c', f'from benchmarks import pipeline; {call}']
    return lambda: float(subprocess.check_output(command, text=True))

  with tempfile.TemporaryDirectory() as folder:
    photographs(pathlib.Path(folder))
    ours, plain = timing.measure(
      run('ours', folder), run('plain', folder), repeats=args.repeats
    )
  name = 'input pipeline, 500x375 JPEG -> 224 px'
  return timing.compared(
    name, _speeds(ours), 'decode all, then crop', _speeds(plain), 'img/s'
  )
