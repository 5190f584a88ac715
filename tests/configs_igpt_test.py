"""Tests of iGPT's recipes against the published numbers."""

import numpy as np
import pytest

from vit_jax.configs import igpt, igpt_digits, igpt_finetune
from vit_jax.learning import schedules
from vit_jax.run import config as run_config, evaluators as run_evaluators

# "Generative Pretraining from Pixels": layers, width; the rate is from its appendix.
SIZES = {
  's': (24, 512, 3e-3),
  'm': (36, 1024, 3e-3),
  'l': (48, 1536, 1e-3),
  'xl': (60, 3072, 3e-4),
}


@pytest.mark.parametrize('size', SIZES)
def test_pre_training_matches_the_paper(size):
  config = run_config.complete(igpt.get_config(f'{size},imagenet2012,32'))
  run_evaluators.check(config)
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.95)
  assert config.weight_decay == config.l2_decay == config.grad_norm_clip == 0
  run = (64, 2_000_000) if size == 'xl' else (128, 1_000_000)
  assert (config.batch, config.total_steps) == run
  assert (config.warmup_epochs, config.decay_type) == (1.0, 'cosine')
  assert (config.model.num_colors, config.model.num_positions) == (512, 1024)
  assert config.model.causal
  assert not config.pp.flip
  model = config.model
  assert (model.num_layers, model.hidden_size, config.base_lr) == SIZES[size]
  masked = run_config.complete(igpt.get_config(f'{size},x,64,bert'))
  assert not masked.model.causal
  assert masked.task_options.masked == 0.15


def test_schedule_warms_up_for_an_epoch_and_decays_to_0():
  config = run_config.resolve_steps(igpt.get_config(), 1_281_167)
  assert config.warmup_steps == 10_009
  schedule = schedules.create_learning_rate_schedule(
    config.total_steps, config.base_lr, config.decay_type, config.warmup_steps
  )
  assert float(schedule(10_009)) == pytest.approx(3e-3)
  assert float(schedule(1_000_000)) == 0


def test_photographs_are_cropped_as_in_the_paper():
  """Resizes the short side to 256 to 384 pixels, then crops 224 x 224."""
  config = igpt.get_config('m,/some/folder,48')
  assert (config.pp.crop, config.pp.resize) == (48, 48)
  assert config.model.num_positions == 48 * 48
  assert config.pp.crop_ratio == (1.0, 1.0)
  # Side of the square relative to the short side, at 4:3.
  sides = np.sqrt(np.multiply(config.pp.crop_area, 4 / 3))
  np.testing.assert_allclose(sides, [224 / 384, 224 / 256])


def test_fine_tuning_keeps_the_optimizer_settings():
  config = run_config.complete(igpt_finetune.get_config('l,cifar10,32'))
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.95)
  assert (config.batch, config.weight_decay) == (128, 0)
  assert config.decay_type == 'constant'
  assert config.task_options.generation == 1
  digits = igpt_finetune.get_config('digits')
  assert digits.model == igpt_digits.get_config().model
  run_evaluators.check(run_config.complete(digits))


def test_small_model_for_fashion_mnist():
  config = run_config.complete(igpt_digits.get_config('fashion_mnist'))
  assert config.dataset == 'fashion_mnist'
  assert config.model.num_positions == config.pp.crop**2 == 14**2
  run_evaluators.check(config)
  with pytest.raises(ValueError, match='igpt_digits.py:mnist .* digits, fashion_mnist'):
    igpt_digits.get_config('mnist')


@pytest.mark.parametrize(
  'arg',
  ['s', 'xxl,cifar10,32', 's,cifar10,33', 's,x,32,gpt'],
)
def test_wrong_arguments_are_named(arg):
  for module in (igpt, igpt_finetune):
    with pytest.raises(ValueError, match='must be SIZE,DATA,SIDE or SIZE,DATA'):
      module.get_config(arg)
