"""Calls to the original that public programs make, copied verbatim.

Each test names the kind of program that makes them.
"""

import glob
import importlib
import inspect
import pathlib
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf

from tests import conftest, tiny_models
from vit_jax import input_pipeline, models, models_resnet, models_vit, preprocess, train
from vit_jax.configs import common as common_config, models as models_config

P = jax.sharding.PartitionSpec
PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'coming_from_the_original.md'


@pytest.fixture(scope='module')
def small():
  """A model with one layer, its variables, and 16 images."""
  model = tiny_models.tiny(num_classes=3)
  x = tiny_models.images((16, 8, 8, 3))
  params = tiny_models.randomised(model, x)
  return model, {'params': params}, x


@pytest.fixture(scope='module')
def smallest():
  """A model without a transformer, its variables, and 16 images."""
  model = tiny_models.tiny(num_classes=3, transformer=None, classifier='gap')
  x = tiny_models.images((16, 8, 8, 3))
  params = tiny_models.randomised(model, x)
  return model, {'params': params}, x


# --- Models in users' parallel code ---


def by_pmap(apply, variables, x):
  run = jax.pmap(apply, axis_name='batch')
  variables = flax.jax_utils.replicate(variables)
  return run(variables, x.reshape(8, 2, *x.shape[1:])).reshape(16, -1)


def by_shard_map(apply, variables, x):
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
  specs = dict(in_specs=(P(), P('data')), out_specs=P('data'))
  return jax.jit(jax.shard_map(apply, mesh=mesh, **specs))(variables, x)


def by_vmap(apply, variables, x):
  run = jax.jit(jax.vmap(apply, in_axes=(None, 0), axis_name='batch'))
  return run(variables, x[:, None])[:, 0]


def under_explicit_axes_split(apply, variables, x):
  kinds = (jax.sharding.AxisType.Explicit,)
  with jax.set_mesh(jax.make_mesh((8,), ('data',), axis_types=kinds)):
    x = jax.device_put(x, P('data'))
    return jax.jit(jax.sharding.auto_axes(apply, out_sharding=P('data')))(variables, x)


def test_robustness_study_applies_the_model(small):
  """Evaluation on corrupted images, on all devices of a host."""
  model, variables, x = small
  apply = lambda variables, x: model.apply(variables, x, train=False)
  want = jax.jit(apply)(variables, x)
  for way in (by_pmap, by_shard_map, by_vmap, under_explicit_axes_split):
    np.testing.assert_allclose(way(apply, variables, x), want, atol=1e-5)


def test_ensemble_is_initialised_with_old_style_keys(smallest):
  """Deep ensembles: one key per member, with vmap and pmap."""
  model, _, x = smallest
  keys = jax.random.split(jax.random.PRNGKey(0), 8)
  init = lambda key: model.init(key, x[:1], train=False)['params']
  want = jax.jit(init)(keys[3])
  for members in (jax.jit(jax.vmap(init))(keys), jax.pmap(init)(keys)):
    member = jax.tree.map(lambda leaf: leaf[3], members)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), member, want)


def test_batch_of_keys_is_rejected(small):
  """Training loops that replicate the key before they initialise or train."""
  model, variables, x = small
  keys = flax.jax_utils.replicate(jax.random.PRNGKey(0))
  message = r"rngs\['params'\] must be one random key, got uint32\[8, 2\]"
  with pytest.raises(ValueError, match=message):
    model.init(keys, x, train=False)
  with pytest.raises(ValueError, match=r"rngs\['dropout'\] must be one random"):
    model.apply(variables, x, train=True, rngs={'dropout': keys})
  update = train.make_update_fn(apply_fn=model.apply, accum_steps=1, tx=optax.sgd(0.1))
  with pytest.raises(ValueError, match='flax.jax_utils.replicate, pass the key'):
    update(variables['params'], optax.sgd(0.1).init({}), {'image': x}, keys)


def test_teacher_accepts_tensors_of_the_input_pipeline(smallest):
  """Distillation: the teacher's logits for a batch from tf.data."""
  model, variables, x = smallest
  logits = model.apply(variables, tf.constant(np.asarray(x)), train=False)
  want = model.apply(variables, x, train=False)
  np.testing.assert_array_equal(logits, want)


