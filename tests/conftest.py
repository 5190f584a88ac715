"""Eight simulated devices for every test, and the fixtures that tests share."""

import atexit
import gc
import importlib
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile

# Before jax is imported.
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    # Compilation dominates the time of the tests, so LLVM does not optimise. XLA's own
    # passes still run.
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    # One LLVM module per program rather than up to 32, each with its overhead.
    '--xla_cpu_parallel_codegen_split_count=1',
  ]
)
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  # The new fusion emitters, which later versions always use, compile more slowly: the
  # gradient of a small model takes 2.7 s instead of 0.9.
  os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
from PIL import Image
import pytest

# Modules that import JAX or TensorFlow are imported in functions, since the process
# that distributes the tests does not need them.

# PyTorch for GPUs depends on Triton, which crashes in a process that has loaded
# TensorFlow. The tests do not need it.
sys.modules.setdefault('triton', None)

gc.set_threshold(100_000, 20, 20)

# A background job and nohup ignore these signals, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_COMPILED = 'VIT_JAX_TESTS_COMPILED'
# A compilation cache that all workers share.
if _COMPILED not in os.environ:
  os.environ[_COMPILED] = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, os.environ[_COMPILED], ignore_errors=True)


def pytest_configure(config):
  """Configures JAX in a worker."""
  if config.getoption('numprocesses', None) and not hasattr(config, 'workerinput'):
    return
  import jax

  from tests import shapes

  shapes.check_imports()
  if not config.option.file_or_dir and config.getoption('markexpr') != 'quick':
    # The workers import these in different orders, so that in a fresh environment they do
    # not all compile the same modules to bytecode at the same time.
    _import_large(int(getattr(config, 'workerinput', {}).get('workerid', 'gw0')[2:]))

  # Bit-exact tests compare runs on the same backend.
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_compilation_cache_dir', os.environ[_COMPILED])
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def _import_large(first):
  from vit_jax import console

  imports = [
    console.load_tensorflow,
    lambda: importlib.import_module('tests.torch_models'),
  ]
  for i in range(len(imports)):
    imports[(first + i) % len(imports)]()


def pytest_collection_finish():
  """Excludes imported modules from garbage collection, which would search them."""
  gc.freeze()


# The longest files run first, so that the workers finish at about the same time.
FIRST = (
  'inference/tables_test.py', 'colabs_test.py', 'multiprocess_test.py',
  'docs_python_test.py', 'train_test.py', 'run/resume_test.py',
  'planning/plan_test.py', 'tasks/detection/detect_canvases_test.py',
  'inference/export_test.py', 'tasks/image_text/image_text_test.py',
  'data/coco/detect_commands_test.py', 'inference/demo_test.py',
  'tasks/pixels/pixels_test.py', 'weights/convert_test.py', 'original_test.py',
  'studies/noisy_student_test.py', 'tasks/toy_test.py', 'layers/attention_test.py',
  'docs_test.py', 'layers/auto_test.py', 'tasks/detection/detect_mesh_test.py',
  'packaging_test.py', 'benchmarks_test.py', 'learning/lora_test.py',
  'layers/encoder_test.py', 'tasks/masked_patches_test.py', 'checkpoint_test.py',
  'distributed/sequence_test.py', 'figures/visualize_test.py',
  'models_vit_parts_test.py', 'studies/sweep_test.py', 'figures/pictures_test.py',
  'against_timm_test.py', 'against_transformers_test.py', 'weights/lit_test.py',
  'learning/state_test.py',
  'tools_test.py', 'predict_test.py', 'weights/detr_test.py',
  'run/early_stopping_test.py', 'multichannel_test.py',
)  # fmt: skip


# `-m quick` runs these: the core, without tests that start processes or compile much.
QUICK = (
  'data/augmentation/geometry_test.py', 'checkpoint_test.py', 'configs_test.py',
  'data/folder_test.py', 'data/images/listing_test.py',
  'data/manifest_test.py', 'flags_test.py',
  'input_pipeline_test.py', 'layers/patches_test.py',
  'layers/positions_test.py', 'learning/losses_test.py',
  'learning/optim_test.py', 'models_test.py',
  'models_vit_test.py', 'preprocess_test.py', 'run/config_test.py',
  'run/keys_test.py', 'run/metrics_test.py', 'run/overrides_test.py',
  'run/workdir_test.py', 'tasks/classify_test.py',
  'train_test.py::test_files_and_metrics_of_a_run', 'weights/reading_test.py',
)  # fmt: skip

# Tests of these files that start processes or a run.
NOT_QUICK = (
  'checkpoint_test.py::test_teacher_in_the_extra_state_is_loaded_from_weights',
  'data/manifest_test.py::test_readers_parse_once_even_after_a_kill',
  'run/keys_test.py::test_wrong_value_is_reported_before_loading_tensorflow',
  'run/metrics_test.py::test_full_disk_is_reported_with_the_file',
  'run/workdir_test.py::test_all_processes_stop_if_the_workdir_was_deleted',
)


