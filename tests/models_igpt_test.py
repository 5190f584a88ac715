"""Tests of iGPT: published counts, Hugging Face's model, causality, sampling."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
import transformers

from tests import torch_models
from vit_jax import models, models_igpt
from vit_jax.distributed import sharding
from vit_jax.weights import convert

# Computed from the released code, 32 x 32 pixels and 512 colours.
COUNTS = {
  'iGPT-S': 76_571_648,
  'iGPT-M': 455_157_760,
  'iGPT-L': 1_362_250_752,
  'iGPT-XL': 6_801_438_720,
}
# Pixels and colours of the tiny models.
N, C = 12, 7


def shapes(model):
  colors = jax.ShapeDtypeStruct((1, model.num_positions), jnp.int32)
  init = functools.partial(model.init, train=False)
  return jax.eval_shape(init, jax.random.key(0), colors)['params']


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts(name):
  layers = models.get_model(name).num_layers
  params = shapes(models.get_model(name, num_layers=1))
  block = params.pop('block_0')  # All blocks are alike.
  total = count(params) + layers * count(block)
  assert total == COUNTS[name]


def count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def make(**kwargs):
  fields = dict(
    hidden_size=16, num_layers=2, num_heads=2, num_positions=N, num_colors=C
  )
  return models_igpt.ImageGPT(**{**fields, **kwargs})


def random_colors(model, batch=3, seed=0):
  shape = (batch, model.num_positions)
  rng = np.random.RandomState(seed)
  return rng.randint(0, model.num_colors, shape).astype(np.int32)


@functools.cache
def params_of(model):
  """Returns random parameters that give logits of order 1."""
  rng = np.random.RandomState(0)

  def fill(leaf):
    fan_in = leaf.size // leaf.shape[-1] if leaf.ndim == 2 else model.hidden_size
    scale = fan_in**-0.5 if leaf.ndim > 1 else 1.0
    return (scale * rng.randn(*leaf.shape)).astype(np.float32)

  return jax.tree.map(fill, shapes(model))


@functools.cache
def apply(model):
  """Returns the compiled model: (parameters, colours, mask) -> logits."""
  return jax.jit(lambda params, *args: model.apply({'params': params}, *args))


def logits_of(model, *args):
  """Returns the logits with `params_of` a model."""
  return apply(model)(params_of(model), *args)


def test_initial_weights_match_the_released_code():
  model = make(num_positions=64, num_colors=100, hidden_size=64, num_classes=3)
  # Keys of this kind compile faster.
  key, colors = jax.random.key(0, impl='rbg'), random_colors(model)
  params = jax.jit(model.init)(key, colors)['params']
  block = params['block_1']
  want = {
    'start_token': (params['start_token'], 0.02),
    'colors': (params['color_embedding'], 0.02),
    'positions': (params['position_embedding'], 0.01),
    **{
      name: (block['attention'][name]['kernel'], 1 / 8)
      for name in ('query', 'key', 'value')
    },
    'out': (block['attention']['out']['kernel'], 128**-0.5),
    'hidden': (block['mlp']['hidden']['kernel'], 0.02),
    'output': (block['mlp']['output']['kernel'], 0.02),
  }
  for name, (found, std) in want.items():
    error = 4 * std / (2 * found.size) ** 0.5
    assert abs(found.std() - std) < error, name
  assert not params['color_head']['kernel'].any()
  assert not params['class_head']['kernel'].any()


def test_logits_and_layers_match_hugging_face(tmp_path, monkeypatch):
  config = transformers.ImageGPTConfig(
    vocab_size=C + 1, n_positions=16, n_embd=48, n_layer=2, n_head=2
  )
  theirs = transformers.ImageGPTForCausalImageModeling(config).eval()
  torch_models.randomize(theirs)
  with torch.no_grad():
    for name, value in theirs.named_parameters():
      if name.endswith('bias'):  # As in the released code.
        value.zero_()
  theirs.save_pretrained(tmp_path)
  params = convert.read(str(tmp_path)).params
  compare(theirs, params, make(num_positions=16, hidden_size=48))
  # Until 2026 it divided by 4 instead of the square root of 24, 4.9.
  module = 'transformers.models.imagegpt.modeling_imagegpt'
  monkeypatch.setattr(f'{module}.torch_float', int)
  compare(
    theirs, params, make(num_positions=16, hidden_size=48, attention_scale='truncated')
  )


def compare(theirs, params, ours):
  """Compares logits and layers."""
  colors = random_colors(ours, 2)
  before = np.pad(colors[:, :-1], ((0, 0), (1, 0)), constant_values=C)
  with torch.no_grad():
    want = theirs(torch.tensor(before).long(), output_hidden_states=True)
    norms = [block.ln_1 for block in theirs.transformer.h]
    layers = [norm(x).mean(1) for norm, x in zip(norms, want.hidden_states[:-1])]
  layers.append(want.hidden_states[-1].mean(1))
  apply = jax.jit(
    lambda params, x: ours.apply({'params': params}, x, mutable='intermediates')
  )
  logits, sown = apply(params, colors)
  np.testing.assert_allclose(logits, want.logits, atol=1e-4)
  sown = sown['intermediates']
  for i, layer in enumerate(layers):
    found = sown.get(f'block_{i}', sown)[f'layer_{i}'][0]
    np.testing.assert_allclose(found, layer, atol=1e-4)
  assert float(want.logits.std()) > 0.3


# --- Devices ---


def test_sharded_parameters_give_the_same_logits():
  model = make()
  colors = random_colors(model, 4)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  params = params_of(model)
  split = jax.device_put(params, sharding.tree_shardings(params, (), mesh))
  kernel = split['block_0']['attention']['query']['kernel']
  assert kernel.addressable_shards[0].data.shape == (16, 1, 8)
  with jax.set_mesh(mesh):
    found = jax.jit(lambda p, x: model.apply({'params': p}, x))(split, colors)
  np.testing.assert_allclose(found, logits_of(model, colors), atol=1e-5)


# --- Causality and masking ---


def changes(model, *args):
  """Returns which logits change with which pixel: bool [changed pixel, pixel]."""
  colors = random_colors(model, 1)
  eye = np.eye(N, dtype=np.int32)
  others = (colors + eye * (1 + np.arange(N)[:, None] % (C - 1))) % C
  logits = logits_of(model, np.concatenate([colors, others]), *args)
  return np.asarray((logits[1:] != logits[:1]).any(axis=-1))


def test_pixels_affect_only_the_logits_of_later_pixels():
  rows, columns = np.indices((N, N))
  np.testing.assert_array_equal(changes(make()), columns > rows)


def test_masked_pixels_affect_no_logits():
  masked = np.arange(N) % 3 == 1
  seen = np.broadcast_to(~masked[:, None], (N, N))
  found = changes(make(causal=False), np.tile(masked, (N + 1, 1)))
  np.testing.assert_array_equal(found, seen)


def test_model_with_classes_has_the_same_logits():
  model, both = make(), make(num_classes=3)
  kernel = np.random.RandomState(0).randn(16, 3).astype(np.float32)
  params = {**params_of(model), 'class_head': {'kernel': kernel}}
  colors = random_colors(model)
  run = jax.jit(
    lambda params: both.apply({'params': params}, colors, mutable='intermediates')
  )
  (logits, classes), sown = run(params)
  np.testing.assert_allclose(logits, logits_of(model, colors), atol=1e-5)
  [last] = sown['intermediates']['layer_2']
  np.testing.assert_allclose(classes, last @ kernel, atol=1e-5)


def test_remat_and_scan_change_nothing():
  def gradient(**fields):
    model = make(num_layers=3, **fields)
    colors = random_colors(model)

    def loss(params):
      logits = model.apply({'params': params}, colors, train=True)
      return -models_igpt.log_likelihood(logits, colors).mean()

    return jax.jit(jax.grad(loss))(params_of(make(num_layers=3)))

  want = gradient()
  for fields in ({'remat': 'full'}, {'scan': True}):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient(**fields), want
    )


# --- Sampling ---


def test_cached_logits_match_a_full_forward_pass():
  model = make()
  colors = random_colors(model)
  before = np.pad(colors, ((0, 0), (1, 0)))
  extend = jax.jit(
    functools.partial(model.apply, {'params': params_of(model)}, method='extend')
  )
  cache, found, start = model.empty_cache(len(colors)), [], 0
  for size in (5, 1, 6):
    logits, cache = extend(before[:, start : start + size], start, cache)
    found.append(logits)
    start += size
  found = np.concatenate(found, axis=1)
  np.testing.assert_allclose(found, logits_of(model, colors), atol=1e-5)


@functools.cache
def small():
  """Returns a model of 4 pixels in 2 colours, all its images, and their likelihoods."""
  model = make(num_layers=1, num_positions=4, num_colors=2)
  images = np.array(list(itertools.product((0, 1), repeat=4)), np.int32)
  likelihood = models_igpt.log_likelihood(logits_of(model, images), images)
  return model, images, np.exp(np.float64(likelihood))


def test_likelihoods_of_all_images_sum_to_1():
  _, _, likelihood = small()
  assert likelihood.sum() == pytest.approx(1, abs=1e-5)
  assert likelihood.max() > 3 * likelihood.min()


@pytest.mark.parametrize('length', [0, 2])
def test_sample_frequencies_match_the_likelihood(length):
  model, images, likelihood = small()
  count = 4000
  prefix = np.tile([1, 0][:length], (count, 1)).reshape(count, length)
  drawn = models_igpt.sample(model, params_of(model), prefix, jax.random.key(1))
  np.testing.assert_array_equal(drawn[:, :length], prefix)
  fits = (images[:, :length] == prefix[0]).all(axis=1)
  observed = np.bincount(np.asarray(drawn) @ [8, 4, 2, 1], minlength=16)
  assert not observed[~fits].any()
  expected = likelihood[fits] / likelihood[fits].sum() * count
  assert scipy.stats.chisquare(observed[fits], expected).pvalue > 1e-3


def test_greedy_sampling_and_sampling_in_chunks():
  model = make(num_layers=1)
  prefix = random_colors(model, 4)[:, :3]
  draw = functools.partial(models_igpt.sample, model, params_of(model))
  greedy = draw(prefix, jax.random.key(0), top_k=1)
  best = logits_of(model, greedy).argmax(axis=-1)
  np.testing.assert_array_equal(greedy[:, 3:], best[:, 3:])
  cold = draw(prefix, jax.random.key(0), temperature=1e-4)
  np.testing.assert_array_equal(cold, greedy)
  # Each image has its own key.
  keys = jax.random.split(jax.random.key(0), 4)
  whole = draw(prefix, jax.random.key(0))
  np.testing.assert_array_equal(draw(prefix, keys), whole)
  np.testing.assert_array_equal(draw(prefix[2:], keys[2:]), whole[2:])
  assert (whole != greedy).any()


def test_temperature_and_top_k():
  logits = np.log([0.4, 0.1, 0.3, 0.2]).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 4000)
  drawn = models_igpt.draw(keys, jnp.tile(logits, (4000, 1)), 2.0, 3)
  roots = np.sqrt([0.4, 0, 0.3, 0.2])
  observed = np.bincount(drawn, minlength=4)
  assert observed[1] == 0
  kept = roots > 0
  expected = 4000 * roots[kept] / roots.sum()
  assert scipy.stats.chisquare(observed[kept], expected).pvalue > 1e-3


# --- Errors ---


@pytest.mark.parametrize(
  'fields, args, message',
  [
    ({'num_heads': 3}, (), 'num_heads=3 does not divide the width 16'),
    ({'attention_scale': 'no'}, (), "attention_scale='no' must be one of"),
    ({'num_positions': 9}, (), 'colors has 12 pixels an image, but .* 9 posi'),
    ({}, (np.ones((3, N), bool),), 'masked is for a model with causal=False'),
  ],
)
def test_wrong_fields_and_pixels_are_named(fields, args, message):
  model = make(**fields)
  colors = np.zeros((3, N), np.int32)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(model.init, jax.random.key(0), colors, *args)


@pytest.mark.usefixtures('unchecked_shapes')
def test_colors_must_be_integers():
  with pytest.raises(ValueError, match='colors must be numbers of colours'):
    jax.eval_shape(make().init, jax.random.key(0), np.zeros((3, N)))


@pytest.mark.parametrize(
  'fields, pixels, kwargs, message',
  [
    ({'causal': False}, 3, {}, "causal=False .*cannot draw images.*'ar'"),
    ({}, N, {}, 'prefix must be colours .*fewer than 12 .*nothing is left'),
    ({}, 3, {'temperature': 0.0}, 'temperature=0.0 must be positive'),
    ({}, 3, {'top_k': 8}, 'top_k=8 must be from 1 to the number of colours, 7'),
  ],
)
def test_wrong_sampling_arguments_are_named(fields, pixels, kwargs, message):
  prefix = np.zeros((2, pixels), np.int32)
  with pytest.raises(ValueError, match=message):
    models_igpt.sample(make(**fields), {}, prefix, jax.random.key(0), **kwargs)
