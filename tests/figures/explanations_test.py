"""Tests of explanations: formulas in NumPy, whose gradients are finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import numpy_vit, tiny_models
from vit_jax import models
from vit_jax.figures import explanations

GRID = (2, 3)
CLASSES = (1, 4)
STEP = 1e-4  # Of the finite differences, in float64.


def transformer(**fields):
  return dict(
    num_layers=2, mlp_dim=32, num_heads=2, dropout_rate=0.0,
    attention_dropout_rate=0.0, **fields,
  )  # fmt: skip


def images():
  return tiny_models.images((2, 8, 12, 3))


def explained(model, params, methods):
  """The maps of several methods in one compilation."""

  @jax.jit
  def compute(params, x):
    classes = jnp.array(CLASSES)
    return {m: explanations.explain(model, params, x, classes, m) for m in methods}

  return jax.device_get(compute(params, images()))


class Vit:
  """A Vision Transformer for one image in float64, whose insides can be changed.

  Changes may have a leading axis [C, ...], which results then have too.
  """

  def __init__(self, model, params, image):
    self.model = model
    self.params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    kernel = self.params['embedding']['kernel']
    image = np.asarray(image, np.float64)
    patches = [
      np.einsum('ijc,ijcd->d', image[r : r + 4, c : c + 4], kernel)
      for r in range(0, image.shape[0], 4)
      for c in range(0, image.shape[1], 4)
    ]
    x = np.stack(patches) + self.params['embedding']['bias']
    if model.has_class_token:
      x = np.concatenate([self.params['cls'][0], x])
    x = x + self.params['Transformer']['posembed_input']['pos_embedding'][0]
    if model.registers:
      x = np.concatenate([self.params['register_tokens'][0], x])
    self.embedded = x  # [N, D]
    self.hidden = None  # bool [N, N]: pairs that a mask hides.

  def attention(self, p, queries, keys, change, hidden=None):
    """Returns the output, and the weights [K, Q, S], to which `change` is added."""
    q, k, v = (
      numpy_vit.dense(p[name], x)
      for name, x in (('query', queries), ('key', keys), ('value', keys))
    )  # [N, K, E]
    scores = np.einsum('...qhe,...she->...hqs', q, k) / np.sqrt(q.shape[-1])
    if hidden is not None:
      scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum('...hqs,...she->...qhe', weights + change, v)
    return numpy_vit.dense(p['out'], out, axes=2), weights

  def layer(self, number, x, change=0.0, norm_change=0.0):
    """Returns the tokens after a layer, its weights and its first norm."""
    p = self.params['Transformer'][f'encoderblock_{number}']
    normed = numpy_vit.norm(p['LayerNorm_0'], x)
    y = normed + norm_change
    y, weights = self.attention(
      p['MultiHeadDotProductAttention_0'], y, y, change, self.hidden
    )
    x = x + y
    y = numpy_vit.norm(p['LayerNorm_1'], x)
    y = numpy_vit.gelu(numpy_vit.dense(p['MlpBlock_0']['Dense_0'], y))
    return x + numpy_vit.dense(p['MlpBlock_0']['Dense_1'], y), weights, normed

  def pooled(self, x, change=0.0):
    """Returns what the head reads from tokens [n, D], and the weights of the pooling."""
    p = self.params['MAPHead_0']
    y, weights = self.attention(
      p['MultiHeadDotProductAttention_0'], p['probe'][0], x, change
    )
    z = numpy_vit.norm(p['LayerNorm_0'], y)
    z = numpy_vit.gelu(numpy_vit.dense(p['MlpBlock_0']['Dense_0'], z))
    return (y + numpy_vit.dense(p['MlpBlock_0']['Dense_1'], z))[..., 0, :], weights

  def logits(self, x, change=0.0):
    """Returns the logits of the tokens [N, D] after the layers."""
    x = numpy_vit.norm(self.params['Transformer']['encoder_norm'], x)
    if self.model.classifier == 'token':
      x = x[..., 0, :]
    elif self.model.classifier == 'gap':
      x = x.mean(axis=-2)
    else:
      x, _ = self.pooled(x[..., self.model.registers :, :], change)
    return numpy_vit.dense(self.params['head'], x)

  def logit(self, number, weights=(0.0, 0.0), norm=0.0, pooling=0.0):
    """Returns a class's logit if something is added to the insides."""
    x = self.layer(0, self.embedded, weights[0])[0]
    x = self.layer(1, x, weights[1], norm)[0]
    return self.logits(x, pooling)[..., number]

  def insides(self):
    """Returns the tokens after each layer, the weights, and the last first norm."""
    first, first_weights, _ = self.layer(0, self.embedded)
    second, second_weights, norm = self.layer(1, first)
    return [first, second], [first_weights, second_weights], norm


