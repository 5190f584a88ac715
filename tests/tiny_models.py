"""Models that compile quickly, and helpers for them."""

import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import (
  models,
  models_bit,
  models_detr,
  models_eomt,
  models_igpt,
  models_lit,
  models_mixer,
)
from vit_jax.configs import models as model_configs
from vit_jax.layers import encoder as encoder_lib
from vit_jax.tasks import masked_patches


def config():
  """Returns a config without dropout, whose sizes are divisible by eight devices."""
  model = model_configs.get_config('testing')
  model.hidden_size = 16
  model.transformer.update(mlp_dim=16, dropout_rate=0.0)
  return model


def tiny(num_layers=1, **kwargs):
  """Returns a model that compiles quickly."""
  fields = dict(
    num_classes=5,
    patches={'size': (4, 4)},
    hidden_size=16,
    transformer=dict(
      num_layers=num_layers,
      mlp_dim=32,
      num_heads=2,
      dropout_rate=0.0,
      attention_dropout_rate=0.0,
    ),
  )
  return models.VisionTransformer(**{**fields, **kwargs})


def encoder(dtype=jnp.float32, **fields):
  """Returns the encoder with these fields of a Transformer."""
  return encoder_lib.Encoder(model_configs.Transformer(**fields), dtype)


def transformer(**fields):
  """Returns the fields of a small encoder without dropout."""
  defaults = dict(num_layers=1, mlp_dim=16, num_heads=2)
  rates = dict(dropout_rate=0.0, attention_dropout_rate=0.0)
  return {**defaults, **rates, **fields}


def of_every_kind(batch=8):
  """Returns a small model of every kind, and its inputs, by name.

  All inputs are in keyword arguments, except for the first.
  """
  return {
    **_classifiers(batch),
    **_detectors(batch),
    **_pixel_models(batch),
    **_towers(batch),
  }


_VIT = dict(patches={'size': (4, 4)}, hidden_size=16, transformer=transformer())


def _classifiers(batch):
  small = np.zeros((batch, 8, 8, 3), np.float32)
  large = np.zeros((batch, 32, 32, 3), np.float32)
  mixer = models_mixer.MlpMixer(
    patches={'size': (4, 4)},
    num_classes=5,
    num_blocks=1,
    hidden_dim=16,
    tokens_mlp_dim=8,
    channels_mlp_dim=16,
  )
  hybrid = tiny(resnet=dict(num_layers=(1,), width_factor=0.5))
  bit = models_bit.BitResNet(num_classes=5, num_layers=(1,), width_factor=0.5)
  masked_vit = masked_patches.MaskedViT(num_classes=5, **_VIT)
  tokens = np.zeros((batch, 4), np.int32)
  masks = {'fate': tokens, 'replacement': tokens, 'method': 'predict_patches'}
  return {
    'vit': (tiny(), [small], {'train': True}),
    'hybrid': (hybrid, [large], {'train': True}),
    'mixer': (mixer, [small], {'train': True}),
    'bit': (bit, [large], {'train': True}),
    'masked_vit': (masked_vit, [small], {'train': True, **masks}),
  }


def _detectors(batch):
  decoder = dict(
    num_classes=4,
    hidden_size=16,
    num_queries=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    num_heads=2,
    mlp_dim=16,
  )
  detr = models_detr.Detr(
    units=(1, 1, 1, 1),
    backbone_width=8,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    mask_head=True,
    masks_at_a_time=3,
    **decoder,
  )
  grid = transformer(position_grid=(8, 8))
  vit = {**_VIT, 'transformer': grid}
  detr_vit = models_detr.Detr(backbone='vit', vit=vit, **decoder)
  eomt = models_eomt.Eomt(num_classes=4, num_queries=4, num_query_layers=1, **_VIT)
  images = np.zeros((batch, 32, 32, 3), np.float32)
  options = {'mask': np.ones((batch, 32, 32), bool), 'train': False}
  return {
    'detr': (detr, [images], options),
    'detr_vit': (detr_vit, [images], options),
    'eomt': (eomt, [images[:, :8, :8]], {'train': True}),
  }


