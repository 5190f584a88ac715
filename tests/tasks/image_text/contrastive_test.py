"""Tests of contrastive losses against NumPy, on several devices and processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests import processes
from vit_jax.distributed import sharding
from vit_jax.tasks.image_text import contrastive

ROWS, WIDTH = 16, 6
SCALES = {'t': np.array([1.3]), 'b': np.array([-2.0])}


def embeddings(seed):
  x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def mean_loss(name, params):
  out = {'t': jnp.exp(params['t'])}
  if name == 'sigmoid':
    out['b'] = params['b']
  logits = contrastive.logits_of(params['img'], params['txt'], out)
  return contrastive.LOSSES[name](logits).mean()


def parameters():
  scales = {k: np.float32(x) for k, x in SCALES.items()}
  return {'img': embeddings(0), 'txt': embeddings(1), **scales}


def expected(name):
  """The loss and its gradients, in float64 and closed form."""
  x, y = (embeddings(seed).astype(np.float64) for seed in (0, 1))
  t, own = np.exp(SCALES['t']), np.eye(ROWS)
  if name == 'softmax':
    logits = t * x @ y.T
    images, texts = (special.log_softmax(logits, axis) for axis in (1, 0))
    loss = -(np.trace(images) + np.trace(texts)) / 2 / ROWS
    # The gradient of a cross-entropy is the probability, less 1 for the label.
    of_logits = (np.exp(images) + np.exp(texts) - 2 * own) / 2 / ROWS
  else:
    logits = t * x @ y.T + SCALES['b']
    loss = -special.log_expit((2 * own - 1) * logits).sum() / ROWS
    of_logits = (special.expit(logits) - own) / ROWS
  grads = {
    'img': t * of_logits @ y,
    'txt': t * of_logits.T @ x,
    't': (of_logits * t * (x @ y.T)).sum(keepdims=True)[0],
  }
  if name == 'sigmoid':
    grads['b'] = of_logits.sum(keepdims=True)[0]
  return loss, grads


def check(name, loss, grads):
  right, right_grads = expected(name)
  assert float(loss) == pytest.approx(right, abs=2e-6)
  for key, value in right_grads.items():
    np.testing.assert_allclose(grads[key], value, atol=1e-6)


def compute(name, mesh):
  """Returns loss and gradients, with the rows split over the mesh."""
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  put = lambda key, x: jax.make_array_from_callback(
    x.shape, rows if key in ('img', 'txt') else whole, lambda i: x[i]
  )
  params = {key: put(key, x) for key, x in parameters().items()}
  with jax.set_mesh(mesh):
    function = jax.value_and_grad(lambda p: mean_loss(name, p))
    return jax.jit(function, out_shardings=whole)(params)


@pytest.mark.parametrize('name', contrastive.LOSSES)
def test_loss_and_gradient_match_the_whole_batch(name):
  check(name, *jax.device_get(compute(name, sharding.make_mesh({'data': 8}))))


_TWO = """
import json, sys, jax
address, index = sys.argv[1:3]
jax.distributed.initialize(address, 2, int(index))
from tests.tasks.image_text import contrastive_test
from vit_jax.distributed import sharding
mesh = sharding.make_mesh({'data': -1})
found = {
  name: jax.tree.map(lambda x: x.tolist(),
                     jax.device_get(contrastive_test.compute(name, mesh)))
  for name in ('softmax', 'sigmoid')
}
print('SAID ' + json.dumps(found))
"""


def test_two_processes_compute_the_same_loss():
  statuses, outputs = processes.run_two(_TWO, devices=2)
  assert statuses == [0, 0], outputs
  for found in processes.said(outputs):
    for name, (loss, grads) in found.items():
      check(name, loss, grads)


@pytest.mark.parametrize('name', contrastive.LOSSES)
def test_no_device_holds_the_whole_similarity_matrix(name):
  """In the compiled program, each of 8 devices has an eighth of its rows."""
  mesh = sharding.make_mesh({'data': -1})
  count = 1024
  rows = jax.ShapeDtypeStruct(
    (count, WIDTH), jnp.float32, sharding=sharding.batch_sharding(mesh)
  )
  out = {'t': jnp.ones(1), 'b': jnp.ones(1)}

  def loss(x, y):
    logits = contrastive.logits_of(x, y, out)
    return contrastive.LOSSES[name](logits).mean()

  with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(rows, rows).compile()
  text = compiled.as_text()
  assert f'f32[{count // 8},{count}]' in text
  assert f'f32[{count},{count}]' not in text