def gradient(function, shape):
  """The gradient of a function of a change, at no change, by central differences."""
  size = np.prod(shape)
  changes = STEP * np.eye(size).reshape(size, *shape)
  return ((function(changes) - function(-changes)) / (2 * STEP)).reshape(shape)


def scaled(relevance):
  """Returns the last patches' relevance as a map in [0, 1]."""
  relevance = relevance[-GRID[0] * GRID[1] :].reshape(GRID)
  spread = np.ptp(relevance)
  return (relevance - relevance.min()) / (spread if spread else 1.0)


def rollout_gradient(vit, number):
  """Rules 5 and 6 of arXiv 2103.15679."""
  tokens, weights, _ = vit.insides()
  result = np.eye(len(vit.embedded))
  for layer in range(2):

    def logit(change, layer=layer):
      changes = [0.0, 0.0]
      changes[layer] = change
      return vit.logit(number, changes)

    product = weights[layer] * gradient(logit, weights[layer].shape)
    result = result + np.maximum(product, 0).mean(axis=0) @ result
  if vit.model.classifier == 'token':
    return scaled(result[0])
  if vit.model.classifier == 'gap':
    return scaled(result.mean(axis=0))
  normed = numpy_vit.norm(vit.params['Transformer']['encoder_norm'], tokens[-1])
  pooling = vit.pooled(normed[vit.model.registers :])[1]  # [K, 1, n]
  slope = gradient(lambda x: vit.logit(number, pooling=x), pooling.shape)
  read = np.maximum(pooling * slope, 0).mean(axis=0)[0]
  return scaled(read @ result[vit.model.registers :])


def legrad(vit, number):
  """The mean over layers, heads and queries of positive gradients."""
  tokens, weights, _ = vit.insides()
  total = 0.0
  for layer, inputs in enumerate([vit.embedded, tokens[0]]):
    if vit.model.classifier == 'map':
      shape = (2, 1, GRID[0] * GRID[1])
      logit = lambda x, z=tokens[layer]: vit.logits(z, x)[..., number]
    else:
      shape = weights[layer].shape

      def logit(change, layer=layer, inputs=inputs):
        after = vit.layer(layer, inputs, change)[0]
        mean = after.mean(axis=-2, keepdims=True)
        return vit.logits(np.broadcast_to(mean, after.shape))[..., number]

    slope = np.maximum(gradient(logit, shape), 0)
    if vit.hidden is not None:
      slope[:, vit.hidden] = 0
    total = total + slope.mean(axis=(0, 1))
  return scaled(total)


def grad_cam(vit, number):
  """Channels weighted by their mean gradient over the patches."""
  norm = vit.insides()[2]
  slope = gradient(lambda x: vit.logit(number, norm=x), norm.shape)
  patches = GRID[0] * GRID[1]
  return scaled(np.maximum(norm[-patches:] @ slope[-patches:].mean(axis=0), 0))


FORMULAS = {
  'rollout_gradient': rollout_gradient,
  'legrad': legrad,
  'grad_cam': grad_cam,
}


