"""Tests of reading checkpoints as other training programs write them."""

import argparse
import pathlib
import sys
import types

import flax.traverse_util
import numpy as np
import pytest
import safetensors.torch
import torch

from tests import broken_weights, tiny_models, torch_models, trees
from vit_jax import checkpoint
from vit_jax.commands import convert as convert_command
from vit_jax.configs import common
from vit_jax.weights import convert, reading
from vit_jax.weights.families import families

# Imported through torch_models, which sets up its environment.
timm = torch_models.timm


@pytest.fixture(scope='module')
def states(params):
  """Two state dicts of one model: of its weights, and of their average."""
  state = families.from_config({}).dump(params, 'timm')
  state = {name: torch.tensor(x) for name, x in state.items()}
  return state, {name: x + 1 for name, x in state.items()}


def prefixed(state, *prefixes):
  return {prefix + name: x for prefix in prefixes for name, x in state.items()}


def read_first(path, entry=None):
  """Returns a row of the class token, which tells the two state dicts apart."""
  return reading.read(str(path), num_heads=2, entry=entry).params['cls'][0, 0]


@pytest.mark.parametrize(
  'wrap, is_average',
  [
    (lambda raw, mean: {'state_dict': raw, 'state_dict_ema': mean, 'epoch': 1}, True),
    (lambda raw, mean: {'model': raw, 'model_ema': mean}, True),
    (lambda raw, mean: {'model': raw, 'model_ema': None}, False),
    (lambda raw, mean: {'model': {'state_dict': raw}, 'step': torch.tensor(3)}, False),
    (lambda raw, mean: {'net': raw, 'acc': np.float64(0.5)}, False),
    (lambda raw, mean: prefixed(raw, '_orig_mod.module.'), False),
    (lambda raw, mean: {'state_dict': prefixed(raw, 'model.backbone.')}, False),
    (
      lambda raw, mean: {
        'student': prefixed(raw, 'module.backbone.'),
        'teacher': prefixed(mean, 'backbone.')
        | {
          'head.mlp.0.weight': torch.ones(1),
          'head.last_layer.weight_g': torch.ones(1),
        },
      },
      True,
    ),
    (
      lambda raw, mean: {
        'state_dict': prefixed(raw, 'student.') | prefixed(mean, 'teacher.')
      },
      True,
    ),
    (
      lambda raw, mean: {
        'model': raw,
        'args': argparse.Namespace(lr=0.1, out=pathlib.Path('a'), more=[np.float32(1)]),
      },
      False,
    ),
  ],
)
def test_finds_the_state_dict(tmp_path, states, wrap, is_average):
  raw, mean = states
  torch.save(wrap(raw, mean), tmp_path / 'last.ckpt')
  want = (mean if is_average else raw)['cls_token'][0, 0]
  np.testing.assert_array_equal(read_first(tmp_path / 'last.ckpt'), want)


def test_averaged_weights_are_preferred_as_timm_prefers_them(
  tmp_path, states, params, caplog
):
  raw, mean = states
  path = tmp_path / 'last.pth.tar'
  for names in ('state_dict', 'state_dict_ema'), ('model', 'model_ema'):
    torch.save(dict(zip(names, (raw, mean))), path)
    theirs = timm.models.load_state_dict(str(path))
    np.testing.assert_array_equal(read_first(path), theirs['cls_token'][0, 0])
    assert f"reading '{names[1]}', not '{names[0]}' (choose with --entry" in caplog.text
    np.testing.assert_array_equal(read_first(path, names[0]), raw['cls_token'][0, 0])
  with pytest.raises(
    ValueError, match="no entry 'ema': choose one of model_ema, model"
  ):
    read_first(path, 'ema')
  torch.save(raw, path)
  with pytest.raises(ValueError, match="no entry 'ema': leave it out.*--entry"):
    read_first(path, 'ema')
  np.savez(tmp_path / 'a.npz', **params)
  with pytest.raises(ValueError, match=r"'ema'.*a\.npz' has only one: leave it out"):
    read_first(tmp_path / 'a.npz', 'ema')


def test_an_entry_may_have_any_name(tmp_path, states):
  raw, mean = states
  torch.save({'model': raw, 'swa': prefixed(mean, 'module.')}, tmp_path / 'a.pt')
  np.testing.assert_array_equal(
    read_first(tmp_path / 'a.pt', 'swa'), mean['cls_token'][0, 0]
  )


