"""Tests of weight conversion against timm and transformers."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import flax.traverse_util
import jax
import numpy as np
from PIL import Image
import pytest
from sklearn import datasets
import torch

from tests import models_test, tiny_models, torch_models, trees
from vit_jax import checkpoint, models, predict, preprocess
from vit_jax.commands import convert as convert_command
from vit_jax.configs import models as model_configs
from vit_jax.weights import convert, fitting, preparation, reading, writing
from vit_jax.weights.families import families, vit_files

# Imported through torch_models, which sets up their environment.
timm = torch_models.timm
transformers = torch_models.transformers


SHALLOW = dict(num_layers=1, mlp_dim=80, num_heads=3)


def random_model(name, size, num_classes=10, **fields):
  """Returns a model and parameters that give logits of order 1."""
  model = models.get_model(name, num_classes=num_classes, **fields)
  images = jax.ShapeDtypeStruct((1, *size, 3), np.float32)
  return model, jax.device_get(tiny_models.randomised(model, images))


def random_images(size, count=2):
  rng = np.random.RandomState(1)
  return rng.uniform(-1, 1, (count, *size, 3)).astype(np.float32)


def our_logits(model, params, images):
  apply = jax.jit(lambda p, x: model.apply({'params': p}, x, train=False))
  return np.asarray(apply(params, images))


def load_elsewhere(folder, kind):
  if kind == 'timm':
    return timm.create_model(f'local-dir:{folder}', pretrained=True)
  return transformers.ViTForImageClassification.from_pretrained(folder)


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """An .npz of a tiny model for images of 8 x 12, with its parameters."""
  model, params = random_model(
    'testing', (8, 12), num_classes=3, patches={'size': (4, 4)}
  )
  path = tmp_path_factory.mktemp('tiny') / 'tiny.npz'
  checkpoint.save(params, str(path))
  return str(path), model, params


@pytest.mark.parametrize(
  'name, size, kinds',
  [
    ('ti16', (32, 48), ('timm', 'hf', 'workdir')),
    ('s16_gap_norep', (48, 48), ('timm',)),
  ],
)
def test_logits_agree_and_round_trips_are_exact(tmp_path, name, size, kinds):
  encoder = {**SHALLOW, 'num_layers': 2}
  model, params = random_model(name, size, hidden_size=48, transformer=encoder)
  source = str(tmp_path / 'source.npz')
  checkpoint.save(params, source)
  images = random_images(size)
  ours = our_logits(model, params, images)
  assert 0.3 < ours.std() < 3
  for kind in kinds:
    there, back = str(tmp_path / kind), str(tmp_path / f'{kind}.npz')
    convert.convert(source, there, kind, image_size=size)
    convert.convert(there, back)
    trees.assert_same(checkpoint.load(back), params)
    if kind == 'workdir':
      run = predict.load(there)
      theirs = np.asarray(jax.jit(run.task.outputs)(run.params, {}, {'image': images}))
    else:
      theirs = torch_models.logits(load_elsewhere(there, kind), images)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
  if name == 'ti16':  # timm's own reader of published files builds the same model.
    theirs = timm.create_model(
      'vit_tiny_patch16_224', num_classes=10, act_layer='gelu_tanh', img_size=size,
      embed_dim=48, depth=2, mlp_ratio=80.1 / 48,
    )  # fmt: skip
    theirs.load_pretrained(source)
    np.testing.assert_allclose(ours, torch_models.logits(theirs, images), atol=1e-4)


@pytest.mark.parametrize('channels', [1, 2, 7])
def test_channels_are_adapted_as_in_timm(tmp_path, channels, caplog):
  encoder = {**SHALLOW, 'num_layers': 1}
  fields = dict(hidden_size=48, transformer=encoder)
  _, params = random_model('ti16', (32, 32), **fields)
  source = str(tmp_path / 'source.npz')
  checkpoint.save(params, source)
  theirs = timm.create_model(
    'vit_tiny_patch16_224', num_classes=10, act_layer='gelu_tanh', img_size=32,
    embed_dim=48, depth=1, mlp_ratio=80.1 / 48, in_chans=channels,
  )  # fmt: skip
  theirs.load_pretrained(source)
  model = models.get_model('ti16', num_classes=10, **fields)
  images = np.random.RandomState(2).uniform(-1, 1, (2, 32, 32, channels))
  images = images.astype(np.float32)
  init = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))
  loaded = fitting.transferable(
    source, init['params'], model_configs.get_config('ti16'), new=()
  )
  assert f'adapted embedding/kernel to {channels} channel' in caplog.text
  ours = our_logits(model, flax.traverse_util.unflatten_dict(loaded, sep='/'), images)
  assert ours.std() > 0.1
  np.testing.assert_allclose(ours, torch_models.logits(theirs, images), atol=1e-4)


def transforms_elsewhere(model, folder):
  """Returns functions from an image to pixels [H, W, C]: timm's, Hugging Face's."""
  notes = {kind: writing.WRITERS[kind](model, folder / kind) for kind in ('timm', 'hf')}
  theirs = load_elsewhere(folder / 'timm', 'timm')
  transform = timm.data.create_transform(
    **timm.data.resolve_data_config({}, model=theirs)
  )
  processor = transformers.AutoImageProcessor.from_pretrained(folder / 'hf')
  found = {
    'timm': lambda x: transform(x).permute(1, 2, 0).numpy(),
    'hf': lambda x: np.transpose(
      processor(x, return_tensors='np')['pixel_values'][0], (1, 2, 0)
    ),
  }
  if any('cannot resize' in note for note in notes['timm']):
    del found['timm']
  return found


@pytest.mark.parametrize(
  'size, resize, channels',
  [
    ((48, 48), 64, 3),
    ((50, 72), (80, 99), 3),
    ((32, 32), None, 1),
  ],
)
def test_other_libraries_preprocess_images_identically(
  tmp_path, size, resize, channels
):
  """timm and transformers produce our pixels in [-1, 1]; their defaults crop."""
  model, params = random_model('testing', size, patches={'size': (2, 2)})
  kernel = params['embedding']['kernel']
  params['embedding']['kernel'] = kernel[:, :, :channels]
  source = str(tmp_path / 'source.npz')
  checkpoint.save(params, source)
  how = preparation.Preparation(resize, crop=size, antialias=True)
  model = convert.read(source, image_size=size)._replace(preparation=how)
  run = writing.as_run(model)[0]
  found = transforms_elsewhere(model, tmp_path)
  assert ('timm' in found) == (resize != (80, 99))

  def check(image):
    ours = preprocess.from_user(
      image, lambda encoded: preprocess.prepare(encoded, None, run.pp).numpy()
    )
    assert ours.shape == (*size, channels)
    for kind, function in found.items():
      got = function(image)
      assert got.shape == ours.shape
      assert np.abs(got - ours).max() < 0.01, (kind, image.size)

  if channels == 1:
    for digit in datasets.load_digits().images[:2]:
      check(Image.fromarray((16 * digit).astype(np.uint8)))
    return
  photographs = [
    Image.fromarray(x[:400, :600]) for x in datasets.load_sample_images().images
  ]
  for photograph in photographs:
    check(photograph.reduce(10))  # Enlarged.
    check(photograph)


@pytest.mark.parametrize('name', ['vit_tiny_r_s16_p8_224', 'vit_small_r26_s32_224'])
def test_timm_hybrids_round_trip(tmp_path, name):
  args = dict(depth=1, img_size=(32, 64), act_layer='gelu_tanh')
  theirs = torch_models.randomize(timm.create_model(name, num_classes=3, **args))
  timm.models.save_for_hf(theirs, tmp_path / 'timm', model_args=args)
  found = convert.read(str(tmp_path / 'timm'))
  images = random_images((32, 64))
  want = torch_models.logits(theirs, images)
  assert want.std() > 0.1
  model = models.make_model(found.config, num_classes=3)
  ours = our_logits(model, found.params, images)
  np.testing.assert_allclose(ours, want, atol=1e-4)
  # Via a published file, with timm's epsilons in a file next to it.
  _, notes = convert.convert(str(tmp_path / 'timm'), str(tmp_path / 'a.npz'))
  assert 'model.resnet.eps=published, but these weights were made for timm' in notes[0]
  convert.convert(
    str(tmp_path / 'a.npz'), str(tmp_path / 'again'), 'timm', image_size=(32, 64)
  )
  for key, value in load_elsewhere(tmp_path / 'again', 'timm').state_dict().items():
    np.testing.assert_array_equal(value, theirs.state_dict()[key])


def test_timm_bit_resnets_round_trip(tmp_path):
  args = dict(stem_chs=32, channels=[128, 256, 512, 1024])  # Half the widths.
  name = 'resnetv2_50x1_bit'
  theirs = torch_models.randomize(timm.create_model(name, num_classes=10, **args))
  timm.models.save_for_hf(theirs, tmp_path / 'timm', model_args=args)
  npz, again = str(tmp_path / 'a.npz'), str(tmp_path / 'again')
  # An .npz keeps timm's epsilon in a file next to it.
  found, notes = convert.convert(str(tmp_path / 'timm'), npz)
  assert found.config.eps == convert.read(npz).config.eps == 'timm'
  assert tuple(found.config.num_layers) == (3, 4, 6, 3)
  assert 'model.eps=published, but these weights were made for tim' in notes[0]
  pathlib.Path(f'{npz}.json').unlink()
  found, notes = convert.convert(npz, again, 'timm')
  assert (found.image_size, found.num_classes) == ((224, 224), 10)
  assert 'model.eps=timm, but these weights were made for published' in notes[0]
  # timm's own reader of published files builds the same model.
  other = timm.create_model(name, num_classes=10, **args)
  other.load_pretrained(npz)
  for model in (load_elsewhere(again, 'timm'), other):
    trees.assert_same(dict(model.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize('name', ['BiT-R50x3', 'BiT-R101x1', 'BiT-R152x4'])
def test_bit_resnet_sizes_match_timm(name):
  root = {'conv_root': {'kernel': np.zeros((7, 7, 3, 64))}}
  config = model_configs.get_config(name)
  model = writing.Model({'root_block': root}, config, None, 1000, (224, 224))
  architecture, args = vit_files.timm_bit(model)
  with torch.device('meta'):  # Shapes only.
    theirs = timm.create_model(architecture, **args)
  assert sum(x.numel() for x in theirs.parameters()) == models_test.COUNTS[name]


def test_every_format_keeps_hugging_face_settings(tmp_path):
  """Exact GELU, eps 1e-12 and the class names, in a run, an .npz and for timm."""
  theirs = torch_models.hf_model()
  theirs.save_pretrained(tmp_path / 'hf')
  convert.convert(str(tmp_path / 'hf'), str(tmp_path / 'run'), 'workdir')
  run = predict.load(str(tmp_path / 'run'))
  assert run.class_names == ('ant', 'bee', 'cow')
  assert run.config.model.transformer.gelu == 'erf'
  assert run.config.model.transformer.norm_eps == 1e-12
  pixels = np.random.RandomState(0).randint(0, 256, (2, 8, 12, 3), np.uint8)
  want = torch_models.logits(theirs, pixels.astype(np.float32) / 127.5 - 1)
  np.testing.assert_allclose(run.logits(list(pixels)), want, atol=1e-4)
  [top, _] = run.predict(list(pixels))
  assert top[0][0] == run.class_names[want[0].argmax()]
  # For an .npz they are stored in a file next to it.
  _, notes = convert.convert(str(tmp_path / 'run'), str(tmp_path / 'a.npz'))
  assert any('gelu=tanh, but these weights were made for erf' in note for note in notes)
  convert.convert(
    str(tmp_path / 'a.npz'), str(tmp_path / 'timm'), 'timm', image_size=(8, 12)
  )
  images = random_images((8, 12))
  timm_model = load_elsewhere(tmp_path / 'timm', 'timm')
  np.testing.assert_allclose(
    torch_models.logits(timm_model, images),
    torch_models.logits(theirs, images),
    atol=1e-4,
  )
  assert reading.read(str(tmp_path / 'timm')).class_names == run.class_names


def check_both_ways(tmp_path, theirs, kind, want, images):
  """Compares outputs with `want`; returns the config and the model converted back."""
  found = convert.read(str(tmp_path / 'there'))
  sizes = (found.num_classes, 0) if found.num_classes else (0,)
  made = [models.make_model(found.config, num_classes=n) for n in sizes]
  apply = jax.jit(lambda p, x: [m.apply({'params': p}, x, train=False) for m in made])
  for got, expected in zip(apply(found.params, images), want, strict=True):
    assert 0.1 < np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
  convert.convert(str(tmp_path / 'there'), str(tmp_path / 'back'), kind)
  if kind == 'timm':
    back = load_elsewhere(tmp_path / 'back', kind)
  else:
    back = type(theirs).from_pretrained(tmp_path / 'back')
  return found.config, back


@pytest.mark.parametrize(
  'name, fields, expected',
  [
    ('deit_tiny_distilled_patch16_224', {}, dict(distilled=True)),
    (
      'vit_tiny_patch16_224',
      dict(global_pool='avg', qk_norm=True, qkv_bias=False),
      dict(classifier='token_gap', pool_norm=True),
    ),
    ('vit_base_patch16_clip_quickgelu_224', {}, dict(classifier='token')),
    ('vit_base_patch32_siglip_256', dict(img_size=8), dict(classifier='map')),
    ('vit_base_patch32_siglip_256', dict(class_token=True),
     dict(classifier='token_map')),
  ],
)  # fmt: skip
def test_timm_variants_round_trip(tmp_path, name, fields, expected):
  args = dict(depth=1, embed_dim=24, num_heads=3, img_size=(8, 12), patch_size=4)
  args.update(fields, num_classes=3)
  theirs = torch_models.randomize(timm.create_model(name, **args)).eval()
  timm.models.save_for_hf(theirs, tmp_path / 'there', model_args=args)
  size = args['img_size']
  images = random_images((size, size) if isinstance(size, int) else size)
  with torch.no_grad():
    tokens = theirs.forward_features(torch.tensor(images).permute(0, 3, 1, 2))
    want = [theirs.forward_head(tokens, pre_logits=x).numpy() for x in (False, True)]
  config, back = check_both_ways(tmp_path, theirs, 'timm', want, images)
  assert {key: config[key] for key in expected} == expected
  np.testing.assert_allclose(torch_models.logits(back, images), want[0], atol=1e-6)
  if not theirs.no_embed_class:
    trees.assert_same(dict(back.state_dict()), dict(theirs.state_dict()))


_MAE = dict(
  image_size=8, mask_ratio=0.0, decoder_hidden_size=8, decoder_num_hidden_layers=1,
  decoder_num_attention_heads=2, decoder_intermediate_size=8,
)  # fmt: skip


@pytest.mark.parametrize(
  'kind, name, fields',
  [
    ('DeiT', 'DeiTForImageClassificationWithTeacher', {}),
    ('IJepa', 'IJepaModel', {}),
    ('ViTMAE', 'ViTMAEForPreTraining', _MAE),
  ],
)
def test_hugging_face_variants_round_trip(tmp_path, kind, name, fields):
  cls, config = (getattr(transformers, x) for x in (name, f'{kind}Config'))
  theirs = torch_models.hf_model(cls, config, **fields).eval()
  theirs.save_pretrained(tmp_path / 'there')
  theirs = getattr(theirs, 'vit', theirs)  # Without MAE's decoder.
  images = random_images((8, 8) if kind == 'ViTMAE' else (8, 12))
  pixels = torch.tensor(images).permute(0, 3, 1, 2)
  # Ascending noise keeps the patches in order.
  noise = {'noise': torch.arange(4.0).expand(2, -1)} if kind == 'ViTMAE' else {}
  with torch.no_grad():
    tokens = getattr(theirs, 'deit', theirs)(pixels, **noise).last_hidden_state
    if kind == 'DeiT':
      want = [theirs(pixels).logits.numpy(), tokens[:, :2].mean(1).numpy()]
    else:
      want = [(tokens.mean(1) if kind == 'IJepa' else tokens[:, 0]).numpy()]
  back = check_both_ways(tmp_path, theirs, 'hf', want, images)[1]
  trees.assert_same(dict(back.state_dict()), dict(theirs.state_dict()))


def test_moco_v3(tmp_path):
  """Its file holds two named encoders and fixed position embeddings."""
  args = dict(depth=1, embed_dim=16, num_heads=2, img_size=8, patch_size=4)
  name = 'vit_small_patch16_224'
  theirs = torch_models.randomize(timm.create_model(name, **args, num_classes=0))
  angles = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])[..., None]
  angles = angles * torch.tensor([1.0, 0.1, 0.01, 0.001])  # [N, 2, D / 4].
  table = torch.stack([angles.sin(), angles.cos()], 2).reshape(4, 16)
  theirs.pos_embed.data[:] = torch.cat([torch.zeros(1, 16), table])
  state = {
    f'module.{part}_encoder.{key}': x if part == 'base' else x + 1
    for part in ('base', 'momentum')
    for key, x in theirs.state_dict().items()
  }
  for key in ('base_encoder.head.0', 'momentum_encoder.head.0', 'predictor.0'):
    state[f'module.{key}.weight'] = torch.ones(3, 3)
  file = tmp_path / 'vit-s-300ep.pth.tar'
  torch.save({'epoch': 300, 'state_dict': state, 'optimizer': {'state': {}}}, file)
  found = convert.read(str(file), num_heads=2, gelu='erf')
  images = random_images((8, 8))
  model = models.make_model(found.config, num_classes=None)
  np.testing.assert_allclose(
    our_logits(model, found.params, images),
    torch_models.logits(theirs, images),
    atol=1e-4,
  )


# Hugging Face classes and the names of their outputs.
@pytest.mark.parametrize(
  'config, name, result, fields',
  [
    ('ViTConfig', 'ViTModel', 'pooler_output', {'hidden_act': 'gelu_python'}),
    ('DeiTConfig', 'DeiTForImageClassification', 'logits', {}),
    ('CLIPVisionConfig', 'CLIPVisionModelWithProjection', None, {}),
    ('SiglipVisionConfig', 'SiglipVisionModel', 'pooler_output', {}),
    ('SiglipConfig', 'SiglipForImageClassification', 'logits', {}),
  ],
)
def test_reads_hugging_face_towers_and_single_heads(
  tmp_path, config, name, result, fields
):
  if not config.startswith(('ViT', 'DeiT')):  # They require square images.
    fields = dict(image_size=12)
  if config == 'SiglipConfig':
    sizes = dict(
      hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    fields = dict(
      vision_config=dict(**sizes, image_size=12, patch_size=4), text_config=sizes
    )
  cls, config = (getattr(transformers, x) for x in (name, config))
  theirs = torch_models.hf_model(cls, config, **fields).eval()
  theirs.save_pretrained(tmp_path / 'there')
  found = convert.read(str(tmp_path / 'there'))
  images = random_images(found.image_size)
  with torch.no_grad():
    pixels = torch.tensor(images).permute(0, 3, 1, 2)
    want = getattr(theirs, 'vision_model', theirs)(pixels) if result is None else None
    want = getattr(want or theirs(pixels), result or 'pooler_output').numpy()
  model = models.make_model(found.config, num_classes=found.num_classes)
  got = jax.jit(functools.partial(model.apply, train=False))
  np.testing.assert_allclose(
    got({'params': found.params}, images), want, atol=1e-4 * np.abs(want).max()
  )


def test_relative_paths(tmp_path, tiny, monkeypatch):
  path, _, params = tiny
  monkeypatch.chdir(tmp_path)
  convert.convert(path, 'run', 'workdir', image_size=(8, 12))
  trees.assert_same(checkpoint.load('run'), params)
  trees.assert_same(jax.device_get(predict.load('run').params), params)
  convert.convert('run', 'run.npz')
  convert.convert('run.npz', 'timm', 'timm', image_size=(8, 12))
  convert.convert('timm/model.safetensors', 'back.npz')
  trees.assert_same(checkpoint.load('back.npz'), params)
  assert not list(tmp_path.glob('.*'))


def test_head_and_pre_logits_round_trip(tmp_path):
  _, params = random_model('testing', (32, 32), num_classes=3, representation_size=6)
  source, there = str(tmp_path / 'a.npz'), str(tmp_path / 'hf')
  checkpoint.save(params, source)
  _, notes = convert.convert(source, there, 'hf', class_names=['a', 'b', 'c'])
  assert 'pre-logits layer' in notes[-1]
  _, notes = convert.convert(there, str(tmp_path / 'b.npz'))
  trees.assert_same(checkpoint.load(str(tmp_path / 'b.npz')), params)
  assert 'b.npz.json, where this package finds them' in notes[-1]
  assert convert.read(str(tmp_path / 'b.npz')).class_names == ('a', 'b', 'c')


def test_rejects_impossible_conversions(tmp_path, tiny):
  for name, size, kind, fields, message in (
    ('r_ti16', (32, 32), 'hf', {'transformer': SHALLOW}, 'Hugging Face.s transf'),
    ('bit_r50x1', (64, 64), 'hf', {'num_layers': (1,)}, 'no ResNet: write'),
    ('mixer_b32', (64, 64), 'timm', {'num_blocks': 1}, 'no counterpart in timm'),
    ('bit_r50x2', (64, 64), 'timm', {'num_layers': (1,)}, 'timm has no BiT ResN'),
  ):
    _, params = random_model(name, size, **fields)
    source = str(tmp_path / f'{name}.npz')
    checkpoint.save(params, source)
    with pytest.raises(ValueError, match=message):
      convert.convert(source, str(tmp_path / 'no'), kind, image_size=size)
    assert not (tmp_path / 'no').exists()
  path, *_ = tiny
  with pytest.raises(ValueError, match='makes 2 x 2 patches, but .* for 6'):
    convert.convert(path, str(tmp_path / 'no'), 'hf', image_size=(8, 8))
  with pytest.raises(ValueError, match='class_names has 2 names, .* 3 classes'):
    convert.convert(path, str(tmp_path / 'no'), 'hf', class_names=['a', 'b'])
  with pytest.raises(ValueError, match=r'--to=npz\|timm\|hf\|peft\|pth\|workdir'):
    convert.convert(path, str(tmp_path / 'no'))
  with pytest.raises(FileExistsError, match='exists: use another'):
    convert.convert(path, path)
  with pytest.raises(OSError, match="DST '/proc/o' cannot be written: "):
    convert.convert(path, '/proc/o', 'hf', image_size=(8, 12))
  with pytest.raises(OSError, match=r"DST '.*\.npz' cannot be written: .*File exists"):
    convert.convert(path, f'{path}/below_a_file.npz', image_size=(8, 12))
  assert not list(tmp_path.glob('.*'))


@pytest.mark.parametrize('to', ['timm', 'hf'])
def test_no_program_has_a_distillation_token_and_registers(to):
  fields = {'distilled': True, 'registers': 2, 'transformer': {'layer_scale': 1e-5}}
  family = families.from_config(fields)
  assert family.missing(fields, to) == ['distilled=True']
  assert family.missing({**fields, 'distilled': False}, to) == []


@pytest.mark.parametrize(
  'options, message',
  [
    ({'image_size': 8}, r'image_size=8 must be \(height, width\).*--image_size'),
    ({'image_size': (8, 13)}, 'image_size=8,13 must be multiples .*--image_size'),
    ({'num_heads': 'two'}, "num_heads='two' must be an integer .*--num_heads"),
    ({'num_heads': 3}, "num_heads=3, but the model in '.*npz' has 2.*--num_heads"),
  ],
)
def test_errors_name_the_arguments_of_the_call(tiny, options, message):
  path, *_ = tiny
  with pytest.raises(ValueError, match=message) as error:
    convert.read(path, **options)
  assert 'config.' not in str(error.value)
  with pytest.raises(FileNotFoundError, match=r"no weights file '/no\.npz'") as error:
    convert.read('/no.npz')
  assert 'config.' not in str(error.value)


def test_encoder_variations_are_kept_or_rejected(tmp_path):
  path, again = str(tmp_path / 'a.npz'), str(tmp_path / 'b.npz')
  for fields in (
    {'attention_pattern': 'axial'},
    dict(norm='rms', qkv_bias=False, qk_norm=True, parallel=True),
  ):
    _, params = random_model(
      'ti16', (32, 32), transformer={**SHALLOW, **fields}, classifier='gap'
    )
    checkpoint.save(params, path)
    model = convert.read(path)
    assert {key: model.config.transformer[key] for key in fields} == fields
    for to in ('timm', 'hf'):
      with pytest.raises(ValueError, match=rf'as {to}, .*: pass --to=npz\|.*workdir'):
        convert.convert(path, str(tmp_path / 'no'), to, image_size=(32, 32))
  convert.convert(path, str(tmp_path / 'run'), 'workdir', image_size=(32, 32))
  _, notes = convert.convert(str(tmp_path / 'run'), again)
  assert not any('norm' in note for note in notes)
  trees.assert_same(checkpoint.load(again), params)
  # Parameters do not reveal whether norms subtract the mean or attention is masked.
  local = {'attention_pattern': 'local', 'attention_window': 3}
  model.config.transformer.update(norm='layer_no_bias', **local)
  notes = writing.WRITERS['npz'](model, tmp_path / 'c.npz')
  assert any('norm=rms, but these weights were made for layer_no' in x for x in notes)
  encoder = convert.read(str(tmp_path / 'c.npz')).config.transformer
  assert (encoder.norm, encoder.parallel) == ('layer_no_bias', True)
  assert (encoder.attention_pattern, encoder.attention_window) == ('local', 3)


def test_command_line(tmp_path, tiny, capsys):
  path, *_ = tiny
  (tmp_path / 'names.txt').write_text('ant\nbee\ncow\n')
  convert_command.main(
    [
      path, str(tmp_path / 'hf'), '--to=hf', '--image_size=8,12',
      f'--class_names={tmp_path}/names.txt',
    ]
  )  # fmt: skip
  out = capsys.readouterr().out
  assert 'ViT of 1 layers, width 10' in out
  assert 'images of 8x12, 3 classes' in out
  config = json.loads((tmp_path / 'hf' / 'config.json').read_text())
  assert config['id2label'] == {'0': 'ant', '1': 'bee', '2': 'cow'}
  assert config['image_size'] == [8, 12]


def test_run_starts_from_a_timm_bit_resnet(tmp_path):
  theirs = torch_models.randomize(
    timm.models.resnetv2._create_resnetv2_bit(
      'resnetv2_50x1_bit', layers=(1,), width_factor=0.5, in_chans=1
    )
  )
  path = str(tmp_path / 'bit.bin')
  torch.save(theirs.state_dict(), path)
  config = model_configs.get_config('bit_r50x1')
  config.update(num_layers=(1,), width_factor=0.5)
  images = np.zeros((1, 8, 8, 1), np.float32)
  want = tiny_models.tree(models.make_model(config, num_classes=10), images)
  taken = checkpoint.transferable(path, want, config)
  assert len(jax.tree.leaves(want)) - len(taken) == 2  # The head is new.
  np.testing.assert_array_equal(
    taken['block1/unit01/conv2/kernel'],
    theirs.stages[0].blocks[0].conv2.weight.detach().permute(2, 3, 1, 0),
  )
  config.width_factor = 1.0
  wider = tiny_models.tree(models.make_model(config, num_classes=10), images)
  message = r'looks like BiT ResNet of \(1,\) units, 0.5 times the width'
  with pytest.raises(ValueError, match=message):
    checkpoint.transferable(path, wider, config)


def test_conversion_does_not_need_tensorflow(tmp_path, tiny):
  script = f"""if True:
    import sys
    from vit_jax.weights import convert
    convert.convert({tiny[0]!r}, 'a', 'timm', image_size=(8, 12))
    convert.convert('a', 'b', 'hf')
    convert.convert('b', 'c.npz')
    slow = {{'tensorflow', 'tensorflow_datasets', 'torch', 'triton'}}
    assert not slow & {{*sys.modules}}
  """
  done = subprocess.run(
    [sys.executable, '-c', script], cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': f'{tmp_path}:{pathlib.Path.cwd()}'},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, '')
