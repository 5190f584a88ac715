"""Times `model.predict` on JPEG photographs, next to a loop of timm and PyTorch.

  python -m benchmarks --only predict --model=b16

Both classify the same files, resized to `--image_size`, in batches of 16, in a process of
their own, in turn. The loop is what users of timm write: a DataLoader with two workers that
read with Pillow, and the model in inference mode. Needs `pip install -e '.[test]'`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import engines, pipeline, timing, timm_steps
from vit_jax import console
from vit_jax.configs import models as model_configs

_BATCH = 16
_WORKERS = 2
# (width, height) of the photographs -> how many are timed.
_COUNTS = {(500, 375): 256, (4000, 3000): 64}


def _paths(folder: str) -> list[str]:
  return sorted(map(str, pathlib.Path(folder, 'test').rglob('*.jpg')))


def _ours(paths: list[str], model: str, weights: str, size: int) -> float:
  """Returns the images per second of this package."""
  from vit_jax import predict

  predictor = predict.load_weights(weights, image_size=(size, size))
  predictor.predict(paths[: 2 * _BATCH])  # Compiles.
  start = time.perf_counter()
  predictor.predict(paths)
  return len(paths) / (time.perf_counter() - start)


def _timms(paths: list[str], model: str, weights: str, size: int) -> float:
  """Returns the images per second of a loop of timm and PyTorch."""
  from PIL import Image
  from timm.models import vision_transformer
  import torch

  class Photographs(torch.utils.data.Dataset):
    def __len__(self) -> int:
      return len(paths)

    def __getitem__(self, index: int) -> Any:
      with Image.open(paths[index]) as file:
        image = file.convert('RGB').resize((size, size), Image.Resampling.BILINEAR)
      pixels = np.asarray(image, np.float32) / 127.5 - 1
      return torch.from_numpy(pixels).permute(2, 0, 1)

  arguments = timm_steps.arguments(model_configs.get_config(model), channels=3)
  net = vision_transformer.VisionTransformer(img_size=size, **arguments).eval()
  loader = torch.utils.data.DataLoader(Photographs(), _BATCH, num_workers=_WORKERS)
  with torch.inference_mode():
    net(next(iter(loader)))
    start = time.perf_counter()
    for images in loader:
      net(images).softmax(dim=-1).topk(5)
    return len(paths) / (time.perf_counter() - start)


_PROGRAMS = {'vit_jax': _ours, 'timm': _timms}


def measure_one(program: str, folder: str, model: str, weights: str, size: int) -> None:
  """Prints the images per second of a program in this process."""
  print(json.dumps(_PROGRAMS[program](_paths(folder), model, weights, size)))


def rows(args: argparse.Namespace) -> list[dict]:
  """Times the predictions for photographs of two sizes."""
  console.require('timm', 'test', 'the section predict')
  table = []
  with tempfile.TemporaryDirectory() as temporary:
    weights = engines.write_weights(args, pathlib.Path(temporary))
    for (width, height), count in _COUNTS.items():
      folder = f'{temporary}/{width}'
      pipeline.photographs(pathlib.Path(folder), (width, height), count)
      speeds: dict[str, list[float]] = {program: [] for program in _PROGRAMS}
      for _ in range(args.repeats):
        for program in _PROGRAMS:
          arguments = program, folder, args.model, weights, args.image_size
          call = f'predicting.measure_one(*{arguments!r})'
          command = [sys.executable, '-c', f'from benchmarks import predicting; {call}']
          output = subprocess.check_output(command, text=True)
          speeds[program].append(json.loads(output.splitlines()[-1]))
      title = f'{args.model}, {width}x{height} JPEG'
      table += timing.compared(
        f'{title}: model.predict', speeds['vit_jax'], 'timm', speeds['timm'], 'img/s'
      )
  return table