# --- Custom encoders and forks of the model file ---


class MyEncoder(nn.Module):
  """An encoder with only the original's fields."""

  num_layers: int
  mlp_dim: int
  num_heads: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1

  @nn.compact
  def __call__(self, x, *, train):
    assert x.ndim == 3
    for lyr in range(self.num_layers):
      x = models_vit.Encoder1DBlock(
        mlp_dim=self.mlp_dim, dropout_rate=self.dropout_rate,
        attention_dropout_rate=self.attention_dropout_rate,
        name=f'encoderblock_{lyr}', num_heads=self.num_heads,
      )(x, deterministic=not train)  # fmt: skip
    return nn.LayerNorm(name='encoder_norm')(x)


def test_custom_encoder_with_the_originals_fields(small):
  """Studies of attention variants, which replace the encoder."""
  _, _, x = small
  config = models_config.get_config('ViT-B_16')
  config.patches.size, config.hidden_size = (4, 4), 16
  config.transformer.update(num_layers=1, mlp_dim=32, num_heads=2)
  for options in (config, models_config.with_options(config)):
    model = models.VisionTransformer(num_classes=3, encoder=MyEncoder, **options)
    variables = jax.eval_shape(
      lambda: model.init(jax.random.PRNGKey(0), x, train=False)  # noqa: B023
    )
    names = set(variables['params']['Transformer'])
    assert names == {'encoderblock_0', 'encoder_norm'}
    assert models.make_model(options, num_classes=3, encoder=MyEncoder) == model
  config.transformer.gelu = 'erf'
  model = models.VisionTransformer(num_classes=3, encoder=MyEncoder, **config)
  message = r"unknown fields \['gelu'\]: MyEncoder takes \['attention_dropout"
  with pytest.raises(ValueError, match=message):
    model.init(jax.random.PRNGKey(0), x, train=False)
  del config.transformer.gelu
  with pytest.raises(ValueError, match=r"\['dtype'\]: MyEncoder.*dtype=bfloat"):
    models.VisionTransformer(
      num_classes=3, encoder=MyEncoder, dtype='bfloat16', **config
    ).init(jax.random.PRNGKey(0), x, train=False)


# --- Unchanged modules ---


def test_adapter_builds_on_the_mlp_block():
  """Adapters that start as a no-op, with a last layer of zeros."""
  block = models_vit.MlpBlock(
    mlp_dim=4, dropout_rate=0.0, kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.ones,
  )  # fmt: skip
  x = jnp.ones((1, 2, 3))
  params = block.init(jax.random.PRNGKey(0), x, deterministic=True)['params']
  assert float(jnp.abs(params['Dense_0']['kernel']).max()) == 0.0
  assert block.apply({'params': params}, x, deterministic=True).tolist() == [
    [[1.0] * 3] * 2
  ]


