"""Tests of the weights of DINOv2 against transformers and timm."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.torch
import torch

from tests import torch_models, trees
from vit_jax import checkpoint, models, predict
from vit_jax.configs import vit as vit_config
from vit_jax.run import config as run_config, overrides
from vit_jax.weights import convert, fitting, writing

# Imported through torch_models, which sets up their environment.
timm = torch_models.timm
transformers = torch_models.transformers

SCALING = {'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225]}
# Number of registers, gated MLPs.
KINDS = [(0, False), (4, True)]
SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=4)


def transformers_model(registers, gated, **fields):
  """A tiny Hugging Face model for 12x12 images; `fields` override its config."""
  name = 'Dinov2WithRegisters' if registers else 'Dinov2'
  more = {'num_register_tokens': registers} if registers else {}
  sizes = dict(image_size=12, mlp_ratio=3, use_swiglu_ffn=gated, **SIZES)
  config = getattr(transformers, f'{name}Config')(**{**sizes, **more, **fields})
  return torch_models.randomize(getattr(transformers, f'{name}Model')(config))


def tokens_of(model, images, registers):
  """Class and patch tokens of a Hugging Face or timm model."""
  with torch.no_grad():
    images = torch.tensor(images).permute(0, 3, 1, 2)
    model = model.eval()
    if isinstance(model, transformers.PreTrainedModel):
      found = model(images).last_hidden_state.numpy()
    else:
      found = model.forward_features(images).numpy()
  return np.concatenate([found[:, :1], found[:, 1 + registers :]], axis=1)


def our_tokens(model, images, classifier='token_unpooled'):
  """The same for a vit_jax.weights.writing.Model."""
  return our_logits(model, images, num_classes=None, classifier=classifier)


def our_logits(model, images, **fields):
  module = models.make_model(model.config, **{'num_classes': 3, **fields})
  apply = jax.jit(functools.partial(module.apply, train=False))
  return np.asarray(apply({'params': model.params}, images))


def our_patches(folder, images, **kwargs):
  """The patch embeddings that `vit_jax predict --embeddings=patches` writes."""
  loaded = predict.load_weights(str(folder), image_size=images.shape[1:3], **kwargs)
  return loaded.embed(np.round((images + 1) * 127.5).astype(np.uint8), 'patches')


def loaded_whole(cls, folder):
  """Loads a Hugging Face model whose files must hold exactly its arrays."""
  model, info = cls.from_pretrained(folder, output_loading_info=True)
  assert not info['missing_keys']
  assert not info['unexpected_keys']
  return model


def assert_close(got, want):
  assert want.std() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.fixture(scope='module', params=KINDS, ids=str)
def saved(request, tmp_path_factory):
  """A Hugging Face folder, its model and the number of registers."""
  folder, theirs = tmp_path_factory.mktemp('hf'), transformers_model(*request.param)
  theirs.save_pretrained(folder)
  whole = {'size': {'height': 12, 'width': 12}, 'do_center_crop': False}
  (folder / 'preprocessor_config.json').write_text(json.dumps({**SCALING, **whole}))
  return folder, theirs, request.param[0]


def images_of(height, width):
  images = np.random.RandomState(0).randint(0, 256, (2, height, width, 3))
  return (images / 127.5 - 1).astype(np.float32)


def standardised(images):
  mean, std = SCALING.values()
  return ((images / 2 + 0.5 - mean) / std).astype(np.float32)


def test_tokens_match_hugging_face_for_scaled_pixels(saved):
  folder, theirs, registers = saved
  images = images_of(12, 12)
  model = writing.scaled(convert.read(str(folder)))
  want = tokens_of(theirs, standardised(images), registers)
  assert_close(our_tokens(model, images), want)
  assert_close(our_patches(folder, images), want[:, 1:].reshape(2, 3, 3, 16))
  # Fine-tuning starts from the same parameters.
  taken = fitting.transferable(str(folder), model.params, model.config)
  tree = fitting.flax.traverse_util.unflatten_dict(taken, sep='/')
  trees.assert_same(tree, model.params)


def fine_tuning(folder, **fields):
  """The config of a run that starts from weights and overrides model fields."""
  config = vit_config.get_config('pretrained,digits,8')
  config.pretrained = str(folder)
  keys = [(f'model.{key}', str(value)) for key, value in fields.items()]
  overrides.set_keys(config.lock(), keys)
  return checkpoint.with_model(config)


def start(folder, config):
  """Shapes of a model's parameters for 3 classes, and the ones taken from weights."""
  model = models.make_model(config, num_classes=3)
  init = functools.partial(model.init, jax.random.key(0), train=False)
  want = jax.eval_shape(init, np.zeros((1, 8, 8, 3)))['params']
  return want, fitting.transferable(str(folder), want, config)


