"""Tests of merging adapters in PEFT's format into their base."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from tests import torch_models, trees
from vit_jax.commands import convert as convert_command
from vit_jax.weights import reading

_CONFIG = dict(
  peft_type='LORA', r=2, lora_alpha=6, base_model_name_or_path='google/vit-base',
  use_dora=False, use_rslora=False, fan_in_fan_out=False, alpha_pattern={},
)  # fmt: skip
_QUERY = 'vit.layers.0.attention.q_proj'
_OLD_QUERY = 'vit.encoder.layer.0.attention.attention.query'
_PATCHES = 'vit.embeddings.patch_embeddings.projection'


def pair(out, *inputs):
  """Returns random arrays A and B of an adapter of rank 2."""
  ones = (1,) * (len(inputs) - 1)
  return torch.randn(2, *inputs), torch.randn(out, 2, *ones)


def write(folder, state, prefix='base_model.model.', **config):
  folder.mkdir(exist_ok=True)
  state = {prefix + name: x for name, x in state.items()}
  safetensors.torch.save_file(state, folder / 'adapter_model.safetensors')
  (folder / 'adapter_config.json').write_text(json.dumps({**_CONFIG, **config}))


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """A tiny ViT of Hugging Face for three classes, in its folder."""
  folder = tmp_path_factory.mktemp('base')
  model = torch_models.hf_model()
  model.save_pretrained(folder)
  return folder, safetensors.torch.load_file(folder / 'model.safetensors')


@pytest.mark.parametrize('query', [_QUERY, _OLD_QUERY])
@pytest.mark.parametrize('by_root', [False, True])
def test_adapters_are_merged_into_their_base(base, tmp_path, query, by_root):
  """W + alpha / r * B A, or alpha / sqrt(r); the head is another one."""
  torch.manual_seed(0)
  folder, state = base
  (a, b), (c, d) = pair(32, 32), pair(32, 3, 4, 4)
  head = {'classifier.weight': torch.randn(5, 32), 'classifier.bias': torch.randn(5)}
  bias = torch.randn(32)
  adapted = {
    f'{query}.lora_A.weight': a, f'{query}.lora_B.weight': b,
    f'{_PATCHES}.lora_A.weight': c, f'{_PATCHES}.lora_B.weight': d, **head,
    f'{query}.base_layer.bias': bias,
  }  # fmt: skip
  write(tmp_path / 'peft', adapted, use_rslora=by_root)
  scale = 6 / 2**0.5 if by_root else 3
  merged = state | head | {f'{_OLD_QUERY}.bias': bias}
  merged[f'{_OLD_QUERY}.weight'] = state[f'{_OLD_QUERY}.weight'] + scale * b @ a
  product = torch.einsum('or,rihw->oihw', d[:, :, 0, 0], c)
  merged[f'{_PATCHES}.weight'] = state[f'{_PATCHES}.weight'] + scale * product
  safetensors.torch.save_file(merged, tmp_path / 'merged.safetensors')
  want = reading.read(str(tmp_path / 'merged.safetensors'), num_heads=4)
  for path in tmp_path / 'peft', tmp_path / 'peft' / 'adapter_model.safetensors':
    got = reading.read(str(path), base=str(folder))
    trees.assert_close(got.params, want.params, atol=1e-5)
    assert got.class_names is None
    assert got.model['transformer']['gelu'] == 'erf'  # As the base's config says.


def test_adapters_alone_name_their_base(base, tmp_path):
  folder, _ = base
  a, b = pair(32, 32)
  adapted = {f'{_QUERY}.lora_A.weight': a, f'{_QUERY}.lora_B.weight': b}
  write(tmp_path / 'peft', adapted)
  path, out = str(tmp_path / 'peft'), str(tmp_path / 'out.npz')
  with pytest.raises(ValueError, match="adapters of PEFT for the model 'google/vit-b"):
    reading.read(path)
  assert convert_command.main([path, out, f'--base={folder}']) == 0
  assert reading.read(out).params['head']['bias'].shape == (3,)
  with pytest.raises(ValueError, match='no adapters of PEFT.*--base'):
    reading.read(str(folder), base=str(folder))
  shutil.copy(out, tmp_path / 'base.npz')
  with pytest.raises(ValueError, match=r'base\.npz.* must be the weights of timm'):
    reading.read(path, base=str(tmp_path / 'base.npz'))


@pytest.mark.parametrize(
  'change, config, message',
  [
    ({}, {'peft_type': 'LOHA'}, "config.json'.*peft_type is 'LOHA'"),
    ({}, {'use_dora': True}, "config.json'.*use_dora is True"),
    ({}, {'alpha_pattern': {'q': 4}}, "config.json'.*alpha_pattern"),
    ({}, {'lora_alpha': None}, "config.json'.*lacks lora_alpha"),
    (
      {},
      {'init_lora_weights': 'pissa_niter_4'},
      "init_lora_weights is 'pissa_niter_4'",
    ),
    ({}, {'r': 8, 'rank_pattern': {'q_proj': 4}}, r'has rank 2, .* allows \[4, 8\]'),
    ({f'{_QUERY}.lora_B.weight': torch.ones(9, 2)}, {}, r'shapes .*\(9, 2\)'),
    ({f'{_QUERY}.lora_B.weight': torch.ones(32, 3)}, {}, r'shapes .*\(32, 3\)'),
    ({'x.lora_A.weight': torch.ones(2, 3)}, {}, "the adapter of 'x.weight' has"),
    ({'x.lora_magnitude_vector': torch.ones(2)}, {}, "the adapter of 'x.weight' has"),
    ({f'{_QUERY}.lora_A.weight': torch.ones(())}, {}, 'cannot be used'),
  ],
)
def test_other_adapters_are_rejected(base, tmp_path, change, config, message):
  a, b = pair(32, 32)
  adapted = {f'{_QUERY}.lora_A.weight': a, f'{_QUERY}.lora_B.weight': b}
  write(tmp_path / 'peft', {**adapted, **change}, **config)
  with pytest.raises(ValueError, match=message):
    reading.read(str(tmp_path / 'peft'), base=str(base[0]))