# Arguments and fields of the original, on its branch `main`.
# Initialisers are named after the Flax function that creates them.
PUBLISHED = {
  'models_vit.IdentityLayer': '',
  'models_vit.AddPositionEmbs': 'posemb_init, param_dtype=float32',
  'models_vit.MlpBlock': 'mlp_dim, dtype=float32, param_dtype=float32, '
  'out_dim=None, dropout_rate=0.1, kernel_init=variance_scaling, '
  'bias_init=normal',
  'models_vit.Encoder1DBlock': 'mlp_dim, num_heads, dtype=float32, '
  'dropout_rate=0.1, attention_dropout_rate=0.1',
  'models_vit.Encoder': 'num_layers, mlp_dim, num_heads, dropout_rate=0.1, '
  'attention_dropout_rate=0.1, add_position_embedding=True',
  'models_vit.VisionTransformer': 'num_classes, patches, transformer, '
  "hidden_size, resnet=None, representation_size=None, classifier='token', "
  'head_bias_init=0.0, encoder=Encoder, model_name=None',
  'models_vit.VisionTransformer.__call__': 'self, inputs, *, train',
  'models_vit.Encoder.__call__': 'self, x, *, train',
  'models_vit.Encoder1DBlock.__call__': 'self, inputs, *, deterministic',
  'models_vit.MlpBlock.__call__': 'self, inputs, *, deterministic',
  'models_vit.AddPositionEmbs.__call__': 'self, inputs',
  'models_resnet.weight_standardize': 'w, axis, eps',
  'models_resnet.ResidualUnit': 'features, strides=(1, 1)',
  'models_resnet.ResNetStage': 'block_size, nout, first_stride',
  'models_mixer.MlpBlock': 'mlp_dim',
  'models_mixer.MixerBlock': 'tokens_mlp_dim, channels_mlp_dim',
  'models_mixer.MlpMixer': 'patches, num_classes, num_blocks, hidden_dim, '
  'tokens_mlp_dim, channels_mlp_dim, model_name=None',
  'models_mixer.MlpMixer.__call__': 'self, inputs, *, train',
  'models.get_model': 'name, **kw',
  'models.LitModel': 'image, text_model, text, pp, out_dim, model_name',
  'models.LitModel.__call__': 'self, *, images=None, tokens=None',
  'models.LitModel.load_variables': 'self, path=None, cache=True',
  'models.LitModel.get_pp': 'self, crop=False',
  'models.LitModel.get_tokenizer': 'self',
  'models.LitModel.get_image_preprocessing': 'self, crop=False',
  'checkpoint.inspect_params': '*, params, expected, fail_if_extra=True, '
  'fail_if_missing=True',
  'checkpoint.recover_tree': 'keys, values',
  'checkpoint.copy': 'src, dst, progress=True, block_size=10485760',
  'checkpoint.load': 'path',
  'checkpoint.load_pretrained': '*, pretrained_path, init_params, model_config',
  'checkpoint.interpolate_posembed': 'posemb, num_tokens, has_class_token',
  'checkpoint.get_augreg_df': "directory='gs://vit_models/augreg'",
  'input_pipeline.get_tfds_info': 'dataset, split',
  'input_pipeline.get_directory_info': 'directory',
  'input_pipeline.get_dataset_info': 'dataset, split',
  'input_pipeline.get_datasets': 'config',
  'input_pipeline.get_data_from_directory': '*, config, directory, mode',
  'input_pipeline.get_data_from_tfds': '*, config, mode',
  'input_pipeline.get_data': None,
  'input_pipeline.prefetch': 'dataset, n_prefetch',
  'preprocess.PreprocessImages': 'size, crop=False',
  'preprocess.PreprocessImages.preprocess_tf': 'self, image',
  'preprocess.PreprocessImages.__call__': 'self, images',
  'preprocess.get_pp': '*, tokenizer_name, vocab_path, max_len, size, crop=False',
  'preprocess.get_tokenizer': 'tokenizer_name',
  'preprocess.BertTokenizer': 'vocab_path, max_len',
  'preprocess.BertTokenizer.preprocess_tf': 'self, text',
  'preprocess.BertTokenizer.__call__': 'self, texts',
  'preprocess.SentencepieceTokenizer': 'vocab_path, max_len',
  'preprocess.SentencepieceTokenizer.preprocess_tf': 'self, text',
  'preprocess.SentencepieceTokenizer.__call__': 'self, texts',
  'train.make_update_fn': '*, apply_fn, accum_steps, tx',
  'train.train_and_evaluate': 'config, workdir',
  'utils.GFileHandler': 'filename, mode, flush_secs=1.0',
  'utils.add_gfile_logger': "workdir, *, basename='train', level=20",
  'utils.create_learning_rate_schedule': 'total_steps, base, decay_type, '
  'warmup_steps, linear_end=1e-05, decay_at=()',
  'utils.accumulate_gradient': 'loss_and_grad_fn, params, images, labels, accum_steps',
  'inference_time.inference_time': 'config, workdir',
  'test_utils.create_checkpoint': 'model_config, path',
  'configs.common.get_config': '',
  'configs.common.with_dataset': 'config, dataset',
  'configs.common.flatten': "config, prefix=('config',)",
  'configs.vit.get_config': 'model_dataset',
  'configs.augreg.get_config': 'model_or_filename',
  'configs.mixer_base16_cifar10.get_config': '',
  'configs.inference_time.get_config': '',
  'configs.models.get_testing_config': '',
}
# Differences; the doc page lists them with reasons.
DIFFERENCES = {
  'input_pipeline.get_data': 'is not there',
  'utils.GFileHandler': 'has no flush_secs',
}


