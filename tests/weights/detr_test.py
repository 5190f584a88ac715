"""Tests of converting detector weights."""

import json

import flax.traverse_util
import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests import tiny_models, torch_models, trees
from tests.weights import conftest
from vit_jax import checkpoint, models, models_detr, predict, train
from vit_jax.distributed import sharding
from vit_jax.layers import resnet
from vit_jax.weights import card, convert, reading, writing
from vit_jax.weights.families import families

transformers = torch_models.transformers

BACKBONE = dict(
  embedding_size=4, hidden_sizes=[16, 32], depths=[1, 2], layer_type='bottleneck'
)
CLASSES = {0: 'N/A', 1: 'cat', 3: 'dog'}  # Ids with a gap, as in COCO.


def hf_detr():
  """A tiny Hugging Face detector with a Transformers backbone."""
  backbone = transformers.ResNetConfig(**BACKBONE, out_features=['stage2'])
  sides = ('encoder', 'decoder')
  config = transformers.DetrConfig(
    backbone_config=backbone, use_timm_backbone=False, num_queries=7, num_labels=4,
    d_model=16, encoder_layers=1, decoder_layers=2,
    **{f'{side}_attention_heads': 4 for side in sides},
    **{f'{side}_ffn_dim': 24 for side in sides},
  )  # fmt: skip
  model = torch_models.randomize(transformers.DetrForObjectDetection(config))
  rng = torch.Generator().manual_seed(1)
  for value in model.buffers():
    value.copy_(torch.rand(value.shape, generator=rng) / 2 + 0.7)
  return model.eval()


def outputs_of(theirs, images):
  """Logits and boxes of Hugging Face's model for images in [-1, 1]."""
  pixels = (images / 2 + 0.5 - models_detr.MEAN) / models_detr.STD
  with torch.no_grad():
    found = theirs(torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2))
  return found.logits.numpy(), found.pred_boxes.numpy()


def released(state):
  """Renames a Hugging Face state dict to the names in the released files."""
  result = {}
  for name, value in state.items():
    for old, new in (
      ('model.backbone.model.embedder.embedder.convolution', 'backbone.0.body.conv1'),
      ('model.backbone.model.embedder.embedder.normalization', 'backbone.0.body.bn1'),
      ('model.backbone.model.encoder.stages.0.layers.', 'backbone.0.body.layer1.'),
      ('model.backbone.model.encoder.stages.1.layers.', 'backbone.0.body.layer2.'),
      ('layer.0.convolution', 'conv1'), ('layer.0.normalization', 'bn1'),
      ('layer.1.convolution', 'conv2'), ('layer.1.normalization', 'bn2'),
      ('layer.2.convolution', 'conv3'), ('layer.2.normalization', 'bn3'),
      ('shortcut.convolution', 'downsample.0'),
      ('shortcut.normalization', 'downsample.1'),
      ('model.query_position_embeddings', 'query_embed'),
      ('model.input_projection', 'input_proj'),
      ('model.encoder', 'transformer.encoder'),
      ('model.decoder.layernorm', 'transformer.decoder.norm'),
      ('model.decoder', 'transformer.decoder'),
      ('encoder_attn_layer_norm', 'norm2'), ('self_attn_layer_norm', 'norm1'),
      ('final_layer_norm', 'norm3' if 'decoder' in name else 'norm2'),
      ('encoder_attn', 'multihead_attn'), ('o_proj', 'out_proj'),
      ('mlp.fc', 'linear'), ('class_labels_classifier', 'class_embed'),
      ('bbox_predictor', 'bbox_embed'),
    ):  # fmt: skip
      name = name.replace(old, new)
    result[name] = value.numpy()
  for name in [name for name in result if '.q_proj.' in name]:
    joined = [result.pop(name.replace('.q_', f'.{x}_')) for x in 'qkv']
    name = name.replace('.q_proj.', '.in_proj_')
    result[name] = np.concatenate(joined)
  return result


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """A Hugging Face folder and the model in it."""
  folder = tmp_path_factory.mktemp('detr')
  theirs = hf_detr()
  theirs.save_pretrained(folder)
  config = json.loads((folder / 'config.json').read_text())
  config['id2label'] = {str(k): v for k, v in CLASSES.items()}
  (folder / 'config.json').write_text(json.dumps(config))
  return folder, theirs


