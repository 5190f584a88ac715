"""Tests of converting image-text models."""

import json
import re
import shutil

import flax.traverse_util
import jax
import ml_collections
import numpy as np
import pytest
import safetensors.numpy
import torch

from tests import tiny_models, tiny_towers, torch_models, trees
from tests.weights import conftest
from vit_jax import checkpoint, models, models_lit, predict
from vit_jax.configs import common, models as model_configs, vit as vit_config
from vit_jax.weights import convert, fitting, identify, reading, writing
from vit_jax.weights.families import families

transformers = torch_models.transformers

ROWS = 20  # Size of the vocabularies.
TEXT = dict(
  vocab_size=ROWS, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
  intermediate_size=16, max_position_embeddings=6, eos_token_id=ROWS - 1,
)  # fmt: skip
IMAGE = dict(
  hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
  intermediate_size=20, image_size=8, patch_size=4,
)  # fmt: skip
SCALING = {'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.2, 0.3, 0.4]}


def clip():
  return transformers.CLIPModel(
    transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=10)
  )


ONE_LAYER = dict(num_hidden_layers=1)
SIGLIP_TEXT = dict(TEXT, hidden_size=8, num_attention_heads=4, **ONE_LAYER)


def siglip():
  config = transformers.SiglipConfig(
    text_config=SIGLIP_TEXT, vision_config=IMAGE | ONE_LAYER
  )
  return transformers.SiglipModel(config)


def siglip2():
  """A model for any patch grid; ours is fixed to its position embeddings' grid."""
  image = {k: x for k, x in IMAGE.items() if k != 'image_size'}
  config = transformers.Siglip2Config(
    text_config={**SIGLIP_TEXT, 'projection_size': 8},
    vision_config={**image, **ONE_LAYER, 'num_patches': 4},
  )
  return transformers.Siglip2Model(config)


MAKERS = {'clip': clip, 'siglip': siglip}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Hugging Face folders and their models, by name."""
  found = {}
  for name, make in MAKERS.items():
    folder = tmp_path_factory.mktemp(name)
    theirs = torch_models.randomize(make()).eval()
    theirs.save_pretrained(folder)
    sides = {'clip': {'shortest_edge': 8}, 'siglip': {'height': 8, 'width': 8}}[name]
    (folder / 'preprocessor_config.json').write_text(
      json.dumps({**SCALING, 'size': sides, 'crop_size': 8})
    )
    (folder / 'tokenizer.json').write_text('{}')
    found[name] = folder, theirs
  return found


def inputs():
  images = np.random.RandomState(0).uniform(-1, 1, (3, 8, 8, 3))
  tokens = [[3, 5, 7, 19, 0, 0], [3, 19, 0, 0, 0, 0], [3, 9, 9, 4, 2, 19]]
  return images.astype(np.float32), np.array(tokens, np.int32)


def our_logits(config, params):
  model, (images, tokens) = models.make_model(config), inputs()

  @jax.jit
  def apply(params):
    outputs = model.apply({'params': params}, images=images, tokens=tokens)
    return models_lit.similarity(*outputs)

  return apply(params)


def their_logits(model):
  images, tokens = inputs()
  with torch.no_grad():
    return model(
      torch.tensor(tokens), torch.tensor(images).permute(0, 3, 1, 2)
    ).logits_per_image.numpy()


@pytest.fixture(scope='module')
def loaded(saved):
  """Predictors with these weights, by name."""
  return {name: predict.load_weights(str(saved[name][0])) for name in MAKERS}


@pytest.mark.parametrize('name', MAKERS)
def test_image_embeddings_match_hugging_face(saved, loaded, name):
  """A run's model takes pixels in [-1, 1] and computes the same embeddings."""
  _, theirs = saved[name]
  photos = np.random.RandomState(1).randint(0, 256, (3, 8, 8, 3), np.uint8)
  mean, std = (np.array(x, np.float32) for x in SCALING.values())
  pixels = torch.tensor((photos / 255 - mean) / std, dtype=torch.float32)
  with torch.no_grad():
    features = theirs.get_image_features(pixels.permute(0, 3, 1, 2))
  want = getattr(features, 'pooler_output', features).numpy()
  want /= np.linalg.norm(want, axis=1, keepdims=True)
  model = loaded[name]
  np.testing.assert_allclose(model.embed(list(photos)), want, atol=1e-5)
  assert model.config.loss == {'clip': 'softmax', 'siglip': 'sigmoid'}[name]
  assert model.config.pp.resize == {'clip': 8, 'siglip': None}[name]


