"""Tests of exported models, run by the programs that serve them."""

import errno
import functools
import json
import os
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import onnxruntime
import pytest
from sklearn import datasets
import tensorflow as tf

from tests import conftest, tiny_models
from tests.tasks import masked_patches_test
from tests.tasks.pixels import pixels_test
from vit_jax import predict
from vit_jax.commands import export as command
from vit_jax.configs import common, detr_scenes, models as model_configs
from vit_jax.inference import export, serving
from vit_jax.run import config as run_config

PHOTOS = datasets.load_sample_images().images
NAMES = {'class_names': ['ant', 'bee', 'cow']}


def classifier(**model):
  config = common.get_config()
  config.pp.crop = 32
  config.model = ml_collections.ConfigDict(model)
  return run_config.get_task('classify')(run_config.complete(config), NAMES)


def make_vit():
  """A narrow Ti/16."""
  config = model_configs.get_config('ti16')
  config.update(hidden_size=24)
  config.transformer.update(num_layers=1, mlp_dim=32)
  return classifier(**config)


def make_mixer():
  return classifier(
    kind='mixer', patches={'size': (8, 8)}, num_blocks=1, hidden_dim=16,
    tokens_mlp_dim=8, channels_mlp_dim=8,
  )  # fmt: skip


def make_bit():
  return classifier(kind='bit', num_layers=(1, 1), width_factor=0.5)


def make_detector(units=(1, 1), **pp):
  config = detr_scenes.get_config()
  config.pp.update(crop=32)
  config.pp.update(pp)
  config.dataset = None  # Compared on photographs.
  config.model.update(
    units=units, backbone_width=8, hidden_size=16, mlp_dim=8, norm='frozen_batch',
    num_decoder_layers=1,
  )  # fmt: skip
  return run_config.get_task('detect')(run_config.complete(config), NAMES)


def make_canvases():
  return make_detector(sides=(24, 32), eval_side=32, longest_side=40)


def make_masked():
  task = masked_patches_test.make_task('')
  task.config.dataset = None  # Compared on photographs.
  return task


def make_segmenter(**model):
  config = common.get_config()
  config.pp.crop = 32
  config.task = 'segment_semantic'
  config.model = model_configs.get_config('ti16')
  config.model.update(hidden_size=24, **model)
  config.model.transformer.update(num_layers=1, mlp_dim=32)
  config.task_options = {'max_classes': 3}
  classes = [{'name': x, 'id': i} for i, x in enumerate(NAMES['class_names'])]
  metadata = {**NAMES, 'mask_classes': classes}
  task_class = run_config.get_task(config.task)
  return task_class(run_config.complete(config), metadata)


def make_eomt():
  return make_segmenter(kind='eomt', num_queries=4, num_query_layers=1, num_upscales=1)


TASKS = {
  'segmenter': make_segmenter,
  'eomt': make_eomt,
  'vit': make_vit,
  'mixer': make_mixer,
  'bit': make_bit,
  'detector': make_detector,
  'canvases': make_canvases,
  'masked': make_masked,
}
OUTPUTS = {
  'canvases': {'boxes', 'probabilities'},
  'masked': {'outputs'},
  'segmenter': {'scores'},
  'eomt': {'scores'},
}


@functools.cache
def load(name):
  """The model, and a compiled function from inputs to outputs."""
  task = TASKS[name]()
  model = task.predictor(*tiny_models.of_task(task), 7)
  return model, jax.jit(functools.partial(task.exported, *tiny_models.of_task(task)))


@pytest.fixture(scope='module')
def vit():
  return load('vit')[0]


def inputs_of(model, folder, count):
  """Inputs of the exported model for `count` photos."""
  facts = json.loads((folder / 'model.json').read_text())
  photos = [PHOTOS[i % 2][10 * i :] for i in range(count)]
  found = model.inputs(photos)
  return {name: found[name] for name in facts['inputs']}