@pytest.fixture(scope='module')
def found(good):
  return convert.read(str(good[0]))


def tree_of(model):
  return {**model.params, **model.extra}


def test_all_layouts_hold_the_same_detector(good, found, tmp_path):
  folder, theirs = good
  assert found.class_names == ('N/A', 'cat', 'N/A', 'dog')
  images = np.random.RandomState(0).uniform(-1, 1, (2, 24, 40, 3))
  model = models.make_model(found.config, num_classes=found.num_classes)
  got = jax.jit(lambda v, x: model.apply(v, x, train=False))(
    {'params': found.params, **found.extra}, images.astype(np.float32)
  )
  want = outputs_of(theirs, images)
  assert want[0].std() > 0.3
  np.testing.assert_allclose(got['logits'][-1], want[0], atol=1e-4)
  np.testing.assert_allclose(got['boxes'][-1], want[1], atol=1e-4)
  # To a run, to the released layout in two formats, and back.
  source = str(folder)
  for name, to in (
    ('run', 'workdir'),
    ('a.pth', None),
    ('b.safetensors', 'pth'),
    ('hf', 'hf'),
  ):
    there = str(tmp_path / name)
    _, notes = convert.convert(source, there, to, num_heads=4)
    again = convert.read(there, num_heads=4)
    trees.assert_same(tree_of(again), tree_of(found))
    fields, want_fields = (
      json.loads(x.config.copy_and_resolve_references().to_json())
      for x in (again, found)
    )
    assert {**fields, **want_fields} == fields
    assert bool(notes) == (name != 'run')  # Only the file name reveals the dilation.
    source = there
  run = convert.read(str(tmp_path / 'run'))
  text = card.make(run, str(tmp_path / 'run'), tmp_path / 'hf', 'me/pets')
  assert 'pipeline_tag: object-detection' in text
  assert '- task: detect, 4 classes' in text
  assert "DetrForObjectDetection.from_pretrained('me/pets')" in text
  # The released layout matches an independent renaming of the state dict.
  state = released(theirs.state_dict())
  other = safetensors.numpy.load_file(tmp_path / 'b.safetensors')
  assert other.keys() == state.keys()
  for name, value in state.items():
    np.testing.assert_array_equal(other[name], value)
  # Hugging Face loads the converted weights.
  theirs_again = transformers.DetrForObjectDetection.from_pretrained(
    tmp_path / 'hf'
  ).eval()
  for ours, before in zip(outputs_of(theirs_again, images), want):
    np.testing.assert_array_equal(ours, before)


def test_dilation_is_read_from_the_released_file_name(good, tmp_path):
  _, theirs = good
  state = {k: torch.tensor(v) for k, v in released(theirs.state_dict()).items()}
  for name in ('detr-r50-dc5-f0fb7ef5.pth', 'detr-r50-e632da11.pth'):
    torch.save({'model': state}, tmp_path / name)
    config = convert.read(str(tmp_path / name), num_heads=4).config
    assert config.dilate_last == ('dc5' in name)
  with pytest.raises(ValueError, match='how many attention heads its model of width'):
    convert.read(str(tmp_path / name))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'position_embedding_type': 'learned'}, "is 'learned', but .* 'sine'"),
    ({'decoder_attention_heads': 2}, 'decoder_attention_heads is 2, but .* with 4'),
    ({'id2label': {'9' * 30: 'a'}}, 'id2label is .* but must be an object'),
    ({'backbone_config': {'hidden_act': 'gelu'}}, "hidden_act is 'gelu', but .* 'relu'"),
  ],
)  # fmt: skip
def test_rejects_unsupported_configs(good, tmp_path, fields, message):
  with pytest.raises(ValueError, match=f"config.json' cannot be used: .*{message}"):
    reading.read(conftest.changed(good[0], tmp_path, config=fields))