def find(name):
  """Returns what the package has under a name, or None."""
  module, _, rest = name.rpartition('.')
  if module.rpartition('.')[2][0].isupper():  # A method.
    return getattr(find(module), rest, None)
  return getattr(importlib.import_module(f'vit_jax.{module}'), rest, None)


def described(parameter):
  """Formats a parameter as in the table, without its type."""
  default = parameter.default
  if parameter.kind is parameter.VAR_KEYWORD:
    return '**'
  if default is parameter.empty:
    return parameter.name
  if default is jnp.float32:
    return f'{parameter.name}=float32'
  text = repr(default)
  if callable(default):
    text = default.__qualname__.split('.')[0]
  return f'{parameter.name}={text}'


def differences(name, published):
  """Returns how a signature differs from the published one, '' if it does not.

  Published calls must keep working: the same names in the same order, with the same
  defaults. More parameters may follow, and required ones may gain a default.
  """
  found = find(name)
  if found is None or published is None:
    return 'is not there' if found is None else 'is there'
  texts = [text for text in re.split(r', (?!\d)', published) if text]
  wanted = [text.partition('=')[0] for text in texts]
  of_flax = {'parent', 'name'} - set(wanted)
  ours = inspect.signature(found).parameters.values()
  ours = [p for p in ours if p.name not in of_flax]
  by_name = {p.name: p for p in ours}
  keyword_only = False
  for i, (key, text) in enumerate(zip(wanted, texts)):
    if text == '*':
      keyword_only = True
      continue
    if text.startswith('**'):
      if ours[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return f'has no {text}'
    elif key not in by_name:
      return f'has no {key}'
    elif described(by_name[key]) != text and '=' in text:
      return f'has {described(by_name[key])}, not {text}'
    elif not keyword_only and ours[i].name != key:
      return f'has {ours[i].name} where {key} was'
    by_name.pop(key, None)
  needed = [
    p.name
    for p in by_name.values()
    if p.default is p.empty and p.kind is not p.VAR_KEYWORD
  ]
  return f'needs {needed}' if needed else ''


def test_fields_and_defaults_match_the_original():
  found = {name: differences(name, PUBLISHED[name]) for name in PUBLISHED}
  assert {name: text for name, text in found.items() if text} == DIFFERENCES
  fields = inspect.signature(nn.Conv).parameters
  ours = inspect.signature(models_resnet.StdConv).parameters
  assert [*ours][: len(fields) - 2] == [*fields][:-2]  # Then parent and name.
  assert all(ours[key].default == fields[key].default for key in fields)
  page = PAGE.read_text()
  for name in DIFFERENCES:
    assert f'`{name}`' in page, name


# --- Data ---


@pytest.fixture(scope='module')
def balanced_folder(tmp_path_factory):
  """Three classes, with 4 training and 8 test images each."""
  return conftest.make_folder(tmp_path_factory.mktemp('balanced'), (4, 8))


@pytest.fixture
def config(balanced_folder):
  """A config as in a notebook: batches of 16, images of 8 pixels."""
  config = common_config.with_dataset(common_config.get_config(), str(balanced_folder))
  config.pp.crop = 8
  config.batch = config.batch_eval = 16
  return config


def test_constant_predictor_scores_a_third_on_balanced_data(config):
  """Evaluation loops that ignore the mask and divide by the number of rows."""
  _, ds_test = input_pipeline.get_datasets(config)
  folder = f'{config.dataset}/test'
  for data in (
    ds_test,
    input_pipeline.get_data_from_directory(
      config=config, directory=folder, mode='test'
    ),
  ):
    good = total = 0
    for batch in data.as_numpy_iterator():
      predicted = np.zeros(len(batch['image']), int)
      good += (predicted == batch['label'].argmax(axis=1)).sum()
      total += len(batch['image'])
    assert (good, total) == (8, 24)
  # The last batch need not be divisible by the number of devices.
  config.batch_eval = 8 * 3
  small = input_pipeline.get_data_from_tfds(config=config, mode='test').map(
    lambda batch: {'label': batch['label'][:23]}
  )
  [batch] = input_pipeline.prefetch(small, 2)
  assert batch['label'].shape == (23, 3)


def test_length_of_the_test_set(config):
  """Notebooks with a progress bar over the test set, or a look at its first batch."""
  ds_test = input_pipeline.get_data_from_tfds(config=config, mode='test')
  assert len(ds_test) == 2
  assert ds_test.cardinality().numpy() == 2
  assert len(ds_test.take(1)) == 1
  images = ds_test.map(lambda batch: batch['image'])
  assert [len(x) for x in images.as_numpy_iterator()] == [16, 8]
  assert len(images) == 2
  ds_train = input_pipeline.get_data_from_tfds(config=config, mode='train')
  assert ds_train.cardinality() == tf.data.INFINITE_CARDINALITY
  batch = next(iter(ds_train.take(1)))
  assert batch['image'].shape == (16, 8, 8, 3)


def test_folder_of_classes_is_a_split(config, balanced_folder, tmp_path):
  """A study with one folder per corruption, none of them named train."""
  FOLDER = str(balanced_folder / 'test')
  info = input_pipeline.get_directory_info(FOLDER)
  assert (info['num_examples'], info['num_classes']) == (24, 3)
  assert [info['int2str'](i) for i in range(3)] == ['ant', 'bee', 'cow']
  assert len(glob.glob(info['examples_glob'])) == 24
  data = input_pipeline.get_data_from_directory(
    config=config, directory=FOLDER, mode='train'
  )
  batch = next(data.as_numpy_iterator())
  assert batch['image'].shape == (16, 8, 8, 3)
  # A folder with both splits, and information by split.
  root = str(balanced_folder)
  assert input_pipeline.get_directory_info(root)['num_examples'] == 12
  info = input_pipeline.get_dataset_info(root, 'test')
  assert info['examples_glob'] == f'{FOLDER}/*/*'
  assert info['num_examples'] == 24
  with pytest.raises(FileNotFoundError, match="directory='nowhere' is not a fo"):
    input_pipeline.get_directory_info('nowhere')
  with pytest.raises(ValueError, match="mode='val' is unknown"):
    input_pipeline.get_data_from_directory(config=config, directory=FOLDER, mode='val')
  assert input_pipeline.get_tfds_info(root, 'test')['num_examples'] == 24


def test_info_about_a_tfds_data_set(data_dir, monkeypatch):
  """Notebooks that label a figure."""
  monkeypatch.setenv('TFDS_DATA_DIR', data_dir)
  info = input_pipeline.get_tfds_info('digits', 'test')
  assert (info['num_examples'], info['num_classes']) == (360, 10)
  assert info['int2str'](7) == '7'
  assert info['examples_glob'] is None


def test_preprocess_images_of_the_original():
  """Zero-shot notebooks."""
  image = np.zeros((4, 8, 3), np.uint8)
  image[:, :4], image[:, 6:] = 255, 51
  pp = preprocess.PreprocessImages(size=2)
  got = pp([image, image])
  assert (got.shape, got.dtype) == ((2, 2, 2, 3), np.float32)
  np.testing.assert_allclose(got[0, 0, :, 0], [1.0, -0.8], atol=0.01)
  middle = preprocess.PreprocessImages(size=4, crop=True)([image])
  np.testing.assert_allclose(middle[0, 0, :, 0], [1, 1, -1, -1], atol=1e-6)
  in_graph = tf.data.Dataset.from_tensors(image).map(pp.preprocess_tf)
  np.testing.assert_array_equal(next(in_graph.as_numpy_iterator()), got[0])
  with pytest.raises(ValueError, match='float32: pass uint8'):
    pp([image.astype(np.float32)])