def test_files_of_an_export_are_compared_with_their_checksums(tmp_path):
  (tmp_path / '1').mkdir()
  program = tmp_path / '1' / 'model'
  # Of 'abc', from FIPS 180-2.
  digest = 'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'
  facts = serving.with_checksum({'files': {'1/model': digest}, 'labels': ['cat']})
  (tmp_path / 'model.json').write_text(json.dumps(facts))
  with pytest.raises(ValueError, match='1/model.* is missing'):
    serving.read_facts(tmp_path)
  os.mkfifo(program)
  with pytest.raises(ValueError, match='1/model.* not a file'):
    serving.read_facts(tmp_path)
  program.unlink()
  program.write_bytes(b'abb')
  with pytest.raises(ValueError, match='1/model.* is damaged or of another export'):
    serving.read_facts(tmp_path)
  program.write_bytes(b'abc')
  assert serving.read_facts(tmp_path) == facts
  content = json.dumps(facts)
  (tmp_path / 'model.json').write_text(content.replace('cat', 'bat'))
  with pytest.raises(ValueError, match="model.json' differs from what"):
    serving.read_facts(tmp_path)
  (tmp_path / 'model.json').write_text(content[:-9])
  with pytest.raises(ValueError, match="model.json' is damaged"):
    serving.read_facts(tmp_path)
  for content in ('{}', '[]', '{"files": 3}'):
    (tmp_path / 'model.json').write_text(content)
    with pytest.raises(ValueError, match="model.json' has no checksums"):
      serving.read_facts(tmp_path)


def serve(folder):
  """Loads an exported model as a serving program does; returns a function."""
  if (folder / 'model.onnx').exists():
    session = onnxruntime.InferenceSession(folder / 'model.onnx')
    names = [x.name for x in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs)))
  if (folder / '1').exists():
    served = tf.saved_model.load(str(folder / '1'))

    def run(inputs):
      tensors = {name: tf.constant(x) for name, x in inputs.items()}
      found = served.signatures['serving_default'](**tensors)
      return {name: x.numpy() for name, x in found.items()}

    return run
  encoded = (folder / 'model.stablehlo').read_bytes()
  served = jax.export.deserialize(encoded)
  return lambda inputs: served.call(**inputs)


@pytest.mark.parametrize(
  ('name', 'to'),
  # A SavedModel contains the StableHLO; the tests below export the other models.
  [
    ('mixer', 'onnx'),
    ('canvases', 'onnx'),
    ('masked', 'saved_model'),
    ('segmenter', 'onnx'),
    ('eomt', 'onnx'),
    ('eomt', 'saved_model'),
  ],
)
def test_exported_models_match_jax(name, to, tmp_path):
  (model, compute), out = load(name), tmp_path / 'out'
  assert model.export(out, to) < 1e-5
  assert list(tmp_path.iterdir()) == [out]
  inputs = inputs_of(model, out, 5)
  want, served = compute(inputs), serve(out)
  # TensorFlow compiles again for each batch size.
  for count in (1, 5) if to == 'onnx' else (3,):
    got = served({name: x[:count] for name, x in inputs.items()})
    assert set(got) == OUTPUTS.get(name, {'logits', 'probabilities'})
    for key, expected in want.items():
      assert len(got[key]) == count
      assert np.ptp(expected) > 1e-3
      np.testing.assert_allclose(got[key], expected[:count], atol=1e-4)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, data_dir):
  """A one-step run on the digits with random parameters."""
  workdir = tmp_path_factory.mktemp('run')
  config = run_config.complete(conftest.make_tiny_config(data_dir))
  metadata = {'class_names': [str(i) for i in range(10)]}
  task = run_config.get_task('classify')(config, metadata)
  return conftest.write_run(workdir, config, metadata, *tiny_models.of_task(task))


SERVE = """
import json, sys
import jax
import numpy as np

folder, images, out = sys.argv[1:]
with open(f'{folder}/model.stablehlo', 'rb') as file:
  model = jax.export.deserialize(file.read())
found = model.call(image=np.load(images))
assert not any(name.startswith(('vit_jax', 'flax')) for name in sys.modules)
np.save(out, found['probabilities'])
"""