@pytest.mark.parametrize('saved', KINDS[1:], indirect=True)
def test_run_takes_its_model_from_the_weights(saved, tmp_path):
  folder, *_ = saved
  config = fine_tuning(folder, **{'transformer.dropout_rate': 0.1})
  run_config.check_values(config)
  assert config.model.transformer.dropout_rate == 0.1
  found = convert.read(str(folder)).config
  assert config.model.registers == 4
  assert config.model.transformer.get('mlp') == found.transformer.get('mlp')
  want, taken = start(folder, config.model)
  rest = {'/'.join(path) for path in fitting.flax.traverse_util.flatten_dict(want)}
  assert rest - taken.keys() == {'head/kernel', 'head/bias'}
  convert.convert(str(folder), str(tmp_path / 'run'), 'workdir')
  other = fine_tuning(folder, **{'patches.size': (8, 8)}).model
  _, taken = start(folder, other)
  assert taken['embedding/kernel'].shape == (8, 8, 3, 16)
  for key in ('patches', 'hidden_size', 'classifier'):
    assert fine_tuning(tmp_path / 'run').model[key] == config.model[key]
  # A resumed run stores its model and does not need the weights.
  config = vit_config.get_config('pretrained,digits,8')
  assert (
    checkpoint.with_model(config, {'model': found.to_dict()}).model.hidden_size == 16
  )
  with pytest.raises(ValueError, match='pretrained=None.*--config.pretrained=PATH'):
    checkpoint.with_model(config)
  for fields, message in (
    ({'registers': 1}, 'model.registers=1, but .* a model with 4:'),
    ({'transformer.gelu': 'tanh'}, 'gelu=tanh, but .* a model with erf'),
  ):
    with pytest.raises(ValueError, match=message):
      fine_tuning(folder, **fields)


def test_timm_round_trip(saved, tmp_path):
  folder, theirs, registers = saved
  convert.convert(str(folder), str(tmp_path / 'timm'), 'timm')
  there = timm.create_model(f'local-dir:{tmp_path}/timm', pretrained=True)
  assert list(there.pretrained_cfg['std']) == SCALING['image_std']
  images = images_of(12, 12)
  want = tokens_of(theirs, images, registers)
  assert_close(tokens_of(there, images, registers), want)
  convert.convert(str(tmp_path / 'timm'), str(tmp_path / 'hf'), 'hf')
  again = loaded_whole(type(theirs), tmp_path / 'hf')
  assert_close(tokens_of(again, images, registers), want)
  for key, value in again.config.to_dict().items():
    if key in ('mlp_ratio', 'use_swiglu_ffn', 'num_register_tokens', 'layer_norm_eps'):
      assert value == getattr(theirs.config, key)
  processor = json.loads((tmp_path / 'hf' / 'preprocessor_config.json').read_text())
  assert {key: processor[key] for key in SCALING} == SCALING


def test_gated_mlps_of_rounded_widths_round_trip(tmp_path):
  """Two thirds of 4 * 64 are rounded up to 176, a multiple of 8."""
  theirs = transformers_model(0, True, hidden_size=64, mlp_ratio=4, num_hidden_layers=1)
  theirs.save_pretrained(tmp_path / 'a')
  convert.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'hf')
  again = loaded_whole(type(theirs), tmp_path / 'b')
  assert again.config.mlp_ratio == 4
  for name, x in theirs.state_dict().items():
    if 'mask_token' not in name:
      assert torch.equal(x, again.state_dict()[name]), name


def test_classifiers_on_class_token_and_mean_round_trip(tmp_path):
  """The mean excludes the registers."""
  labels = {0: 'ant', 1: 'bee', 2: 'cow'}
  sizes = dict(image_size=12, mlp_ratio=3, **SIZES, id2label=labels)
  cls = transformers.Dinov2WithRegistersForImageClassification
  theirs = cls(transformers.Dinov2WithRegistersConfig(num_register_tokens=4, **sizes))
  torch_models.randomize(theirs).save_pretrained(tmp_path / 'a')
  found = convert.read(str(tmp_path / 'a'))
  assert found.class_names == ('ant', 'bee', 'cow')
  images = images_of(12, 12)
  got = our_logits(found, images)
  assert_close(got, torch_models.logits(theirs, images))
  convert.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'hf')
  again = loaded_whole(cls, tmp_path / 'b')
  assert_close(torch_models.logits(again, images), torch_models.logits(theirs, images))
  with pytest.raises(
    ValueError, match='as timm, which cannot hold classifier=token_with_gap'
  ):
    convert.convert(str(tmp_path / 'a'), str(tmp_path / 'c'), 'timm')