LAYER = 'model.encoder.layers.0.'
NORM = 'model.backbone.conv_encoder.model.embedder.embedder.normalization.'


@pytest.mark.parametrize(
  'change, message',
  [
    ({'class_labels_classifier.bias': None}, 'class_head/bias: missing in'),
    ({f'{NORM}weight': np.ones(5, np.float32)}, r'bn_root/scale: \(5,\) in the'),
    ({f'{LAYER}norm.weight': np.ones(4, np.float32)}, 'not the weights of a DETR.*layers.0.norm'),
  ],
)  # fmt: skip
def test_rejects_incomplete_detectors(good, tmp_path, change, message):
  with pytest.raises(ValueError, match=message) as error:
    convert.read(conftest.changed(good[0], tmp_path, change))
  assert str(tmp_path) in str(error.value)


def test_selects_some_classes_of_a_detector(good, found):
  some = convert.read(str(good[0]), class_names=('dog', 'cat'))
  assert (some.class_names, some.num_classes) == (('dog', 'cat'), 2)
  np.testing.assert_array_equal(
    some.params['class_head']['kernel'],
    found.params['class_head']['kernel'][:, [3, 1, 4]],
  )
  with pytest.raises(ValueError, match='class_names has 1 name, .* 4 classes'):
    convert.read(str(good[0]), class_names=('cow',))


def test_rejects_formats_that_cannot_hold_a_detector(good, tmp_path):
  for to in ('timm', 'npz'):
    with pytest.raises(
      ValueError, match=rf'DETR of 1\+2 .* as {to}: pass --to=hf\|pth\|workdir'
    ):
      convert.convert(str(good[0]), str(tmp_path / f'a.{to}'), to)
  with pytest.raises(ValueError, match='must end in .pth or .safetensors'):
    convert.convert(str(good[0]), str(tmp_path / 'a'), 'pth')
  assert not list(tmp_path.iterdir())


def program_of(found, class_names):
  """The program of a run with the same model as the weights."""
  config, _ = writing.as_run(found)
  config.pp.crop = 24
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  names = {'class_names': list(class_names)}
  return train.make_program(config, names, mesh)


def weights_for(program, path):
  config, abstract = program.task.config, program.abstract
  config.pretrained = str(path)
  return checkpoint.pretrained_weights(
    config, program.task, abstract.params, abstract.extra
  )


@pytest.fixture(scope='module')
def program(found):
  return program_of(found, ('cat', 'cow'))


def test_run_starts_from_a_detector_with_rows_for_its_classes(good, found, program):
  weights = weights_for(program, good[0])
  state = program.create_state(weights)
  assert state.params['class_head']['kernel'].shape == (16, 3)
  got = flax.traverse_util.flatten_dict(
    jax.device_get({**state.params, **state.extra}), sep='/'
  )
  for path, value in reading.leaves_of(found).items():
    if not path.startswith('class_head/'):
      np.testing.assert_array_equal(got[path], value, err_msg=path)
  # Rows of the head are taken for classes that the weights know by name.
  bias = found.params['class_head']['bias']
  for names, rows in (
    (found.class_names, [0, 1, 2, 3, 4]),
    (('dog', 'cat'), [3, 1, 4]),
    ('ab', None),
  ):
    other = program if len(names) == 2 else program_of(found, names)
    task = type(other.task)(other.task.config, {'class_names': [*names]})
    got = weights_for(other._replace(task=task), good[0]).get('class_head/bias')
    if rows is None:
      assert got is None
    else:
      np.testing.assert_array_equal(got, bias[rows])