def test_command_exports_a_run_that_is_served_without_vit_jax(
  workdir, tmp_path, capsys
):
  out, flag = tmp_path / 'out', f'--workdir={workdir}'
  argv = [flag, '--to=stablehlo', f'--out={out}', '--uint8']
  assert command.main(argv) == 0
  output = capsys.readouterr().out
  assert '5 random images' in output
  for name in ('model.json', 'model.stablehlo'):
    assert f'{out / name}  {(out / name).stat().st_size:,} bytes' in output
  facts = json.loads((out / 'model.json').read_text())
  assert facts['inputs'] == {'image': {'shape': ['batch', 8, 8, 1], 'dtype': 'uint8'}}
  assert facts['outputs']['logits'] == {'shape': ['batch', 10], 'dtype': 'float32'}
  assert facts['labels'] == [str(i) for i in range(10)]
  assert facts['preprocessing'] == {
    'size': [8, 8], 'channels': 1, 'resize': None, 'antialias': False,
    'interpolation': 'bilinear', 'jpeg_shrink': True, 'range': [0, 255],
    'resize_mode': 'squash', 'crop_rounding': 'down',
  }  # fmt: skip
  assert facts['command'] == f'vit_jax export {" ".join(argv)}'
  assert facts['difference'] < 1e-5
  assert facts['task'] == 'classify'
  assert serving.read_facts(out) == facts
  # JAX's version determines how long a StableHLO file can be loaded.
  assert facts['versions']['jax'] == jax.__version__

  pixels = np.random.RandomState(1).randint(0, 256, (3, 8, 8, 1), np.uint8)
  np.save(tmp_path / 'in.npy', pixels)
  files = [str(tmp_path / name) for name in ('in.npy', 'out.npy')]
  subprocess.run(
    [sys.executable, '-c', SERVE, str(out), *files], check=True, cwd='/',
    env={'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  want = predict.load(str(workdir)).probabilities(pixels)
  np.testing.assert_allclose(np.load(files[1]), want, atol=1e-5)


def test_uint8_inputs_and_half_precision(vit, tmp_path):
  whole = sum(x.nbytes for x in jax.tree.leaves(vit.params))
  photos = np.stack([x[:32, :32] for x in PHOTOS])
  want = vit.probabilities(photos)
  for dtype, to, most in (
    ('bfloat16', 'stablehlo', 0.03), ('float16', 'onnx', 0.003), ('int8', 'onnx', 0.03)
  ):  # fmt: skip
    out = tmp_path / dtype
    assert vit.export(out, to, dtype=dtype, uint8=True) < most
    program = export.make_program(vit, dtype=dtype)
    assert program.size <= whole / 2
    # The rest of the file is the program.
    [file] = out.glob(f'model.{to}')
    assert program.size < file.stat().st_size < program.size + 80_000
    got = serve(out)({'image': photos})['probabilities']
    np.testing.assert_allclose(got, want, atol=most)
    assert np.abs(got - want).max() > 1e-6
  # The file does not reveal where this package was installed.
  assert b'.py' not in (tmp_path / 'bfloat16/model.stablehlo').read_bytes()


def test_padding_of_a_canvas_has_no_influence(tmp_path):
  model, compute = load('canvases')
  model.export(tmp_path / 'out', 'onnx', uint8=True)
  shape = (2, *model.task.image_size, 3)
  pixels = np.random.RandomState(3).randint(0, 256, shape, np.uint8)
  real = np.zeros(shape[:3], bool)
  real[0, :30], real[1, :, :24] = True, True
  got = serve(tmp_path / 'out')({'image': pixels, 'real': real})
  image = np.where(real[..., None], pixels / 127.5 - 1, 0).astype(np.float32)
  for key, expected in compute({'image': image, 'real': real}).items():
    np.testing.assert_allclose(got[key], expected, atol=1e-4)


def test_features(vit, tmp_path):
  vit.export(tmp_path / 'out', 'onnx', features=True)
  inputs = inputs_of(vit, tmp_path / 'out', 2)
  got = serve(tmp_path / 'out')(inputs)
  want = vit.embed([PHOTOS[0], PHOTOS[1][10:]])
  np.testing.assert_allclose(got['features'], want, atol=1e-4)
  assert list(got) == ['features']


@pytest.mark.parametrize(
  ('name', 'to', 'image_size'),
  [('bit', 'onnx', (40, 24)), ('detector', 'stablehlo', 'free')],
)
def test_other_and_free_image_sizes(name, to, image_size, tmp_path):
  model, compute = load(name)
  model.export(tmp_path / 'out', to, image_size=image_size)
  images = np.random.RandomState(2).uniform(-1, 1, (3, 40, 24, 3))
  inputs = {'image': images.astype(np.float32)}
  got = serve(tmp_path / 'out')(inputs)
  for key, expected in compute(inputs).items():
    np.testing.assert_allclose(got[key], expected, atol=1e-4)


def test_a_model_that_differs_from_jax_is_not_kept(vit, tmp_path, monkeypatch):
  monkeypatch.setitem(export.TOLERANCES, 'bfloat16', 1e-6)
  with pytest.raises(ValueError, match='differs from JAX by .*--to'):
    vit.export(tmp_path / 'out', 'onnx', dtype='bfloat16')
  assert not list(tmp_path.iterdir())


def test_errors_of_storage_name_the_folder_and_leave_nothing(
  vit, tmp_path, monkeypatch
):
  def full_disk(program, folder):
    (folder / 'half').touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def full_disk_of_tensorflow(*args, **kwargs):
    raise tf.errors.ResourceExhaustedError(None, None, 'x.pb; No space left on device')

  monkeypatch.setitem(export.FORMATS, 'stablehlo', (full_disk, None))
  monkeypatch.setattr(tf.saved_model, 'save', full_disk_of_tensorflow)
  for to in ('stablehlo', 'saved_model'):
    out = tmp_path / to
    with pytest.raises(OSError, match=f"^out='{out}' cannot be written: .*No space"):
      export.export(vit, out, to)
  assert not list(tmp_path.iterdir())
  with pytest.raises(OSError, match="^out='/proc/x' cannot be written: .*--out"):
    export.check('/proc/x', 'stablehlo', None, None)


def test_weights_too_large_for_one_file(vit, tmp_path, monkeypatch):
  monkeypatch.setattr(export, 'MAX_STABLEHLO', 10_000)
  with pytest.raises(ValueError, match='StableHLO.*--dtype=bfloat16'):
    vit.export(tmp_path / 'out', 'stablehlo')
  assert not list(tmp_path.iterdir())
  vit.export(tmp_path / 'out', 'onnx')
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {'model.json', 'model.onnx', 'model.onnx.data'}


# --- Rejected arguments ---


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--out={taken}'], "out='.*' exists.*--out"),
    (['--to=onnx', '--image_size=free'], "'free' .*--to=onnx"),
  ],
)
def test_wrong_flags_are_rejected_before_loading_a_model(flags, message, tmp_path):
  base_flags = ['--to=stablehlo', f'--out={tmp_path}/out', '--workdir=/no/run']
  flags = [flag.format(taken=tmp_path) for flag in flags]
  with pytest.raises((ValueError, FileExistsError), match=message):
    command.main([*base_flags, *flags])
  assert not list(tmp_path.iterdir())


def test_unsuitable_image_sizes_are_rejected(vit, tmp_path):
  out = tmp_path / 'out'
  for size in (48, (16, 64)):  # The second has the same number of patches.
    with pytest.raises(ValueError, match=r'parameters are for \(32, 32\)'):
      vit.export(out, 'stablehlo', image_size=size)
  with pytest.raises(ValueError, match="image_size='free'"):
    vit.export(out, 'stablehlo', image_size='free')
  assert not list(tmp_path.iterdir())


def test_pixel_models_export_only_features(data_dir, tmp_path):
  task = pixels_test.make_task(data_dir)
  model = task.predictor(*tiny_models.of_task(task), 1)
  with pytest.raises(ValueError, match=r'pixel by pixel.*\(--features\)'):
    model.export(tmp_path / 'out', 'stablehlo')
  assert not list(tmp_path.iterdir())
