"""Linear classifiers of features: least squares, logistic regression, SGD.

least_squares  ridge regression to -1 or 1 for each class, in closed form
logistic       multinomial logistic regression with an L2 penalty, by L-BFGS
tuned          the same, with the penalty that suits held-out images best
sgd            logistic regression by SGD, without a penalty, for features
               that do not fit in memory; several layers at once
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import linear_model, pipeline, preprocessing
import threadpoolctl

from vit_jax import console, input_pipeline
from vit_jax.distributed import processes, sharding
from vit_jax.evaluators import features
from vit_jax.inference import engine

CONSTANT = 100.0  # A constant feature, for the bias.
# Factors of half of the squared weights, added to the mean cross-entropy.
L2 = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
HELD_OUT = 0.2  # Share of the training images that choose the factor.
# Number of images, and bytes of their features, for mean and deviation with SGD.
_SAMPLE = 10_000
_SAMPLE_BYTES = 2**30
# Added to standard deviations: by the published few-shot protocol, and for SGD.
_EPS = 1e-5
_EPS_SGD = 1e-6
# Numbers of features up to which one thread is no slower than several.
_SMALL = 1_000_000
_ROWS = 8192  # Images that `Linear` classifies at a time.


class Linear(NamedTuple):
  """A linear classifier of features: kernel [D, C] and bias [C], float64."""

  kernel: np.ndarray
  bias: np.ndarray

  def predict(self, x: np.ndarray) -> np.ndarray:
    """Returns the classes, int64 [n], of features [n, D]."""
    blocks = np.array_split(x, len(x) // _ROWS + 1)
    return np.concatenate(
      [(x @ self.kernel + self.bias).argmax(axis=-1) for x in blocks]
    )


class Result(NamedTuple):
  """A linear probe."""

  accuracy: float  # On the test images, from 0 to 1.
  l2: float  # The chosen penalty, see L2; 0 for SGD.
  held_out: dict[float, float]  # On held-out images by penalty; {} for SGD.
  method: str  # 'L-BFGS' or 'SGD'.


def least_squares(train: features.Features, num_classes: int, l2: float) -> Linear:
  """Fits a linear classifier by least squares, in float64.

  Features are standardised by their mean and standard deviation; `l2` is the
  factor of the squared weights, including the weight of the constant feature,
  added to the sum of the squared errors. All examples have labels.
  """
  x = train.values
  mean = x.mean(axis=0, dtype=np.float64)
  inputs = np.full((len(x), x.shape[1] + 1), CONSTANT)  # [n, D + 1]
  centred = np.subtract(x, mean, out=inputs[:, :-1])
  # x.std would copy all of x in float64.
  scale = np.sqrt(np.einsum('nd,nd->d', centred, centred) / len(x)) + _EPS
  centred /= scale
  targets = np.where(train.labels[:, None] == np.arange(num_classes), 1.0, -1.0)
  model = linear_model.Ridge(l2, fit_intercept=False, copy_X=False, solver='cholesky')
  weights = model.fit(inputs, targets).coef_.T  # [D + 1, C]
  kernel = weights[:-1] / scale[:, None]
  return Linear(kernel, CONSTANT * weights[-1] - mean @ kernel)


def logistic(
  train: features.Features, l2: float, each: bool = True
) -> pipeline.Pipeline:
  """Fits a classifier by L-BFGS, on standardised features; all have labels.

  Each feature is divided by its standard deviation; without `each`, all by the
  root mean square of their length, so that one penalty suits layers of any width
  and pixels keep their contrast.
  """
  x = train.values
  scaler = preprocessing.StandardScaler().fit(x)
  if not each:
    scaler.scale_[:] = np.sqrt(scaler.var_.sum()) or 1.0
  model = linear_model.LogisticRegression(C=1 / (l2 * len(x)), max_iter=1000, tol=1e-5)
  with threadpoolctl.threadpool_limits(1 if x.size <= _SMALL else None):
    model.fit(scaler.transform(x), train.labels)
  return pipeline.make_pipeline(scaler, model)


def tuned(train: features.Features, test: features.Features) -> Result:
  """Fits by L-BFGS with the penalty in L2 that is best on held-out images.

  Images without a class do not count. Process 0 computes for all.
  """
  l2s = sorted(L2, reverse=True)
  rows = np.random.default_rng(0).permutation(train.labelled())
  count = max(1, round(HELD_OUT * len(rows)))
  held, rest = rows[:count], rows[count:]

  def score(rows, asked, l2):
    model = logistic(train.take(rows), l2)
    return asked.accuracy(model.predict(asked.values))

  def solve():
    asked = train.take(held)
    with console.bar(iterable=l2s, desc='L-BFGS', delay=3, leave=False) as bar:
      found = [score(rest, asked, l2) for l2 in bar]
    best = l2s[int(np.argmax(found))]  # The strongest on a tie.
    return [score(rows, test, best), best, found]

  accuracy, best, found = processes.from_first('the linear probe', solve)
  return Result(accuracy, best, dict(zip(l2s, found)), 'L-BFGS')


def sgd(
  task,
  mesh,
  extractor: features.Extractor,
  train,
  test,
  params,
  extra,
  epochs: float = 10,
  learning_rate: float = 0.1,
) -> features.Features:
  """Trains by SGD, computing the features of each batch anew, and classifies.

  Momentum is .9, and the learning rate, for a batch of 256 images, decays to 0 by a
  cosine. Means and deviations of the features are of a sample of the training
  images. Returns the classes of the test images by each of the extractor's L
  layers, int32 [n, L], and their labels.
  """
  config, count = task.config, train.num_examples
  size = min(count, _SAMPLE, max(2, _SAMPLE_BYTES // (4 * extractor.width)))
  sample = np.random.default_rng(config.seed).choice(count, size, replace=False)
  values = extractor.run(train, params, extra, np.sort(sample)).values
  mean, scale = values.mean(axis=0), values.std(axis=0) + _EPS_SGD
  steps = max(1, round(epochs * count / config.batch))
  rate = learning_rate * config.batch / 256
  tx = optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=0.9)
  # The kernel of each layer, with its bias in the last row: [D + 1, C].
  classes = len(train.class_names)
  weights = {
    name: jnp.zeros((width + 1, classes)) for name, width in extractor.widths.items()
  }
  state = tx.init(weights)

  def logits(weights, params, extra, batch):
    x = (extractor.compute(params, extra, batch) - mean) / scale
    parts = [(x, weights[name]) for name, x in extractor.split(x).items()]
    found = [x @ w[:-1] + w[-1] for x, w in parts]
    return jnp.stack(found, axis=1)  # [B, L, C]

  def loss(weights, params, extra, batch):
    found = logits(weights, params, extra, batch)
    labels = batch['label'][:, None]
    counted = labels >= 0  # [B, 1]
    losses = optax.softmax_cross_entropy_with_integer_labels(
      found, jnp.broadcast_to(labels.clip(0), found.shape[:2])
    )
    return (losses * counted).sum() / jnp.maximum(1, counted.sum())

  def update(weights, state, params, extra, batch):
    grads = jax.grad(loss)(weights, params, extra, batch)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(weights, updates), state

  def classify(weights, params, extra, batch):
    best = logits(weights, params, extra, batch).argmax(axis=-1)
    return {**batch, 'image': best}

  update = jax.jit(update, out_shardings=sharding.replicated(mesh))
  classify = engine.everywhere(mesh, classify)
  batches = input_pipeline.train_batches(config, train, extractor.example, mesh)
  with console.bar(total=steps, desc='SGD', unit='step', leave=False) as bar:
    for _ in range(steps):
      with jax.set_mesh(mesh):
        weights, state = update(weights, state, params, extra, next(batches))
      jax.block_until_ready(weights)
      bar.update()
  found = engine.collect(
    config, mesh, test.evaluated, extractor.example,
    lambda batch: classify(weights, params, extra, batch), what='Testing',
  )  # fmt: skip
  return features.Features(found['image'], found['label'])
