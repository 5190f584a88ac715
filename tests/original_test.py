"""Scripts written for the original, unchanged except for the batch layout."""

import logging

import flax
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from tests import tiny_models
from vit_jax import (
  checkpoint,
  inference_time,
  input_pipeline,
  models,
  test_utils,
  train,
  utils,
)
from vit_jax.commands import train as train_command
from vit_jax.configs import (
  augreg as augreg_config,
  common as common_config,
  inference_time as inference_time_config,
  models as models_config,
)
from vit_jax.run import metrics as metrics_lib


def test_users_own_training_loop(image_folder, tmp_path):
  """Fine-tuning as in the original's first notebook."""
  dataset = str(image_folder)
  config = common_config.with_dataset(common_config.get_config(), dataset)
  config.batch = 8
  config.batch_eval = 8
  config.pp.crop = 32
  num_classes = input_pipeline.get_dataset_info(dataset, 'train')['num_classes']
  ds_train = input_pipeline.get_data_from_tfds(config=config, mode='train')
  ds_test = input_pipeline.get_data_from_tfds(config=config, mode='test')
  batch = next(iter(ds_test.as_numpy_iterator()))
  assert batch['image'].shape == (8, 32, 32, 3)
  assert batch['label'].shape == (8, num_classes)

  model_config = models_config.MODEL_CONFIGS['testing']
  test_utils.create_checkpoint(model_config, str(tmp_path / 'testing.npz'))
  model = models.VisionTransformer(num_classes=num_classes, **model_config)
  image = batch['image'][:1]
  variables = jax.jit(lambda: model.init(jax.random.PRNGKey(0), image, train=False))()
  params = checkpoint.load_pretrained(
    pretrained_path=str(tmp_path / 'testing.npz'),
    init_params=variables['params'],
    model_config=model_config,
  )
  table = params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 5, 10)
  total_steps = 12
  lr_fn = utils.create_learning_rate_schedule(total_steps, 0.1, 'cosine', 2)
  tx = optax.chain(
    optax.clip_by_global_norm(1),
    optax.sgd(learning_rate=lr_fn, momentum=0.9, accumulator_dtype='bfloat16'),
  )
  update_fn = train.make_update_fn(apply_fn=model.apply, accum_steps=2, tx=tx)
  opt_state = tx.init(params)
  rng = jax.random.PRNGKey(0)
  losses = []
  for _, batch in zip(
    range(total_steps), input_pipeline.prefetch(ds_train, config.prefetch)
  ):
    params, opt_state, loss, rng = update_fn(params, opt_state, batch, rng)
    losses.append(float(loss))
  assert losses[-1] < losses[0]
  # Empty leaves, which the notebook adds by hand, are harmless.
  params = flax.core.unfreeze(params)
  params['pre_logits'] = {}
  apply = jax.jit(model.apply, static_argnames='train')
  assert apply({'params': params}, batch['image'], train=False).shape == (8, 3)


def test_augreg_notebook(image_folder, tmp_path):
  """Replaces all of `pp`; no accumulation; uses the best checkpoint of an index."""
  rows = 'name,ds,final_val,adapt_ds,adapt_final_test,filename,adapt_filename\n'
  for ds, best, name in (
    ('i1k', 0.9, 'R_Ti_16-i1k-a'),
    ('i21k', 0.3, 'R_Ti_16-i21k-b'),
    ('i21k', 0.4, 'R_Ti_16-i21k-c'),
    ('i21k', 0.5, 'B_16-i21k-d'),
  ):
    rows += f'x,{ds},{best},y,0.8,{name},{name}--y\n'
  (tmp_path / 'index.csv').write_text(rows)
  df = checkpoint.get_augreg_df(directory=str(tmp_path))
  assert list(df.query('ds=="i21k"').filename)[-1] == 'B_16-i21k-d'
  config = augreg_config.get_config('R_Ti_16')
  config.dataset = str(image_folder)
  config.pp = ml_collections.ConfigDict({'train': 'train', 'test': 'test', 'crop': 64})
  config.batch = config.batch_eval = 8
  config.update(total_steps=1, warmup_steps=0, accum_steps=0)
  config.pretrained_dir = str(tmp_path)
  # The best one pre-trained on ImageNet-21k.
  with pytest.raises(FileNotFoundError, match='R_Ti_16-i21k-c.npz.*hf://'):
    train.train_and_evaluate(config, str(tmp_path / 'run'))
  with pytest.raises(ValueError, match="model 'S_16' is not among the i21k"):
    checkpoint.augreg_filename('S_16', str(tmp_path))
  with pytest.raises(FileNotFoundError, match=r'no .*/no/index.csv'):
    checkpoint.augreg_filename('S_16', str(tmp_path / 'no'))