def test_run_starts_from_the_resnet_of_a_classifier(program, tmp_path, monkeypatch):
  theirs = torch_models.randomize(
    transformers.ResNetForImageClassification(
      transformers.ResNetConfig(**BACKBONE, num_labels=3)
    )
  )
  theirs.save_pretrained(tmp_path)
  weights = weights_for(program, tmp_path)
  np.testing.assert_array_equal(
    weights['backbone/block2/unit2/conv2/kernel'],
    theirs.state_dict()[
      'resnet.encoder.stages.1.layers.1.layer.1.convolution.weight'
    ].permute(2, 3, 1, 0),
  )
  want = program.abstract.params['backbone'], program.abstract.extra['frozen']
  assert {path.split('/')[0] for path in weights} == {'backbone', 'frozen'}
  assert len(weights) == len(jax.tree.leaves(want))
  # Frozen layers must come from the weights.
  frozen = (('^backbone/(conv_root|block1)/', 0.0),)
  monkeypatch.setattr(program.task.config, 'lr_multipliers', frozen)
  program.task.check_weights(weights, program.abstract.params)
  with pytest.raises(ValueError, match="'backbone/block1/.*would stay random"):
    program.task.check_weights({}, program.abstract.params)
  with pytest.raises(ValueError, match='only the backbone of a detector'):
    convert.read(str(tmp_path))


def test_timm_resnets_use_the_published_backbone_names():
  with torch.device('meta'):
    theirs = torch_models.timm.create_model('resnet50').state_dict()
  state = {
    name: np.broadcast_to(np.float32(0), value.shape)
    for name, value in theirs.items()
    if not name.endswith('num_batches_tracked')
  }
  family, naming = families.from_names(state)
  assert naming == 'resnet'
  shapes = {k: v.shape for k, v in family.load(state, naming, 8).items()}
  images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
  model = resnet.ResNet(resnet.UNITS['r50'])
  ours = jax.eval_shape(model.init, jax.random.key(0), images)
  tree = {'backbone': ours['params'], 'frozen': {'backbone': ours['frozen']}}
  want = flax.traverse_util.flatten_dict(tree, sep='/')
  assert shapes == {k: v.shape for k, v in want.items()}


def test_batch_norm_counters_are_dropped(good, tmp_path):
  state = {'bn1.num_batches_tracked': torch.tensor(7)}
  _, theirs = good
  for name, value in released(theirs.state_dict()).items():
    if name.startswith('backbone'):
      state[name.removeprefix('backbone.0.body.')] = torch.tensor(value)
  torch.save(state, tmp_path / 'a.pth')
  safetensors.torch.save_file(state, tmp_path / 'a.safetensors')
  for path in tmp_path.iterdir():
    assert reading.read(str(path)).kind == 'resnet'


def test_other_models_are_rejected(good, program, tmp_path):
  classifier = tiny_models.numbers(tiny_models.tiny(), 8)
  checkpoint.save(classifier, str(tmp_path / 'vit.npz'))
  convert.convert(str(tmp_path / 'vit.npz'), str(tmp_path / 'run'), 'workdir')
  for name in ('vit.npz', 'run'):
    message = f"{tmp_path / name}'.*a classifier,.*a detector.*config.pretrained"
    with pytest.raises(ValueError, match=message):
      weights_for(program, tmp_path / name)
  with pytest.raises(ValueError, match='a detector,.*a classifier'):
    checkpoint.load_pretrained(
      pretrained_path=str(good[0]), init_params=classifier, model_config={}
    )


def test_detects_objects_with_detector_weights(good, tmp_path):
  _, theirs = good
  model = predict.load_weights(str(good[0]), image_size=(24, 40))
  assert model.config.task == 'detect'
  pixels = np.random.RandomState(0).randint(0, 256, (24, 40, 3), np.uint8)
  logits, boxes = outputs_of(theirs, pixels[None] / 127.5 - 1)
  scores = torch.tensor(logits[0]).softmax(-1)[:, :-1].max(-1)
  best = int(scores.values.argmax())
  [found] = model.detect([pixels], threshold=0.0)
  name, score, box = found[0]
  assert name == model.class_names[scores.indices[best]]
  assert score == pytest.approx(float(scores.values[best]), abs=1e-4)
  x, y, width, height = boxes[0, best]
  want = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
  want = np.clip(want, 0, 1) * (40, 24, 40, 24)
  np.testing.assert_allclose(box, want, atol=0.01)
