"""Tests of converting iGPT weights."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

from tests import torch_models, trees
from tests.weights import conftest
from vit_jax import checkpoint, models, predict
from vit_jax.weights import card, convert, reading, writing

transformers = torch_models.transformers

COLORS = 7
PALETTE = np.linspace(-1, 1, 3 * COLORS).reshape(COLORS, 3).round(3).tolist()


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """A Hugging Face folder and the model in it, with heads of size 12."""
  folder = tmp_path_factory.mktemp('igpt')
  theirs = torch_models.randomize(
    transformers.ImageGPTForCausalImageModeling(
      transformers.ImageGPTConfig(
        vocab_size=COLORS + 1, n_positions=16, n_embd=24, n_layer=2, n_head=2
      )
    )
  ).eval()
  with torch.no_grad():
    for name, value in theirs.named_parameters():
      if name.endswith('bias'):  # As in the released files.
        value.zero_()
  theirs.save_pretrained(folder)
  processor = {'clusters': PALETTE, 'size': {'height': 4, 'width': 4}}
  (folder / 'preprocessor_config.json').write_text(json.dumps(processor))
  return folder, theirs


def logits_of(theirs, colors):
  """Logits of Hugging Face's model, whose input begins with the start token."""
  tokens = np.pad(colors[:, :-1], ((0, 0), (1, 0)), constant_values=COLORS)
  with torch.no_grad():
    return theirs(torch.tensor(tokens)).logits.numpy()


def test_hugging_face_round_trip(good, tmp_path):
  folder, theirs = good
  found = convert.read(str(folder))
  colors = np.random.RandomState(0).randint(0, COLORS, (2, 16))
  model = models.make_model(found.config, num_classes=0)
  got = jax.jit(lambda p, x: model.apply({'params': p}, x))(found.params, colors)
  want = logits_of(theirs, colors)
  assert want.std() > 0.3
  np.testing.assert_allclose(got, want, atol=1e-4)
  source = str(folder)
  for name, to in (('run', 'workdir'), ('hf', 'hf')):
    there = str(tmp_path / name)
    _, [note] = convert.convert(source, there, to)
    assert "a head's size, 12: " in note
    assert 'this model has attention_scale=exact' in note
    again = convert.read(there)
    trees.assert_same(again.params, found.params)
    assert again.metadata == {'palette': PALETTE}
    source = there
  text = card.make(again, source, tmp_path / 'hf', 'me/pixels')
  assert 'pipeline_tag: unconditional-image-generation' in text
  assert "ImageGPTForCausalImageModeling.from_pretrained('me/pixels')" in text
  before, after = (
    safetensors.numpy.load_file(path / 'model.safetensors')
    for path in (folder, tmp_path / 'hf')
  )
  trees.assert_same(after, before)
  for cls in (
    transformers.ImageGPTForCausalImageModeling,
    transformers.ImageGPTModel,
  ):
    again, info = cls.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not info['missing_keys']
  again = transformers.ImageGPTForCausalImageModeling.from_pretrained(tmp_path / 'hf')
  np.testing.assert_array_equal(logits_of(again.eval(), colors), want)
  processor = transformers.ImageGPTImageProcessor.from_pretrained(tmp_path / 'hf')
  np.testing.assert_allclose(processor.clusters, PALETTE, atol=1e-6)
  assert dict(processor.size) == {'height': 4, 'width': 4}


def test_config_can_select_the_truncated_scale(good, tmp_path):
  fields = {'attention_scale': 'truncated'}
  path = conftest.changed(good[0], tmp_path / 'a', config=fields)
  found, [note] = convert.convert(path, str(tmp_path / 'hf'), 'hf')
  assert found.config.attention_scale == 'truncated'
  assert 'this model has attention_scale=truncated' in note
  assert convert.read(str(tmp_path / 'hf')).config.attention_scale == 'truncated'


def test_missing_head_is_filled_with_zeros(good, tmp_path, caplog):
  _, theirs = good
  theirs.transformer.save_pretrained(tmp_path)
  found = convert.read(str(tmp_path))
  want = convert.read(str(good[0]))
  head = found.params.pop('color_head')['kernel']
  np.testing.assert_array_equal(head, np.zeros((24, COLORS)))
  del want.params['color_head']
  trees.assert_same(found.params, want.params)
  assert 'colour head' in caplog.text
  with pytest.raises(ValueError, match=r"'pixels' needs \['palette'\], which"):
    convert.convert(str(tmp_path), str(tmp_path / 'run'), 'workdir')


def test_masks_in_old_files_are_ignored(good, tmp_path):
  _, theirs = good
  state = theirs.state_dict()
  state['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16).bool()
  state['transformer.h.0.attn.masked_bias'] = torch.tensor(-1e4)
  torch.save(state, tmp_path / 'pytorch_model.bin')
  found = reading.read(str(tmp_path), num_heads=2)
  trees.assert_same(found.params, reading.read(str(good[0])).params)


def test_samples_from_igpt_weights(good):
  model = predict.load_weights(str(good[0]))
  assert model.config.task == 'pixels'
  drawn = np.asarray(model.sample(2, seed=0))
  assert drawn.shape == (2, 4, 4, 3)


BLOCK = 'transformer.h.0.'


@pytest.mark.parametrize(
  'parts, message',
  [
    ({'config': {'activation_function': 'gelu'}}, "is 'gelu', but .* 'quick_gelu'"),
    ({'preprocessor_config': {'clusters': [[0, 0, 255]]}}, 'clusters is .* numbers from -1 to 1'),
    ({'preprocessor_config': {'clusters': [[0, 0, 0]]}}, 'palette of 1 colours, but the weig'),
    ({'arrays': {f'{BLOCK}mlp.c_fc.bias': np.ones(96, np.float32)}}, 'bias. is not zero'),
    ({'arrays': {'score.weight': np.ones((3, 24), np.float32)}}, 'without the start'),
  ],
)  # fmt: skip
def test_rejects_unsupported_files(good, tmp_path, parts, message):
  with pytest.raises(ValueError, match=message) as error:
    convert.read(conftest.changed(good[0], tmp_path, **parts))
  assert str(tmp_path) in str(error.value)


def test_rejects_wrong_sizes_and_formats(good, tmp_path):
  with pytest.raises(ValueError, match='4,5 has 20 pixels, but .* are for 16'):
    convert.read(str(good[0]), image_size=(4, 5))
  with pytest.raises(ValueError, match=r'cannot be written as npz: pass --to=hf'):
    convert.convert(str(good[0]), str(tmp_path / 'a.npz'))
  with pytest.raises(ValueError, match='an iGPT, .* a '):
    checkpoint.load_pretrained(
      pretrained_path=str(good[0]), init_params={'cls': np.ones(3)},
      model_config={},
    )  # fmt: skip
  found = convert.read(str(good[0]))
  del found.params['start_token']
  with pytest.raises(ValueError, match=r"no masked pixels \(the objective 'bert'"):
    writing.WRITERS['hf'](found, tmp_path / 'hf')