def test_mixer_trains_from_weights(image_folder, tmp_path):
  config = common_config.with_dataset(common_config.get_config(), str(image_folder))
  config.model_type = 'Mixer'
  config.pretrained_dir = None
  config.model = models_config.get_mixer_b16_config()
  config.model.update(hidden_dim=16, num_blocks=1, tokens_mlp_dim=8, channels_mlp_dim=8)
  config.pp.crop = 32
  config.batch = config.batch_eval = 8
  config.update(total_steps=1, warmup_steps=0)
  state, metrics = train.train_and_evaluate(config, str(tmp_path / 'run'))
  assert metrics['num_examples_test'] == 9
  block = state.params['MixerBlock_0']
  assert block['token_mixing']['Dense_0']['kernel'].shape == (4, 8)
  config.pretrained = str(tmp_path / 'run')
  config.pp.crop = 48
  with pytest.raises(
    ValueError, match=r'token_mixing/Dense_0/kernel: \(4, 8\) in the weights'
  ):
    train.train_and_evaluate(config, str(tmp_path / 'other'))


def test_mixer_by_hand():
  """One block with simple weights."""
  model = models.MlpMixer(
    patches={'size': (1, 1)}, num_classes=2, num_blocks=1, hidden_dim=2,
    tokens_mlp_dim=3, channels_mlp_dim=5,
  )  # fmt: skip
  images = jnp.asarray(np.random.RandomState(0).randn(1, 2, 2, 3), jnp.float32)
  params = tiny_models.init(model, images)
  params = jax.tree.map(lambda x: np.random.RandomState(x.size).randn(*x.shape), params)

  def dense(p, x):
    return x @ p['kernel'] + p['bias']

  def norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']

  def mlp(p, x):
    x = dense(p['Dense_0'], x)
    x = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return dense(p['Dense_1'], x)

  stem, block = params['stem'], params['MixerBlock_0']
  x = np.asarray(images, np.float64).reshape(4, 3)
  x = x @ stem['kernel'][0, 0] + stem['bias']
  x = x + mlp(block['token_mixing'], norm(block['LayerNorm_0'], x).T).T
  x = x + mlp(block['channel_mixing'], norm(block['LayerNorm_1'], x))
  x = norm(params['pre_head_layer_norm'], x).mean(0)
  want = dense(params['head'], x)
  apply = jax.jit(lambda p, x: model.apply({'params': p}, x, train=False))
  np.testing.assert_allclose(apply(params, images)[0], want, rtol=1e-4)


def test_accumulate_gradient():
  rng = np.random.RandomState(0)
  images, labels = rng.randn(12, 3), rng.randn(12, 1)

  def loss(w, images, labels):
    return jnp.mean((images @ w - labels) ** 2)

  w = jnp.ones((3, 1))
  want = 2 * images.T @ (images @ np.ones((3, 1)) - labels) / 12
  for steps in (None, 0, 1, 3, 12):
    value, gradient = utils.accumulate_gradient(
      jax.value_and_grad(loss), w, images, labels, steps
    )
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    np.testing.assert_allclose(value, loss(w, images, labels), rtol=1e-5)
  with pytest.raises(ValueError, match='accum_steps=5 does not divide the batch'):
    utils.accumulate_gradient(jax.value_and_grad(loss), w, images, labels, 5)


def test_log_file(tmp_path):
  handler = utils.add_gfile_logger(str(tmp_path / 'run'), basename='train')
  logging.getLogger('somewhere').warning('seven of %d', 9)
  handler.flush()
  logging.getLogger('').removeHandler(handler)
  handler.close()
  assert (tmp_path / 'run' / 'train.log').read_text().endswith('seven of 9\n')


def test_inference_time(tmp_path):
  config = inference_time_config.get_config()
  config.update(
    model_name='testing', batch=16, image_size=16, num_classes=3, steps=5,
    initial_steps=2,
  )  # fmt: skip
  result = inference_time.inference_time(config, str(tmp_path / 'new'))
  rates = [result[f'imgs_sec_core_{kind}'] for kind in ('min', 'mean', 'max')]
  assert 0 < rates[0] <= rates[1] <= rates[2]
  [line] = metrics_lib.read(tmp_path / 'new')
  assert line == {'step': 0, **result}
  config.batch = 12
  with pytest.raises(ValueError, match='batch=12 is not a multiple of the 8'):
    inference_time.inference_time(config, str(tmp_path))


def test_flags_of_the_original():
  """A path in the original's tree, and an argument for the config."""
  argv = [
    '--workdir=/tmp/vit',
    '--config=/home/me/vision_transformer/vit_jax/configs/augreg.py:R_Ti_16',
    '--config.dataset=oxford_iiit_pet', '--config.pp.train=train[:90%]',
    '--config.base_lr=0.01', '--config.pretrained_dir=gs://vit_models/augreg',
  ]  # fmt: skip
  config = train_command.parse(argv).config
  assert config.dataset == 'oxford_iiit_pet'
  assert config.model.model_name == 'R+ViT-Ti_16'
  assert (config.base_lr, config.pp.resize) == (0.01, 448)
  with pytest.raises(ValueError, match='environment variables.*JAX_LOG_COMPILES=1'):
    train_command.parse([*argv, '--jax_log_compiles=1'])
