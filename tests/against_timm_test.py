"""Tests of the comparison between training here and training timm's model."""

import json
import sys

import pytest
import torch

from benchmarks import against_timm, twins
from tests import torchvision_ops  # noqa: F401 (timm fails to import without)

# isort: split
import timm


def test_updates_match_pytorch(data_dir, tmp_path, capsys, monkeypatch):
  """Warm-up, decay, label smoothing, weight decay and clipping, on shuffled crops."""
  compiled = []
  # Compiling takes a minute.
  monkeypatch.setattr(torch, 'compile', lambda net: compiled.append(net) or net)
  file = tmp_path / 'rows.json'
  against_timm.main(
    [
      '--config=configs/digits.py', f'--config.tfds_data_dir={data_dir}',
      '--config.model.hidden_size=24', '--config.model.transformer.num_layers=1',
      '--config.model.transformer.mlp_dim=48', '--config.batch=64',
      '--config.total_epochs=None', '--config.warmup_epochs=None',
      '--config.total_steps=30', '--config.warmup_steps=2',
      '--config.base_lr=0.005', '--config.weight_decay=2.0', '--config.grad_norm_clip=0.5',
      '--config.progress_every=10', f'--json={file}',
      '--compile',
    ]
  )  # fmt: skip
  [row] = json.loads(file.read_text())
  ours, theirs = zip(*row['losses'], strict=True)
  assert ours == pytest.approx(theirs, rel=1e-5)
  assert ours[-1] < ours[0] - 0.1
  accuracy, accuracy_theirs = row['accuracy']
  assert accuracy == pytest.approx(accuracy_theirs, abs=0.006)  # Two of 360 images.
  output = capsys.readouterr().out
  assert len(compiled) == 1
  assert 'step 30/30' in output
  assert f'{100 * accuracy:.2f} %' in output
  for speed in (*row['img_sec'], *row['img_sec_eval']):
    assert f'{speed:,.0f}' in output


@pytest.mark.parametrize(
  'key, value',
  [('ema_decay', 0.9), ('model.dtype', 'bfloat16'), ('pretrained', 'ViT-B_16.npz')],
)
def test_settings_timm_lacks_are_named(tiny_config, key, value):
  tiny_config.update_from_flattened_dict({'optim_dtype': 'float32', key: value})
  with pytest.raises(ValueError, match=f'config.{key}={value}'):
    twins.compare(against_timm.COMPARISON, tiny_config)


def test_weight_decay_applies_to_kernels():
  net = timm.models.VisionTransformer(
    img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=1, num_heads=2,
    reg_tokens=1, global_pool='map',
  )  # fmt: skip
  others = [
    name
    for name, x in net.named_parameters()
    if x.ndim > 1 and not twins.is_kernel(name, x)
  ]
  assert sorted(others) == ['attn_pool.latent', 'cls_token', 'pos_embed', 'reg_token']
  assert twins.is_kernel('head.weight', net.head.weight)


def test_missing_package_is_named_first(monkeypatch):
  monkeypatch.setitem(sys.modules, 'timm', None)
  with pytest.raises(ImportError, match=r'timm.*\[test\]'):
    against_timm.main(['--config=configs/digits.py'])
