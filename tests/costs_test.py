"""Tests of the compute of pre-training against the paper and closed forms."""

import json

import pytest

from benchmarks import costs
from tests.planning import flops_test
from vit_jax.configs import models as model_configs
from vit_jax.planning import plan

# Some rows of table 6 of arXiv 2010.11929, and the results of its formula in other
# code.
TABLE_6 = [
  ('ViT-B_32', 7, 55, 56.3),
  ('ViT-H_14', 14, 4262, 4258.6),
  ('BiT-R50x1', 7, 50, 50.7),
  ('R50+ViT-L_16', 7, 859, 832.8),
  ('R50+ViT-L_16', 14, 1668, 1665.5),
]


def test_a_locked_image_tower_has_only_a_forward_pass(tmp_path):
  """In closed form: BERT-base on 16 tokens, B/16 on 197, a head of 768 each."""

  def tower(tokens, layers=12, width=768, mlp=3072):
    dense = tokens * (4 * width**2 + 2 * width * mlp)
    return 2 * layers * (dense + 2 * tokens**2 * width)

  text = tower(16) + 2 * 768 * 768
  image = tower(197) + 2 * 196 * (16 * 16 * 3) * 768 + 2 * 768 * 768
  out = tmp_path / 'out.json'
  costs.main(['--model=lit_b16b', '--num_examples=1e6', '--epochs=10', f'--json={out}'])
  [row] = json.loads(out.read_text())
  assert row['exaflops'] == pytest.approx((3 * text + image) * 1e7 / 1e18, 1e-6)


def test_table_6_and_table_2(monkeypatch, tmp_path, capsys):
  """One command prints and writes both; here a few rows of each kind of model."""
  published = {row[:2]: row[2] for row in TABLE_6}
  assert published.items() <= costs.TABLE_6.items()
  monkeypatch.setattr(costs, 'TABLE_6', published)
  table_2 = {k: v for k, v in plan.PAPER_CORE_DAYS.items() if k[0] == 'ViT-H_14'}
  monkeypatch.setattr(plan, 'PAPER_CORE_DAYS', table_2)
  file = tmp_path / 'rows.json'
  costs.main([f'--json={file}', '--price=2'])
  rows = json.loads(file.read_text())
  far = []
  for row, (model, epochs, published, computed) in zip(rows, TABLE_6, strict=True):
    assert (row['model'], row['epochs']) == (model, epochs)
    assert row['published_exaflops'] == published
    assert row['exaflops'] == pytest.approx(computed, abs=0.11)
    if abs(row['exaflops'] / published - 1) > 0.025:
      far.append((model, epochs))
    days = row['exaflops'] * 1e18 / (0.4 * 61.5e12 * 86400)
    assert row['core_days'] == pytest.approx(days)
    assert row['price'] == pytest.approx(days * 24 / 2 * 2)
  assert far == [('R50+ViT-L_16', 7)]
  spent = {r['model']: r['published_core_days'] for r in rows}
  assert {key: days for key, days in spent.items() if days} == {'ViT-H_14': 2_500}
  out = capsys.readouterr().out
  assert 'R50+ViT-L_16, 7 epochs: 859' in out
  assert 'at 40 % (--mfu) of its peak of 61.5 TFLOP/s' in out
  # Table 2: 2,500 core-days of 61.5 TFLOP/s are 13,284 exaFLOPs.
  assert 4258.6 / 13284 == pytest.approx(0.32, abs=0.005)
  assert any(
    line.startswith('ViT-H_14  ') and line.endswith('2,500           32 %')
    for line in out.splitlines()
  )
  assert '12,300' in out


def test_another_pre_training(tmp_path, capsys):
  file = tmp_path / 'rows.json'
  costs.main(
    [
      '--model', 's16', '--epochs=1.5', '--chip=v5e', '--mfu=0.5',
      '--num_examples=2e6', '--num_classes=10', '--image_size=64,96', f'--json={file}',
    ]
  )  # fmt: skip
  rows = json.loads(file.read_text())
  [row] = rows
  assert row['model'] == 'ViT-S_16'
  config = model_configs.get_config('s16')
  count = flops_test.multiply_adds(config, (64, 96), 10, as_run=False)
  work = 6 * count * 3e6 / 1e18
  assert row['exaflops'] == pytest.approx(work)
  # A v5e chip has 197 TFLOP/s.
  days = work * 1e18 / (0.5 * 197e12) / 86400
  assert row['core_days'] == pytest.approx(days)
  assert row['published_exaflops'] is None
  assert row['price'] is None
  assert 'v5e chip-days' in capsys.readouterr().out


@pytest.mark.parametrize(
  'args, message',
  [
    (['--model', 'b17', '--epochs=1', '--dataset=digits'], "model 'b17' is un"),
    (['--model', 'b16', '--dataset=digits'], '--model=NAME and --epochs'),
    (['--model', 'b16', '--epochs=7'], "model='ViT-B_16' needs the size of the data"),
    (['--epochs=7'], '--model=NAME and --epochs'),
    (['--mfu=0'], '--mfu: 0 must be above 0'),
    (['--json=/no/where/a.json'], r'json=.*\(--json\)'),
  ],
)
def test_wrong_flags_are_named(args, message):
  with pytest.raises(ValueError, match=message):
    costs.main(args)