def _pixel_models(batch):
  fields = dict(
    hidden_size=16, num_layers=1, num_heads=2, num_colors=8, num_positions=16
  )
  igpt = models_igpt.ImageGPT(**fields)
  igpt_bert = models_igpt.ImageGPT(**fields, num_classes=5, causal=False)
  colors = np.zeros((batch, 16), np.int32)
  masked = np.zeros((batch, 16), bool)
  return {
    'igpt': (igpt, [colors], {'train': True}),
    'igpt_bert': (igpt_bert, [colors], {'masked': masked, 'train': True}),
  }


def _towers(batch):
  text = dict(width=16, num_layers=1, mlp_dim=16, num_heads=2, vocab_size=20)
  pp = dict(tokenizer_name='sentencepiece', size=8, max_len=5)
  siglip = models_lit.LitModel(_VIT, 'text_transformer', text, pp, 16, bias_init=-10.0)
  bert = {'config': {**text, 'num_positions': 5}}
  lit = models_lit.LitModel(_VIT, 'bert', bert, pp, (None, 16))
  images = np.zeros((batch, 8, 8, 3), np.float32)
  inputs = dict(images=images, tokens=np.ones((batch, 5), np.int32))
  return {'lit': (lit, [], inputs), 'siglip': (siglip, [], inputs)}


_traced = {}


def tree(model, *args, **kwargs):
  """Returns the nested shapes of the parameters; equal models are traced once."""
  of_inputs = jax.tree.map(lambda x: (x.shape, x.dtype.name), (args, kwargs))
  key = type(model), repr(model), str(of_inputs)
  if key not in _traced:
    init = functools.partial(model.init, train=False)
    _traced[key] = jax.eval_shape(init, jax.random.key(0), *args, **kwargs)['params']
  return _traced[key]


def shapes(model, size=224, channels=3):
  """Returns the shapes of the parameters, by path."""
  height, width = (size, size) if isinstance(size, int) else size
  x = jax.ShapeDtypeStruct((1, height, width, channels), jnp.float32)
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree(model, x))
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def numbers(model, size=224, seed=0, channels=3):
  """Returns random parameters, created without compiling the model."""
  rng = np.random.RandomState(seed)
  flat = {
    path: rng.randn(*leaf.shape).astype(np.float32)
    for path, leaf in shapes(model, size, channels).items()
  }
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def images(shape=(2, 8, 8, 3), seed=1):
  """Returns random numbers from -1 to 1, created without compiling."""
  values = np.random.RandomState(seed).uniform(-1, 1, shape)
  return jnp.asarray(values.astype(np.float32))


def init(model, x, seed=0):
  """Initialises a model in one compilation instead of hundreds."""
  initialize = jax.jit(lambda key, x: model.init(key, x, train=False))
  return initialize(jax.random.key(seed), x)['params']


def randomised(model, x, seed=0):
  """Returns parameters that are all random, including heads and class tokens.

  They have the scale of trained ones, and are created without compiling.
  """
  return drawn(tree(model, x), seed)


def drawn(tree, seed=0):
  """Returns random parameters for a tree of shapes; see `randomised`."""
  rng = np.random.RandomState(seed)

  def draw(path, leaf):
    name = path[-1].key
    fan_in = np.prod(leaf.shape[:-1])
    size = 1 / np.sqrt(fan_in) if name == 'kernel' else 0.1
    values = size * rng.randn(*leaf.shape) + (name in ('scale', 'var'))
    return jnp.asarray(values.astype(leaf.dtype))  # jnp would compile the cast.

  return jax.tree_util.tree_map_with_path(draw, tree)


def of_task(task, seed=0):
  """Returns random parameters and extra state of a task; see `randomised`."""
  return drawn(jax.eval_shape(task.init, jax.random.key(0)), seed)


def put(config, path, value):
  """Sets a key of a config, whatever its type."""
  *parts, key = path.split('.')
  for part in parts:
    config = config[part]
  with config.unlocked(), config.ignore_type():
    config[key] = value