def pytest_ignore_collect(collection_path, config):
  """Ignores files without quick tests if only those are selected."""
  if config.getoption('markexpr') == 'quick':
    files = {name.partition('::')[0] for name in QUICK}
    if collection_path.name.endswith('_test.py'):
      return _name(collection_path) not in files or None
  return None


def pytest_collection_modifyitems(items):
  """Sorts the tests by file, the longest first; marks the quick ones."""
  places = {name: place for place, name in enumerate(FIRST)}
  items.sort(key=lambda item: places.get(_name(item.path), len(places)))
  for item in items:
    file = _name(item.path)
    test = f'{file}::{item.originalname}'  # Without parameters.
    if (file in QUICK or test in QUICK) and test not in NOT_QUICK:
      item.add_marker('quick')


def _name(path):
  return os.path.relpath(path, os.path.dirname(__file__)).replace(os.sep, '/')


def make_folder(root, counts, splits=('train', 'test'), size=(24, 20)):
  """Writes a folder of images; each class has its colour, and some noise.

  Args:
    root: pathlib.Path of the folder.
    counts: images per class, by split.
    splits: names of the splits.
    size: (height, width) of the images.

  Returns:
    root.
  """
  rng = np.random.RandomState(0)
  endings = ('jpg', 'PNG', 'jpeg', 'webp', 'bmp')
  colours = {'ant': (200, 40, 40), 'bee': (40, 200, 40), 'cow': (40, 40, 200)}
  for split, count in zip(splits, counts, strict=True):
    for name, colour in colours.items():
      folder = root / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        noise = rng.randint(-30, 30, (*size, 3))
        pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
        ending = endings[i % len(endings)]
        Image.fromarray(pixels).save(folder / f'{name}{i}.{ending}')
  return root


@pytest.fixture(scope='session')
def image_folder(tmp_path_factory):
  """A folder of 3 classes, 11 training and 3 test images each; read only."""
  return make_folder(tmp_path_factory.mktemp('images'), (11, 3))


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
  """Where TFDS keeps the data sets of this test session."""
  return str(tmp_path_factory.mktemp('tfds'))


def make_tiny_config(data_dir):
  """Returns a config on the digits that trains in seconds."""
  from tests import tiny_models
  from vit_jax.configs import common

  config = common.set_dataset(common.get_config(), 'digits')
  config.tfds_data_dir = data_dir
  config.pp.update(crop=8, channels=1, flip=False)
  config.pp.crop_area = (0.5, 1.0)
  config.model = tiny_models.config()
  config.pretrained_dir = None
  config.model.patches.size = (4, 4)
  config.update(
    batch=16,
    batch_eval=104,
    total_steps=6,
    warmup_steps=1,
    optimizer='adam',
    base_lr=1e-3,
    eval_every=3,
    checkpoint_every=3,
    progress_every=2,
    log_images=0,  # figures/pictures_test.py has a run with pictures.
  )
  return config


def write_run(workdir, config, metadata, params, extra=None, step=1):
  """Writes the files of a run: a complete config, metadata, weights."""
  import jax

  from vit_jax.learning import optim, state as state_lib
  from vit_jax.run import checkpoints as checkpoints_lib, workdir as workdir_lib

  tx = optim.get_optimizer(config, lambda _: 0.0)
  workdir_lib.create(workdir, config, metadata, data={})
  opt_state = jax.jit(tx.init)(params)  # Else each shape compiles by itself.
  state = state_lib.TrainState(np.int32(step), params, opt_state, extra or {})
  with checkpoints_lib.Checkpoints(workdir) as checkpoints:
    checkpoints.save(step, state)
  return workdir


def write_classifier(workdir, config, class_names):
  """Writes a run on grey images, with random parameters."""
  from tests import tiny_models
  from vit_jax.run import config as run_config

  config = run_config.complete(config)
  metadata = {'class_names': [*class_names]}
  task = run_config.get_task('classify')(config, metadata)
  params = tiny_models.numbers(task.model, config.pp.crop, channels=1)
  return write_run(workdir, config, metadata, params)


@pytest.fixture
def tiny_config(data_dir):
  """The config of `make_tiny_config`, which tests may change."""
  return make_tiny_config(data_dir)


@pytest.fixture(autouse=True)
def _checked_shapes(request):
  """Checks the shapes of arrays in the tests of layers and models."""
  from tests import shapes

  name = _name(request.path)
  shapes.enable(name.startswith(('layers/', 'models_')))
  yield
  shapes.enable(False)


@pytest.fixture
def unchecked_shapes(_checked_shapes):
  """Checks no shapes, in tests of the modules' own errors."""
  from tests import shapes

  shapes.enable(False)


@pytest.fixture(autouse=True)
def _nothing_insecure(monkeypatch):
  """Revokes what `--insecure` of a command allowed, at the end of each test."""
  monkeypatch.setenv('VIT_JAX_INSECURE', '')