@pytest.mark.parametrize(
  'name, registers',
  [('vit_giant_patch14_reg4_dinov2', 4), ('deit3_small_patch16_224', 0)],
)
def test_tokens_match_timm_for_non_square_images(tmp_path, name, registers):
  """Neither timm model adds position embeddings to the class token."""
  args = dict(
    depth=1, embed_dim=16, num_heads=2, img_size=(8, 12), patch_size=4, mlp_ratio=4
  )  # fmt: skip
  theirs = torch_models.randomize(timm.create_model(name, **args))
  timm.models.save_for_hf(theirs, tmp_path / 'a', model_args=args)
  found = convert.read(str(tmp_path / 'a'), gelu=None if registers else 'erf')
  assert found.config.get('registers', 0) == registers
  images = images_of(8, 12)
  assert_close(our_tokens(found, images), tokens_of(theirs, images, registers))
  if registers:
    convert.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'timm')
    again = timm.create_model(f'local-dir:{tmp_path}/b', pretrained=True)
    for key, value in again.state_dict().items():
      np.testing.assert_array_equal(value, theirs.state_dict()[key])
    with pytest.raises(ValueError, match='position embeddings of a square only'):
      convert.convert(str(tmp_path / 'a'), str(tmp_path / 'c'), 'hf')


def test_register_positions_are_merged_into_the_registers(tmp_path):
  args = dict(depth=1, embed_dim=16, num_heads=2, img_size=8, patch_size=4)
  args['num_classes'] = 3
  name = 'vit_so150m_patch16_reg4_gap_256'
  theirs = torch_models.randomize(timm.create_model(name, **args))
  timm.models.save_for_hf(theirs, tmp_path, model_args=args)
  found = convert.read(str(tmp_path), gelu='erf')
  images = images_of(8, 8)
  assert_close(our_logits(found, images), torch_models.logits(theirs, images))


def test_rejects_models_that_hugging_face_cannot_hold(tmp_path):
  args = dict(depth=1, embed_dim=16, num_heads=2, img_size=8, patch_size=4)
  args.update(reg_tokens=2, no_embed_class=True)
  theirs = timm.create_model('vit_small_patch16_224', **args)
  timm.models.save_for_hf(theirs, tmp_path, model_args=args)
  with pytest.raises(
    ValueError, match=r'written as hf, .*layer_scale=None: pass --to=npz\|timm\|workdir'
  ):
    convert.convert(str(tmp_path), str(tmp_path / 'hf'), 'hf')
  assert not (tmp_path / 'hf').exists()


@pytest.mark.parametrize('registers, gated', KINDS)
def test_hugging_face_dino_v3_round_trip(tmp_path, registers, gated):
  """Its rotary embeddings fit images of any size, and its keys have no bias."""
  act = {'use_gated_mlp': True, 'hidden_act': 'silu'} if gated else {}
  config = transformers.DINOv3ViTConfig(
    image_size=8,
    intermediate_size=24,
    num_register_tokens=registers,
    rope_theta=50.0 if gated else 100.0,
    **{**SIZES, 'num_hidden_layers': 1 if gated else 2},
    **act,
  )
  theirs = torch_models.randomize(transformers.DINOv3ViTModel(config))
  theirs.save_pretrained(tmp_path / 'a')
  found = convert.read(str(tmp_path / 'a'))
  images = images_of(8, 12)
  want = tokens_of(theirs, images, registers)
  assert_close(our_tokens(found, images), want)
  assert_close(our_tokens(found, images, 'token'), want[:, 0])
  convert.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'hf')
  again = loaded_whole(transformers.DINOv3ViTModel, tmp_path / 'b')
  assert_close(tokens_of(again, images, registers), want)
  with pytest.raises(
    ValueError, match=r'as npz, which cannot hold .*=rope: .*hf\|workdir'
  ):
    convert.convert(str(tmp_path / 'a'), str(tmp_path / 'c.npz'))


@pytest.mark.parametrize('saved', KINDS[1:], indirect=True)
def test_rejects_weights_that_contradict_their_config(saved, tmp_path):
  folder, *_ = saved
  shutil.copytree(folder, tmp_path / 'cut')
  file = tmp_path / 'cut' / 'model.safetensors'
  whole = safetensors.torch.load_file(file)
  for name, message in (
    ('.1.', 'num_layers=1, .* 2'),
    ('.query.', 'lacks arrays of the model in its'),
    ('register_tokens', 'registers=0, .* 4'),
  ):
    kept = {key: x for key, x in whole.items() if name not in key}
    safetensors.torch.save_file(kept, file)
    with pytest.raises(ValueError, match=f'{message}.*: download'):
      convert.read(str(tmp_path / 'cut'))
