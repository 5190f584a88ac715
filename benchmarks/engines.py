"""Times exported models in ONNX Runtime and OpenVINO, next to JAX, on the CPU.

Needs `pip install onnx onnxruntime openvino`.
"""

import argparse
from collections.abc import Callable
import functools
import importlib
import os
import pathlib
import tempfile
import types
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from vit_jax import console, models, predict
from vit_jax.weights import writing


def _num_cores() -> int:
  """Returns the number of processors that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def write_weights(args: argparse.Namespace, folder: pathlib.Path) -> str:
  """Writes random weights of a model for 1,000 classes; returns the file."""
  model = models.get_model(args.model, num_classes=1000)
  init = jax.jit(functools.partial(model.init, train=False))
  image = np.zeros([1, args.image_size, args.image_size, 3], np.float32)
  params = init(jax.random.key(0), image)['params']
  # A head of zeros would be constant.
  kernel = params['head']['kernel']
  params['head']['kernel'] = 0.02 * jax.random.normal(jax.random.key(1), kernel.shape)
  path = os.fspath(folder / 'weights.npz')
  writing.save(jax.device_get(params), path)
  return path


def _export(weights: str, folder: pathlib.Path, dtype: str | None) -> pathlib.Path:
  """Exports weights in a stored type, None for float32; returns the ONNX file."""
  exported = folder / (dtype or 'float32')
  model = predict.load_weights(weights)
  model.export(os.fspath(exported), 'onnx', dtype=dtype)
  return exported / 'model.onnx'


def _jax(weights: str, images: np.ndarray, **types: str) -> Callable[[], Any]:
  model = predict.load_weights(weights, **types)
  outputs = jax.jit(model.task.outputs)

  def run() -> None:
    jax.device_get(outputs(model.params, model.extra, {'image': images}))

  return run


def _onnx_runtime(path: pathlib.Path, images: np.ndarray) -> Callable[[], Any]:
  onnxruntime = console.require('onnxruntime', 'onnx', 'timing ONNX Runtime')
  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = _num_cores()
  session = onnxruntime.InferenceSession(
    os.fspath(path), options, providers=['CPUExecutionProvider']
  )
  return functools.partial(session.run, None, {'image': images})


def _import_openvino() -> types.ModuleType:
  try:
    return importlib.import_module('openvino')
  except ImportError as e:
    raise ImportError(
      'the section engines times OpenVINO too: pip install openvino, or leave the '
      'section out (--only)'
    ) from e


def _openvino(path: pathlib.Path, images: np.ndarray, dtype: str) -> Callable[[], Any]:
  openvino = _import_openvino()
  properties = {
    'INFERENCE_NUM_THREADS': _num_cores(),
    # By default bfloat16, on processors that multiply it.
    'INFERENCE_PRECISION_HINT': dtype,
  }
  model = openvino.Core().compile_model(os.fspath(path), 'CPU', properties)
  return functools.partial(model, {'image': images})


def rows(args: argparse.Namespace) -> list[dict]:
  """Times batches of `args.batch` random images in all engines, which take turns."""
  _import_openvino()  # Fails here rather than after the exports.
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    weights = write_weights(args, folder)
    shape = (args.batch, args.image_size, args.image_size, 3)
    images = np.random.RandomState(0).uniform(-1, 1, shape).astype(np.float32)
    float32 = _export(weights, folder, None)
    int8 = _export(weights, folder, 'int8')
    engines = {
      'JAX, float32': _jax(weights, images),
      'JAX, bfloat16': _jax(
        weights, images, dtype='bfloat16', compute_dtype='bfloat16'
      ),
      'ONNX Runtime, float32': _onnx_runtime(float32, images),
      'OpenVINO, float32': _openvino(float32, images, 'f32'),
      'OpenVINO, bfloat16': _openvino(float32, images, 'bf16'),
      'JAX, int8': _jax(weights, images, dtype='int8'),
      # OpenVINO 2026.4 fails to compile the model in int8.
      'ONNX Runtime, int8': _onnx_runtime(int8, images),
    }
    times = timing.measure(*engines.values(), repeats=args.repeats)
  result = []
  for name, seconds in zip(engines, times):
    speeds = [args.batch / x for x in seconds]
    title = f'{args.model}, batch {args.batch}, {name}'
    result.append(timing.row(title, speeds, 'img/s'))
  return result