def test_class_embeddings_have_unit_length(saved, loaded, monkeypatch):
  """As in open_clip's build_zero_shot_classifier; LiT does not normalise the means."""
  theirs = saved['clip'][1]
  _, tokens = inputs()
  tokens = np.concatenate([tokens, tokens[:1]])  # 2 classes, 2 templates.
  with torch.no_grad():
    features = theirs.get_text_features(torch.tensor(tokens))
  rows = getattr(features, 'pooler_output', features).numpy()
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  means = rows.reshape(2, 2, -1).mean(axis=1)
  lengths = np.linalg.norm(means, axis=1, keepdims=True)
  assert (lengths < 0.999).all()
  model = loaded['clip']
  monkeypatch.setattr(model.task, 'templates', ('a {}', 'the {}'))
  tokenizer = {'tokenizer': lambda texts: tokens[: len(texts)]}
  monkeypatch.setattr(model.task, '__dict__', model.task.__dict__ | tokenizer)
  found = model.embed_classes(['cat', 'dog'])
  np.testing.assert_allclose(found, means / lengths, atol=1e-5)


def test_lit_class_embeddings_are_means(tmp_path):
  tiny_towers.write(tmp_path / 'LiT.npz')
  model = predict.load_weights(str(tmp_path / 'LiT.npz'))
  model.task.templates = ('a {}', 'two {} 2')
  texts = ['a cat', 'two cat 2', 'a dog', 'two dog 2']
  want = model.embed_texts(texts).reshape(2, 2, -1).mean(axis=1)
  assert (np.linalg.norm(want, axis=1) < 0.9996).all()
  np.testing.assert_allclose(model.embed_classes(['cat', 'dog']), want, atol=1e-6)


@pytest.mark.parametrize(
  'kind, name', [('GemmaTokenizerFast', 'siglip2'), ('SiglipTokenizer', 'siglip')]
)
def test_fixed_size_siglip_2_has_its_own_tokenizer(saved, tmp_path, kind, name):
  shutil.copytree(saved['siglip'][0], tmp_path, dirs_exist_ok=True)
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': kind}))
  (tmp_path / 'spiece.model').write_bytes(b'')
  pp = convert.read(str(tmp_path)).config.pp
  assert pp.tokenizer_name == name
  file = {'siglip2': 'tokenizer.json', 'siglip': 'spiece.model'}[name]
  assert pp.vocab_path == str(tmp_path / file)


