"""Tests of the studies: their variants, and how the argument selects some."""

import pytest

from vit_jax.configs import attention_patterns, pooling, position_embeddings
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.studies import study


def test_position_embeddings_match_table_8():
  config = position_embeddings.get_config()
  runs = study.make_runs(config)
  assert len(runs) == len(position_embeddings.VARIANTS) * len(config.seeds)
  encoders = [run.config.model.transformer for run in runs]
  chosen = {(x.position_embedding, x.position_layers) for x in encoders}
  assert chosen >= {
    ('none', 'stem'), ('relative', 'every'),
    ('learned_1d', 'stem'), ('learned_1d', 'every'), ('learned_1d', 'shared'),
    ('learned_2d', 'stem'), ('learned_2d', 'every'), ('learned_2d', 'shared'),
  }  # fmt: skip
  for run in runs[:: len(config.seeds)]:
    run_evaluators.check(run_config.complete(run.config))


def test_pooling_is_compared_over_learning_rates():
  config = pooling.get_config()
  runs = study.make_runs(config)
  pairs = {(run.config.model.classifier, run.config.base_lr) for run in runs}
  assert pairs == {(kind, rate) for kind in ('token', 'gap') for rate in pooling.RATES}
  for (name, changes), (label, x) in zip(config.variants, config.x):
    assert name.startswith(label)
    assert changes['base_lr'] == x


@pytest.mark.parametrize(
  'module, names',
  [(position_embeddings, '2d, none'), (pooling, 'gap'), (attention_patterns, 'axial')],
)
def test_argument_selects_variants_and_the_data_set(module, names):
  config = module.get_config(f'{names},fashion_mnist')
  assert 0 < len(config.variants) < len(module.get_config().variants)
  assert config.base.dataset == 'fashion_mnist'
  assert config.base.pp.flip
  run_evaluators.check(run_config.complete(study.make_runs(config)[0].config))
  known = ', '.join(module.VARIANTS)
  with pytest.raises(ValueError, match=f"variant '3d' is unknown: use some of {known}"):
    module.get_config(f'{names},3d')
  with pytest.raises(ValueError, match='mnist,digits.* names 2 data sets'):
    module.get_config('mnist,digits')