def test_a_command_and_a_run_choose_an_entry(tmp_path, states):
  raw, mean = states
  path, out = str(tmp_path / 'a.pth'), str(tmp_path / 'a.npz')
  torch.save({'model': raw, 'model_ema': mean}, path)
  flags = ['--num_heads=2', '--gelu=tanh', '--entry=model']
  assert convert_command.main([path, out, *flags]) == 0
  config = common.get_config()
  config.model, config.pp.crop = convert.read(out).config, 8
  config.update(pretrained=path, pretrained_entry='model')
  task = types.SimpleNamespace(new_params=(), adapt_weights=lambda weights: weights)
  init = tiny_models.numbers(tiny_models.tiny(), 8)
  taken = checkpoint.pretrained_weights(config, task, init)
  for cls in reading.read(out).params['cls'], taken['cls']:
    np.testing.assert_array_equal(cls, raw['cls_token'])


def test_prefixes_of_safetensors_are_removed(tmp_path, states, params):
  path = tmp_path / 'model.safetensors'
  safetensors.torch.save_file(prefixed(states[0], '_orig_mod.'), path)
  trees.assert_same(
    reading.read(str(path), num_heads=2).params,
    flax.traverse_util.unflatten_dict(params, sep='/'),
  )


def test_other_modules_next_to_a_model_are_not_dropped(tmp_path, states):
  """A classifier on top of a backbone would be lost."""
  state = prefixed(states[0], 'backbone.') | {'classifier.weight': torch.ones(5, 16)}
  torch.save(state, tmp_path / 'a.pth')
  with pytest.raises(ValueError, match=r'its names are .*backbone\.blocks'):
    read_first(tmp_path / 'a.pth')


@pytest.mark.parametrize('ending', ['safetensors', 'pth', 'npz', 'ckpt', 'weights'])
def test_the_content_of_a_file_counts_and_not_its_ending(
  tmp_path, good, states, ending
):
  path = tmp_path / f'a.{ending}'
  want = states[0]['cls_token'][0, 0]
  for content in (
    (good / 'a.npz').read_bytes(),
    (good / 'timm' / 'model.safetensors').read_bytes(),
    (good / 'hf' / 'new.bin').read_bytes(),
    (good / 'hf' / 'old.bin').read_bytes(),
  ):
    path.write_bytes(content)
    np.testing.assert_array_equal(read_first(path), want)


def test_objects_in_a_checkpoint_are_never_constructed(tmp_path, states):
  path, marker = tmp_path / 'a.pth', tmp_path / 'boom'
  bomb = broken_weights.Bomb(marker)
  for settings in bomb, argparse.Namespace(a=[bomb]), {bomb: 1}:
    torch.save({'model': states[0], 'args': settings}, path)
    with pytest.raises(ValueError, match=r'pickled objects \(getattr\), .* never'):
      read_first(path)
  assert not marker.exists()


@pytest.mark.parametrize(
  'content, message',
  [
    (torch.nn.Identity(), r'objects \(torch.nn.*Identity\).*: save .* state_dict'),
    (torch.ones(1), 'not a state dict'),
    ({'a': {'cls_token': torch.ones(1)}}, "'a' is a dict, not an array.*--entry"),
    ({'epoch': 3}, 'no arrays by name, only epoch'),
    ({'model': {3: torch.ones(1)}}, 'not a state dict'),
    (
      {'cls_token': None, 'pos_embed': torch.ones(1)},
      "'cls_token' is a NoneType, not an array$",
    ),
  ],
)
def test_rejects_what_is_no_state_dict(tmp_path, content, message):
  torch.save(content, tmp_path / 'a.pth')
  with pytest.raises(ValueError, match=f"a.pth' cannot be used: .*{message}"):
    read_first(tmp_path / 'a.pth')


@pytest.mark.filterwarnings('ignore')
def test_a_torchscript_program_is_not_run(tmp_path):
  program = torch.jit.trace(torch.nn.Identity(), torch.ones(1))
  torch.jit.save(program, tmp_path / 'a.pt')
  with pytest.raises(
    ValueError, match='TorchScript program.*never run.*torch.jit.load'
  ):
    read_first(tmp_path / 'a.pt')


def test_a_checkpoint_that_holds_itself_ends(tmp_path, states):
  content = {'state_dict': {'model': None, 'x': torch.ones(1)}}
  content['state_dict']['model'] = content
  torch.save(content, tmp_path / 'a.pth')
  with pytest.raises(ValueError, match='not an array'):
    read_first(tmp_path / 'a.pth')


def test_safetensors_need_no_torch(good, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  path = str(good / 'hf' / 'model.safetensors')
  reading.check_packages(path)
  reading.read(path)