def state_of(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


@pytest.mark.parametrize('name', MAKERS)
def test_hugging_face_round_trip(saved, tmp_path, name, caplog):
  folder, theirs = saved[name]
  found = convert.read(str(folder))
  want = their_logits(theirs)
  assert want.std() > 0.1
  np.testing.assert_allclose(our_logits(found.config, found.params), want, atol=1e-4)
  assert 'scaled by' not in caplog.text  # `scaled` handles the scaling.
  assert found.config.pp.max_len == 6
  assert found.config.pp.tokenizer_name == name
  assert found.image_size == (8, 8)
  there, npz = tmp_path / 'there', tmp_path / 'a.npz'
  _, notes = convert.convert(str(folder), str(there), 'hf')
  assert any('files of the tokenizer' in note for note in notes)
  before, after = state_of(folder), state_of(there)
  assert {k: x.shape for k, x in after.items()} == {
    k: x.shape for k, x in before.items()
  }
  trees.assert_same(after, before)
  cls = type(theirs)
  again, info = cls.from_pretrained(there, output_loading_info=True)
  assert not info['missing_keys']
  assert not info['unexpected_keys']
  np.testing.assert_array_equal(their_logits(again.eval()), want)
  processor = json.loads((there / 'preprocessor_config.json').read_text())
  assert {key: processor[key] for key in SCALING} == SCALING
  _, notes = convert.convert(str(folder), str(npz))
  again = convert.read(str(npz))
  trees.assert_same(again.params, writing.scaled(found).params)
  family = families.from_config(found.config)
  assert not [*family.differences(again.config, found.config)]
  with pytest.raises(ValueError, match=r'as timm: pass --to=hf\|npz\|workdir'):
    convert.convert(str(folder), str(tmp_path / 'timm'), 'timm')
  endings = {
    'clip': ', with text transformer of 2 layers, width 12',
    'siglip': ', attention pooling, with text transformer of 1 layers, width 8',
  }
  assert identify.describe(found.params).endswith(endings[name])


# Hugging Face name -> open_clip name, as in its releases.
OPEN_CLIP = (
  (r'^vision_model\.embeddings\.patch_embedding\.', 'visual.conv1.'),
  (r'^vision_model\.embeddings\.class_embedding$', 'visual.class_embedding'),
  (
    r'^vision_model\.embeddings\.position_embedding\.weight$',
    'visual.positional_embedding',
  ),
  (r'^vision_model\.pre_layrnorm\.', 'visual.ln_pre.'),
  (r'^vision_model\.post_layernorm\.', 'visual.ln_post.'),
  (r'^vision_model\.encoder\.layers\.', 'visual.transformer.resblocks.'),
  (r'^text_model\.encoder\.layers\.', 'transformer.resblocks.'),
  (r'^text_model\.embeddings\.token_embedding\.', 'token_embedding.'),
  (
    r'^text_model\.embeddings\.position_embedding\.weight$',
    'positional_embedding',
  ),
  (r'^text_model\.final_layer_norm\.', 'ln_final.'),
  (r'^visual_projection\.weight$', 'visual.proj'),
  (r'^text_projection\.weight$', 'text_projection'),
  (r'\.layer_norm(\d)\.', r'.ln_\1.'),
  (r'\.self_attn\.out_proj\.', '.attn.out_proj.'),
  (r'\.mlp\.fc1\.', '.mlp.c_fc.'),
  (r'\.mlp\.fc2\.', '.mlp.c_proj.'),
)


def test_siglip_2_on_the_grid_of_its_position_embeddings(tmp_path):
  theirs = torch_models.randomize(siglip2()).eval()
  theirs.save_pretrained(tmp_path)
  found = convert.read(str(tmp_path))
  assert found.image_size == (8, 8)
  assert found.config.pp.tokenizer_name == 'siglip2'
  images, tokens = inputs()
  patches = images.reshape(-1, 2, 4, 2, 4, 3).swapaxes(2, 3).reshape(-1, 4, 48)
  with torch.no_grad():
    want = theirs(
      torch.tensor(tokens),
      torch.tensor(patches),
      pixel_attention_mask=torch.ones(len(images), 4),
      spatial_shapes=torch.full((len(images), 2), 2),
    ).logits_per_image.numpy()
  got = our_logits(found.config, found.params)
  np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_a_classifier_starts_from_the_image_tower(saved):
  run = vit_config.get_config('pretrained,digits,8')
  run.pretrained, run.pretrained_grid = str(saved['siglip'][0]), None
  run = checkpoint.with_model(run)
  assert run.model.classifier == 'map'
  whole = writing.scaled(convert.read(run.pretrained)).params['img']
  taken = fitting.transferable(run.pretrained, whole, run.model)
  trees.assert_same(taken, flat_of(whole))


def open_clip(state):
  """Converts a Hugging Face CLIP state dict to open_clip's layout."""
  found = {}
  for name, value in state.items():
    joined = re.sub(r'self_attn\.q_proj\.', 'attn.in_proj_', name)
    if joined != name:
      parts = (name.replace('q_proj', f'{x}_proj') for x in 'qkv')
      value = np.concatenate([state[part] for part in parts])
    elif re.search(r'self_attn\.[kv]_proj', name):
      continue
    for pattern, replacement in OPEN_CLIP:
      joined = re.sub(pattern, replacement, joined)
    found[joined] = value.T if joined.endswith('proj') else value
    if joined == 'text_projection':
      found[joined] = value.T
  return found


@pytest.mark.parametrize('custom_text', [False, True])
def test_open_clip_weights(saved, tmp_path, custom_text):
  folder, _ = saved['clip']
  state = open_clip(state_of(folder))
  assert state['visual.transformer.resblocks.1.attn.in_proj_weight'].shape == ((24, 8))
  if custom_text:
    kept = ('visual.', 'logit_scale')
    state = {k if k.startswith(kept) else f'text.{k}': x for k, x in state.items()}
  path = tmp_path / 'open_clip_model.safetensors'
  state = {k: np.ascontiguousarray(x) for k, x in state.items()}
  # Of OpenAI's files, and a buffer of open_clip.
  sizes = dict.fromkeys(('input_resolution', 'context_length', 'vocab_size'), 8)
  others = {k: np.array(x) for k, x in sizes.items()}
  others['attn_mask'] = np.full((6, 6), -np.inf, np.float32)
  safetensors.numpy.save_file(state | others, path)
  config = {
    'model_cfg': {
      'embed_dim': 10,
      'quick_gelu': True,
      'vision_cfg': {'image_size': 8, 'width': 8, 'head_width': 4},
      'text_cfg': {'heads': 3, 'width': 12},
    },
    'preprocess_cfg': {'mean': [0.4, 0.5, 0.6]},
  }
  config_file = tmp_path / 'open_clip_config.json'
  config_file.write_text(json.dumps(config))
  found, want = (convert.read(str(where)) for where in (path, folder))
  trees.assert_same(found.params, want.params)
  found.config.pp.vocab_path = want.config.pp.vocab_path
  assert found.config.to_dict() == want.config.to_dict()
  del config['model_cfg']['quick_gelu']
  config_file.write_text(json.dumps(config))
  assert convert.read(str(path)).config.text.gelu == 'erf'
  config['model_cfg']['text_cfg']['no_causal_mask'] = True
  config_file.write_text(json.dumps(config))
  with pytest.raises(ValueError, match='no_causal_mask is True, but this pack'):
    convert.read(str(path))


BERT = dict(
  width=8, num_layers=2, num_heads=4, mlp_dim=16, vocab_size=ROWS,
  num_positions=12, num_segments=2,
)  # fmt: skip


def lit(text_model='bert', **kwargs):
  """The config of a tiny model and its parameters."""
  config = model_configs.get_config('LiT-B16B')
  config.image.update(patches={'size': (4, 4)}, hidden_size=8)
  config.image.transformer.update(num_layers=1, mlp_dim=16, num_heads=2)
  config.text = {'config': BERT}
  if text_model != 'bert':
    config.text = dict(width=8, num_layers=1, mlp_dim=16, num_heads=2, vocab_size=ROWS)
  config.update(text_model=text_model, out_dim=(None, 8))
  config.pp.update(size=8, max_len=6)
  with config.ignore_type():
    config.update(kwargs)
  config = ml_collections.ConfigDict(config.to_dict())
  model, (images, tokens) = models.make_model(config), inputs()
  return config, tiny_models.drawn(
    tiny_models.tree(model, images=images, tokens=tokens)
  )


@pytest.mark.parametrize('text_model', ['bert', 'text_transformer'])
def test_npz_has_the_published_names_and_round_trips_exactly(tmp_path, text_model):
  config, params = lit(text_model)
  path = tmp_path / 'tiny.npz'
  checkpoint.save(params, str(path))
  names = set(np.load(path))
  ours = {
    'img/cls', 'img/embedding/kernel', 't', 'txt/head/bias',
    'img/Transformer/posembed_input/pos_embedding',
    'img/Transformer/encoder_norm/scale',
    'img/Transformer/encoderblock_0/LayerNorm_0/bias',
    'img/Transformer/encoderblock_0/LayerNorm_2/bias',
    'img/Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel',
    'img/Transformer/encoderblock_0/MultiHeadDotProductAttention_1/key/kernel',
  }  # fmt: skip
  if text_model == 'bert':
    layer = 'txt/BertEncoder_0/encoder_block/layer_sequence/layers_1'
    ours |= {
      f'{layer}/attention_block/attention_layer/query/kernel',
      f'{layer}/mlp_block/layer_norm/scale',
      'txt/BertEncoder_0/embedder/embedders_segment_ids/embedding',
    }
  else:
    block = 'txt/Encoder_0/encoderblock_0'
    ours |= {
      'txt/Embed_0/embedding', 'txt/pos_embedding',
      'txt/Encoder_0/encoder_norm/bias', f'{block}/LayerNorm_2/scale',
      f'{block}/MultiHeadDotProductAttention_1/out/kernel',
    }  # fmt: skip
  assert ours <= names
  trees.assert_same(checkpoint.load(str(path)), params)
  trees.assert_same(reading.read(str(path)).params, params)
  found = convert.read(str(path))
  assert found.config.text_model == text_model
  assert found.config.out_dim == (None, 8)
  if text_model == 'bert':  # Shapes do not reveal the number of heads.
    assert found.config.text.config.num_heads == 1
    assert found.config.pp.max_len == 12
  else:
    assert found.config.text.to_dict() == config.text.to_dict()
    assert found.config.pp.max_len == 6
  assert found.config.pp.size == 8
  assert not found.config.pp.get('vocab_path')
  ending = {'bert': 'txt'}.get(text_model, 'model')
  for name in ('tiny.txt', 'tiny.model'):
    (tmp_path / name).write_text('')
  vocabulary = convert.read(str(path)).config.pp.vocab_path
  assert vocabulary == str(tmp_path / f'tiny.{ending}')


def test_npz_stores_other_fields_in_a_file_next_to_it(tmp_path):
  config, params = lit()
  config.image.transformer.gelu = 'quick'
  with config.ignore_type():
    config.pp.max_len = 5
  model = writing.Model(params, config, None, 0, (8, 8))
  assert writing.check(model, 'npz') == []
  path = tmp_path / 'tiny.npz'
  notes = writing.WRITERS['npz'](model, path)
  assert any('text.config' in note for note in notes)
  found = convert.read(str(path)).config
  assert found.image.transformer.gelu == 'quick'
  assert found.text.to_dict() == {'config': BERT}
  assert found.pp.max_len == 5
  with pytest.raises(ValueError, match=r'as hf: pass --to=npz\|workdir'):
    writing.check(model, 'hf')


@pytest.mark.parametrize(
  'name, fields, message',
  [
    ('clip', {'config': {'text_config': {'eos_token_id': 7}}}, 'eos_token_id is 7.*here 19'),
    (
      'siglip',
      {'arrays': {'text_model.embeddings.token_embedding.weight': None}},
      'it lacks .*token_embedding.* a whole CLIP or SigLIP',
    ),
    (
      'clip',
      {'arrays': {'vision_model.extra': np.ones(2, np.float32)}},
      'which lacks vision_model.extra',
    ),
  ],
)  # fmt: skip
def test_rejects_unsupported_files(saved, tmp_path, name, fields, message):
  with pytest.raises(ValueError, match=message):
    convert.read(conftest.changed(saved[name][0], tmp_path, **fields))


def test_files_of_older_versions(saved, tmp_path):
  """They store position ids, and the largest token id ends a text."""
  folder = saved['clip'][0]
  numbers = torch.arange(6)[None]
  state = {k: torch.tensor(x) for k, x in state_of(folder).items()}
  state['text_model.embeddings.position_ids'] = numbers
  fields = {'text_config': {'eos_token_id': 2}}
  path = conftest.changed(folder, tmp_path, config=fields)
  (tmp_path / 'model.safetensors').unlink()
  torch.save(state, tmp_path / 'pytorch_model.bin')
  trees.assert_same(convert.read(path).params, convert.read(str(folder)).params)


def test_rejects_biases_that_clip_lacks(saved, tmp_path):
  found = convert.read(str(saved['clip'][0]))
  found.params['img']['head']['bias'][0] = 1
  with pytest.raises(ValueError, match="'img/head/bias' is not zero, and CLIP"):
    writing.WRITERS['hf'](found, tmp_path / 'there')


class Task:
  """The part of a task that reading weights needs."""

  new_params = ()
  adapt_weights = staticmethod(lambda weights: weights)


def pretrained(config, params, weights):
  run = common.get_config()
  run.model = config
  run.pp.crop = 8
  with run.ignore_type():
    run.pretrained = weights
  return checkpoint.pretrained_weights(run, Task(), params)


def flat_of(tree):
  return flax.traverse_util.flatten_dict(tree, sep='/')


@pytest.fixture(scope='module')
def bert(tmp_path_factory):
  """A folder with a BERT and its head, and the model."""
  folder = tmp_path_factory.mktemp('bert')
  theirs = transformers.BertForMaskedLM(
    transformers.BertConfig(
      vocab_size=ROWS, hidden_size=8, num_hidden_layers=2,
      num_attention_heads=4, intermediate_size=16, max_position_embeddings=12,
    )
  )  # fmt: skip
  theirs = torch_models.randomize(theirs).eval()
  theirs.save_pretrained(folder)
  return folder, theirs


def test_towers_start_from_separate_weights(bert, tmp_path, caplog):
  config, params = lit()
  vit = models.VisionTransformer(
    num_classes=5,
    **{k: v for k, v in config.image.items() if k != 'model_name'},
  )
  classifier = tiny_models.numbers(vit, 16)
  checkpoint.save(classifier, str(tmp_path / 'vit.npz'))
  weights = {'img': str(tmp_path / 'vit.npz'), 'txt': str(bert[0])}
  taken = pretrained(config, params, weights)
  assert {path.split('/')[0] for path in taken} == {'img', 'txt'}
  lacks = {'t', 'txt/head/kernel', 'txt/head/bias'}
  assert flat_of(params).keys() - taken == lacks
  np.testing.assert_array_equal(
    taken['img/embedding/kernel'], classifier['embedding']['kernel']
  )
  table = 'Transformer/posembed_input/pos_embedding'
  np.testing.assert_array_equal(
    taken[f'img/{table}'],
    fitting.interpolate_posembed(flat_of(classifier)[table], 5, True),
  )
  assert 'Ignored parameters: cls.pred' in caplog.text
  assert 'was trained with the exact GELU' in caplog.text
  assert 'num_heads' not in caplog.text
  # Its features match Hugging Face.
  tree = flax.traverse_util.unflatten_dict(
    {k.removeprefix('txt/'): x for k, x in taken.items() if 'txt/' in k},
    sep='/',
  )
  tower = models.make_model(config, out_dim=None).text_tower()
  _, tokens = inputs()
  found = jax.jit(lambda p: tower.apply({'params': p}, tokens)[1])(tree)
  kept = tokens != 0
  with torch.no_grad():
    theirs = bert[1].bert
    for layer in theirs.encoder.layer:
      layer.intermediate.intermediate_act_fn = torch.nn.GELU('tanh')
    want = theirs(torch.tensor(tokens), torch.tensor(kept))[0].numpy()
  np.testing.assert_allclose(found['transformed'][kept], want[kept], atol=1e-5)
  config.text.config.num_heads = 2
  pretrained(config, params, {'txt': str(bert[0])})
  assert '--config.model.text.config.num_heads=4' in caplog.text


def test_old_bert_names(bert, tmp_path):
  state = {
    k.replace('LayerNorm.weight', 'LayerNorm.gamma').replace(
      'LayerNorm.bias', 'LayerNorm.beta'
    ): x
    for k, x in state_of(bert[0]).items()
  }
  safetensors.numpy.save_file(state, tmp_path / 'model.safetensors')
  trees.assert_same(
    reading.read(str(tmp_path)).params, reading.read(str(bert[0])).params
  )


def test_towers_start_from_other_image_text_models(saved, tmp_path, caplog):
  config, params = lit('text_transformer')
  _, others = lit('text_transformer', out_dim=(8, 8))
  path = str(tmp_path / 'other.npz')
  checkpoint.save(others, path)
  want = flat_of(others)
  # A head is taken if both models have it; a whole model is taken completely.
  for part, paths in (('img', 'img/'), ('txt', 'txt/'), ('', '')):
    weights = {part: path} if part else path
    own = flat_of(params)
    if not part:
      checkpoint.save(params, path)
      want = own
    taken = pretrained(config, params, weights)
    assert set(taken) == {k for k in own if k.startswith(paths)}
    trees.assert_same(taken, {k: want[k] for k in taken})
  clip = convert.read(str(saved['clip'][0]))
  folder = str(saved['clip'][0])
  taken = pretrained(clip.config, clip.params, {'img': folder, 'txt': folder})
  want = flat_of(writing.scaled(clip).params)  # Runs read pixels from -1 to 1.
  trees.assert_same(taken, {k: x for k, x in want.items() if k != 't'})
  assert 'were made for' not in caplog.text
  clip.config.text.pool = 'last'
  pretrained(clip.config, clip.params, {'txt': folder})
  assert '--config.model.text.pool=eos' in caplog.text


@pytest.mark.parametrize(
  'weights, message',
  [
    ({'img': 'lit', '': 'lit'}, "names two weights for 'img/'"),
    ({'text': 'bert'}, r"no parameters 'text/', but \['img', 't', 'txt'\]"),
    ({'img': 'bert'}, 'a BERT, .* a classifier'),
    ('bert', 'a BERT, .* an image-text model'),
  ],
)
def test_wrong_weights_for_a_tower(bert, tmp_path, weights, message):
  config, params = lit()
  paths = {name: str(tmp_path / f'{name}.npz') for name in ('lit', 'vit')}
  paths['bert'] = str(bert[0])
  checkpoint.save(params, paths['lit'])
  checkpoint.save(tiny_models.numbers(tiny_models.tiny(), 8), paths['vit'])
  weights = (
    {part: paths[name] for part, name in weights.items()}
    if isinstance(weights, dict)
    else paths[weights]
  )
  with pytest.raises(ValueError, match=message):
    pretrained(config, params, weights)


def test_rejects_bert_as_a_whole_model(bert):
  with pytest.raises(ValueError, match='the text tower of an image-text model'):
    convert.read(str(bert[0]))


@pytest.mark.parametrize('to', ['timm', 'hf'])
def test_quick_gelu_is_kept_and_first_norm_is_rejected(tmp_path, to):
  model = tiny_models.tiny()
  checkpoint.save(tiny_models.numbers(model, 8), str(tmp_path / 'a.npz'))
  found = convert.read(str(tmp_path / 'a.npz'))
  found.config.transformer.gelu = 'quick'
  writing.WRITERS[to](found, tmp_path / to)
  again = convert.read(str(tmp_path / to))
  assert again.config.transformer.gelu == 'quick'
  path = str(tmp_path / 'b.npz')
  other = tiny_models.tiny(transformer={**model.transformer, 'first_norm': True})
  checkpoint.save(tiny_models.numbers(other, 8), path)
  found = convert.read(path)
  assert found.config.transformer.first_norm
  with pytest.raises(ValueError, match='write this model (as a run|for timm, or)'):
    writing.WRITERS[to](found, tmp_path / 'other')