@pytest.mark.parametrize(
  'fields',
  [
    dict(classifier='token'),
    dict(
      classifier='gap',
      transformer=transformer(attention_pattern='local', attention_window=3),
    ),
    dict(classifier='map', registers=1),
  ],
  ids=lambda fields: fields['classifier'],
)
def test_maps_match_the_formulas_in_numpy(fields):
  model = tiny_models.tiny(2, **fields)
  params = tiny_models.randomised(model, images())
  maps = explained(model, params, FORMULAS)
  for i, (image, number) in enumerate(zip(images(), CLASSES)):
    vit = Vit(model, params, image)
    if fields['classifier'] == 'gap':
      columns = np.arange(6) % 3  # The window hides the columns two apart.
      vit.hidden = abs(columns[:, None] - columns) > 1
    for method, formula in FORMULAS.items():
      expected = formula(vit, number)
      assert np.ptp(expected) == 1, method
      np.testing.assert_allclose(maps[method][i], expected, atol=2e-5, err_msg=method)


def test_grad_cam_without_a_transformer_is_the_class_activation_map():
  # The logits are linear in the tokens: the map is their product with the head.
  model = tiny_models.tiny(transformer=None, classifier='gap')
  params = tiny_models.randomised(model, images())
  maps = explained(model, params, ['grad_cam'])['grad_cam']
  tokens = model.apply({'params': params}, images(), method='embed')  # [B, N, D]
  for i, number in enumerate(CLASSES):
    evidence = np.asarray(tokens[i]) @ np.asarray(params['head']['kernel'])[:, number]
    np.testing.assert_allclose(maps[i], scaled(np.maximum(evidence, 0)), atol=1e-5)


def mixer():
  return models.MlpMixer(
    patches={'size': (4, 4)}, num_classes=5, num_blocks=1, hidden_dim=8,
    tokens_mlp_dim=4, channels_mlp_dim=8,
  )  # fmt: skip


def bit():
  return models.get_model('bit_r50x1', num_classes=5, num_layers=(1,), width_factor=0.5)


def axial():
  fields = transformer(attention_pattern='axial')
  return tiny_models.tiny(classifier='gap', transformer=fields)


def test_grad_cam_explains_mixers_by_their_patches():
  params = tiny_models.randomised(mixer(), images())
  first, second = explained(mixer(), params, ['grad_cam'])['grad_cam']
  assert first.shape == GRID
  assert first.min() == second.min() == 0
  np.testing.assert_allclose((first.max(), second.max()), 1, rtol=1e-6)


@pytest.mark.parametrize(
  'model, method, words',
  [
    (mixer(), 'legrad', "MlpMixer has no attention weights.*method='grad_cam'"),
    (bit(), 'rollout', "BitResNet has no attention weights.*method='grad_cam'"),
    (axial(), 'rollout_gradient', "attention_pattern='axial'.*method='grad_cam'"),
    (tiny_models.tiny(num_classes=0), 'legrad', 'num_classes=0 .* add a head'),
    (tiny_models.tiny(classifier='unpooled'), 'grad_cam', "classifier='unpooled'"),
    (tiny_models.tiny(), 'lime', "method='lime' is unknown: use one of legrad"),
    (models.get_model('igpt_s'), 'grad_cam', 'model=ImageGPT .* use a ViT'),
  ],
)
def test_models_that_a_method_cannot_explain(model, method, words):
  with pytest.raises(ValueError, match=words):
    explanations.explain(model, {}, images(), 0, method)


@pytest.mark.parametrize('method', ['legrad', 'grad_cam'])
def test_encoders_of_users_have_no_known_layers(method):
  def encoder(**fields):
    return tiny_models.encoder(**fields)

  model = tiny_models.tiny(encoder=encoder)
  assert explanations.lacks(model, 'rollout') is None
  assert "use method='rollout'" in explanations.lacks(model, method)


@pytest.mark.parametrize(
  'classes, words',
  [
    ([0, 5], 'classes=5 is not among the 5 classes.*use 0 to 4'),
    (-1, 'classes=-1 is not among'),
  ],
)
def test_classes_that_do_not_fit(classes, words):
  with pytest.raises(ValueError, match=words):
    explanations.explain(tiny_models.tiny(), {}, images(), classes)


def test_models_have_no_perturbations_of_their_own():
  model = tiny_models.tiny()
  init = jax.eval_shape(lambda: model.init(jax.random.key(0), images(), train=False))
  assert set(init) == {'params'}
