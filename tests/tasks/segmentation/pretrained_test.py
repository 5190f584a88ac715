"""Tests of segmentation that starts from the weights of other Vision Transformers."""

import ast
import re

import flax.traverse_util
import jax
import numpy as np
import pytest

from tests import tiny_models, torch_models
from vit_jax import checkpoint
from vit_jax.commands import train as train_command
from vit_jax.configs import common
from vit_jax.learning import lora, optim
from vit_jax.run import config as run_config
from vit_jax.tasks.segmentation import encoders
from vit_jax.weights import reading

timm, transformers = torch_models.timm, torch_models.transformers

TIMM = dict(
  depth=1, embed_dim=16, num_heads=2, img_size=(8, 12), patch_size=4, num_classes=3
)


def write_timm(name, folder, **fields):
  args = {**TIMM, **fields}
  model = torch_models.randomize(timm.create_model(name, **args))
  args.pop('num_classes')
  timm.models.save_for_hf(model, folder, model_args=args)


def write_hf(name, folder):
  cls = getattr(transformers, name)
  model = torch_models.hf_model(
    cls, cls.config_class, num_hidden_layers=1, num_attention_heads=2
  )
  model.save_pretrained(folder)


def write_npz(folder):
  model = tiny_models.tiny()
  folder.mkdir()
  checkpoint.save(tiny_models.numbers(model, (8, 12)), folder / 'weights.npz')


# Family -> a function that writes a file of it, with one layer and patches of 4 pixels.
FILES = {
  'DINOv2': lambda folder: write_hf('Dinov2WithRegistersModel', folder),
  'DINOv3': lambda folder: write_hf('DINOv3ViTModel', folder),
  'EVA-02': lambda folder: write_timm('eva02_base_patch16_clip_224', folder),
  'BEiT': lambda folder: write_timm('beitv2_base_patch16_224', folder),
  'SigLIP': lambda folder: write_timm('vit_base_patch16_siglip_224', folder),
  'MAE': lambda folder: write_hf('ViTMAEModel', folder),
  'MAE, fine-tuned': lambda folder: write_timm(
    'vit_base_patch16_224', folder, global_pool='avg'
  ),
  'DeiT': lambda folder: write_timm('deit_base_distilled_patch16_224', folder),
  'AugReg': write_npz,
}
# Leaves of classifiers that segmenters do not read, and those of segmenters only.
READERS = ('head', 'pre_logits/', 'MAPHead_0/', 'pool_norm/')
NEW = ('head', 'queries', 'mask_mlp/', 'upscale_', 'class_head/')
LAST_NORM = {'Transformer/encoder_norm/scale', 'Transformer/encoder_norm/bias'}
ENCODER_FLAGS = (
  '--config.model.transformer.gelu=tanh',
  '--config.model.transformer.num_heads=2',
)
EOMT_FLAGS = (
  '--config.model.kind=eomt',
  '--config.model.num_query_layers=1',
  '--config.model.num_queries=5',
  '--config.task_options.max_classes=5',
)


def load(path, *flags):
  """Returns the shapes of a task's parameters, and what it takes from weights."""
  config = train_command.parse(
    [
      '--config=configs/vit.py:pretrained,/data',
      f'--config.pretrained={path}',
      '--config.task=segment_semantic',
      '--config.pp.crop=8,12',
      '--workdir=/tmp/run',
      *flags,
    ]
  ).config
  config = run_config.complete(checkpoint.with_model(config))
  task_class = run_config.get_task(config.task)
  task = task_class(config, task_class.planned_metadata(config, 5))
  params, extra = jax.eval_shape(task.init, jax.random.key(0))
  weights = checkpoint.pretrained_weights(config, task, params, extra)
  return flax.traverse_util.flatten_dict(params, sep='/'), weights


@pytest.mark.parametrize('family', FILES)
def test_encoders_of_all_families_start_segmenters(tmp_path, family, caplog):
  path = tmp_path / 'weights'
  FILES[family](path)
  flags = ()
  if family == 'AugReg':
    path = path / 'weights.npz'
    flags = ENCODER_FLAGS
  stored = flax.traverse_util.flatten_dict(reading.read(str(path), 2).params, sep='/')
  stored = {name: x for name, x in stored.items() if not name.startswith(READERS)}
  assert len(stored) > 15
  for head_flags in ((), EOMT_FLAGS):
    if family == 'BEiT' and head_flags:
      with pytest.raises(
        ValueError, match='queries without a place: use a linear head'
      ):
        load(path, *head_flags)
      continue
    params, weights = load(path, *flags, *head_flags)
    assert weights.keys() == stored.keys()
    new = params.keys() - weights.keys()
    if family == 'MAE, fine-tuned':
      new -= LAST_NORM
    assert all(name.startswith(NEW) for name in new)
    for name, x in weights.items():
      assert x.shape == params[name].shape
      if not name.startswith('embedding/'):  # Pixels have another scale here.
        np.testing.assert_array_equal(x, stored[name])
  assert 'num_query_layers' not in caplog.text  # Encoders have none.


@pytest.mark.parametrize('head_flags', [(), EOMT_FLAGS], ids=['linear', 'eomt'])
def test_adapters_freeze_the_encoder_and_train_new_parameters(tmp_path, head_flags):
  FILES['DINOv2'](tmp_path / 'weights')
  params, weights = load(tmp_path / 'weights', *head_flags)
  config = common.get_config()
  config.lora.rank = 2
  assert lora.base(weights, params, config).keys() == weights.keys()


def test_random_queries_are_not_frozen(tmp_path):
  FILES['DINOv2'](tmp_path / 'weights')
  params, weights = load(tmp_path / 'weights', *EOMT_FLAGS)
  config = common.get_config()
  config.lr_multipliers = (('head', 1.0), ('', 0.0))
  with pytest.raises(ValueError, match="freezes .*lacks, such as 'mask_mlp/") as error:
    encoders.check_frozen(config, weights, params)
  encoders.check_frozen(config, params, params)
  remedy = re.search('lr_multipliers="(.*)"', str(error.value))
  config.lr_multipliers = ast.literal_eval(remedy[1])
  encoders.check_frozen(config, weights, params)
  assert optim.frozen_sizes(config.lr_multipliers, params).keys() == weights.keys()
