"""Tests of iGPT's recipes against the published numbers."""

import jax
import numpy as np
import pytest

from vit_jax.configs import igpt, igpt_digits, igpt_finetune
from vit_jax.learning import optim
from vit_jax.run import config as run_config
from vit_jax.tasks.pixels import pixels

# "Generative Pretraining from Pixels": layers, width; parameters as released.
SIZES = {
  's': (24, 512, 76_571_648),
  'm': (36, 1024, 455_157_760),
  'l': (48, 1536, 1_362_250_752),
  'xl': (60, 3072, 6_801_438_720),
}


def parameters(config, num_layers):
  """Counts the parameters of a model of a few of its layers, which are alike."""
  config = config.copy_and_resolve_references()
  config.model.num_layers = num_layers
  task = pixels.Task(config, pixels.Task.planned_metadata(config, None))
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize('size', SIZES)
def test_pre_training_is_that_of_the_paper(size):
  config = run_config.complete(igpt.get_config(f'{size},imagenet2012,32'))
  run_config.check(config)
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.95)
  assert config.weight_decay == config.l2_decay == config.grad_norm_clip == 0
  run = (64, 2_000_000) if size == 'xl' else (128, 1_000_000)
  assert (config.batch, config.total_steps) == run
  assert (config.warmup_epochs, config.decay_type) == (1.0, 'cosine')
  assert (config.model.num_colors, config.model.num_positions) == (512, 1024)
  assert config.model.causal
  assert not config.pp.flip
  layers, width, count = SIZES[size]
  assert (config.model.num_layers, config.model.hidden_size) == (layers, width)
  one, two = (parameters(config, num_layers) for num_layers in (1, 2))
  assert one + (layers - 1) * (two - one) == count
  # From memory of the paper's appendix.
  assert config.base_lr == {'s': 3e-3, 'm': 3e-3, 'l': 1e-3, 'xl': 3e-4}[size]


def test_the_schedule_warms_up_for_an_epoch_and_falls_to_0():
  config = run_config.resolve_steps(igpt.get_config(), 1_281_167)
  assert config.warmup_steps == 10_009
  schedule = optim.create_learning_rate_schedule(
    config.total_steps, config.base_lr, config.decay_type, config.warmup_steps
  )
  assert float(schedule(10_009)) == pytest.approx(3e-3)
  assert float(schedule(1_000_000)) == 0


def test_photographs_are_cropped_as_in_the_paper():
  """Short sides of 256 to 384 pixels, of which 224 x 224 are cropped."""
  config = igpt.get_config('m,/some/folder,48')
  assert (config.pp.crop, config.pp.resize) == (48, 48)
  assert config.model.num_positions == 48 * 48
  assert config.pp.crop_ratio == (1.0, 1.0)
  # The side of the square as a share of the short side of 4:3.
  sides = np.sqrt(np.multiply(config.pp.crop_area, 4 / 3))
  np.testing.assert_allclose(sides, [224 / 384, 224 / 256])


def test_objectives():
  assert igpt.get_config('s,x,64,ar').model.causal
  config = run_config.complete(igpt.get_config('s,x,64,bert'))
  assert not config.model.causal
  assert config.task_options.masked == 0.15


def test_fine_tuning_keeps_the_optimiser():
  config = run_config.complete(igpt_finetune.get_config('l,cifar10,32'))
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.95)
  assert (config.batch, config.weight_decay) == (128, 0)
  assert config.decay_type == 'constant'
  assert config.task_options.generation == 1
  digits = igpt_finetune.get_config('digits')
  assert digits.model == igpt_digits.get_config().model
  run_config.check(run_config.complete(digits))


def test_a_small_model_of_fashion_mnist():
  config = run_config.complete(igpt_digits.get_config('fashion_mnist'))
  assert config.dataset == 'fashion_mnist'
  assert config.model.num_positions == config.pp.crop**2 == 14**2
  run_config.check(config)
  with pytest.raises(ValueError, match='igpt_digits.py:mnist .* digits, fashion_mnist'):
    igpt_digits.get_config('mnist')


@pytest.mark.parametrize(
  'arg',
  ['s', 's,cifar10', 'xxl,cifar10,32', 's,cifar10,33', 's,,32', 's,x,32,gpt',
   's,x,32,ar,y'],
)  # fmt: skip
def test_a_wrong_argument_is_named(arg):
  for module in (igpt, igpt_finetune):
    with pytest.raises(ValueError, match='must be SIZE,DATA,SIDE or SIZE,DATA'):
      module.get_config(arg)
