"""Tests that the inputs of inference match `input_spec`."""

import jax
import numpy as np
import pytest

from tests import conftest
from tests.tasks import masked_patches_test
from tests.tasks.detection import detect_canvases_test, segment_test
from tests.tasks.pixels import pixels_test
from vit_jax import models
from vit_jax.data.images import images
from vit_jax.inference import predictor
from vit_jax.run import config as run_config
from vit_jax.tasks import classify
from vit_jax.tasks.detection import detect, segment
from vit_jax.tasks.pixels import finetune as pixels_finetune
from vit_jax.tasks.regression import regress


def make_classify(data_dir):
  config = run_config.complete(conftest.make_tiny_config(data_dir))
  return classify.Task(config, {'class_names': ['a', 'b']})


def make_detect(data_dir):
  config = segment_test.make_config()
  config.task = 'detect'
  config.task_options = {'max_objects': 4}
  return detect.Task(run_config.complete(config), {'class_names': ['a', 'b']})


def make_canvases(tmp_path):
  detect_canvases_test.write_images(tmp_path)
  config = run_config.complete(detect_canvases_test.make_config(tmp_path))
  return detect.Task(config, {'class_names': ['even', 'odd']})


def make_regress(data_dir):
  config = conftest.make_tiny_config(data_dir)
  config.task_options = {'targets': ('age', 'weight')}
  config.task = 'regress'
  config = run_config.complete(config)
  return regress.Task(config, regress.Task.planned_metadata(config, None))


TASKS = {
  'classify': make_classify,
  'masked_patches': masked_patches_test.make_task,
  'pixels': pixels_test.make_task,
  'pixels_finetune': lambda data_dir: pixels_test.make_task(
    data_dir, pixels_finetune.Task
  ),
  'detect': make_detect,
  'segment': lambda _: segment.Task(segment_test.make_config(), segment_test.METADATA),
  'regress': make_regress,
  'canvases': make_canvases,
}


@pytest.mark.parametrize('name', TASKS)
def test_inference_inputs_match_the_input_spec(name, data_dir, tmp_path, monkeypatch):
  monkeypatch.setitem(models.KINDS, 'tiny_detector', detect_canvases_test.TinyDetector)
  task = TASKS[name](tmp_path if name == 'canvases' else data_dir)
  pixels = np.zeros((20, 24, 3), np.uint8)
  record = {'image': images.encode_png(pixels), 'index': np.int64(0)}
  read = jax.tree.map(np.asarray, task.inputs(record))
  spec = task.input_spec()
  want = {key: ((1, *x.shape), x.dtype) for key, x in read.items()}
  assert {key: (x.shape, x.dtype) for key, x in spec.items()} == want
  assert ('real' in spec) == (name == 'canvases')

  state = jax.eval_shape(task.init, jax.random.key(0))
  outputs = jax.eval_shape(task.outputs, *state, task.input_spec(batch=5))
  model = predictor.Predictor(task, *state, 0)
  inputs, nothing = model.run([])
  assert inputs.keys() == read.keys()
  of_none = jax.tree.map(lambda x: (0, *x.shape[1:]), outputs)
  assert jax.tree.map(lambda x: x.shape, nothing) == of_none

  larger = task.input_spec((16, 32), batch=3)
  assert larger['image'].shape == (3, 16, 32, task.config.pp.channels)
  if name == 'masked_patches':
    assert larger['fate'].shape[1] == 16 * 32 // np.prod(task.patch)
