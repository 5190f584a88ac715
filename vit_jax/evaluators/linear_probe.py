"""Linear probes: logistic regression on the features of a frozen model.

Features of any layer of any model, standardised, are classified by multinomial
logistic regression. Where the features of the training images fit in memory,
L-BFGS finds the optimum, for several strengths of the L2 penalty; images held
out of the training images choose among these. Otherwise stochastic gradient
descent makes some passes over the images, without a penalty.

Several layers are probed by one method, so that they compare: L-BFGS if the
features of the widest fit. A pass over the images then extracts as many layers
as take a quarter of the memory. For 1.28 million images and 49 layers of 1,536
features (iGPT-L), a layer takes 7.9 GB: a machine of 512 GB makes 3 passes, and
on one of less than 64 GB SGD trains the probes of all layers together, on the
features of the same batches.

scikit-learn's L-BFGS and `optax.lbfgs` take about the same time on a CPU: 4 to
5 seconds of one core for 10,000 examples of 768 features in 100 classes. Here
it is scikit-learn's.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import linear_model
from sklearn import pipeline
from sklearn import preprocessing
import threadpoolctl

from vit_jax import cli
from vit_jax import input_pipeline
from vit_jax.distributed import processes
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.inference import engine

# Factors of half of the squared weights, added to the mean cross-entropy.
L2 = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
HELD_OUT = 0.2  # Share of the training images that choose the factor.
# Share of the memory that features and logits may take for L-BFGS, which keeps
# several copies of both.
_SHARE = 1 / 8
_GROUP = 1 / 4  # Share that the layers of one pass over the images may take.
_SAMPLE = 10_000  # Images whose features give mean and deviation for SGD.
_EPS = 1e-6
# Numbers of features up to which one thread is no slower than several.
_SMALL = 1_000_000


class Result(NamedTuple):
  """A linear probe.

  Attributes:
    accuracy: on the test images, from 0 to 1.
    l2: the chosen penalty, see L2; 0 for SGD.
    held_out: accuracy on the held-out images by penalty; {} for SGD.
    method: 'L-BFGS' or 'SGD'.
  """

  accuracy: float
  l2: float
  held_out: dict[float, float]
  method: str


def fits(num_examples: int, width: int, num_classes: int) -> bool:
  """Returns whether features fit in memory for L-BFGS.

  Args:
    num_examples: number n of training images.
    width: number D of features.
    num_classes: number C of classes; 4 n (D + C) bytes may take an eighth of
      the memory of this machine.
  """
  needed = 4 * num_examples * (width + num_classes)
  return needed <= _SHARE * cli.machine_memory()


def probe(
  train: features.Features, test: features.Features, l2s=None, seed: int = 0
) -> Result:
  """Trains by L-BFGS with the best penalty, and measures the accuracy.

  Images without a class do not count.

  Args:
    train: features and labels to train on.
    test: features and labels to test on.
    l2s: penalties to choose from; by default L2.
    seed: seed of the choice of held-out images.

  Raises:
    ValueError: if there are fewer than two classes, or too few examples to hold
      some out.
  """
  l2s = L2 if l2s is None else l2s
  rows = np.random.default_rng(seed).permutation(train.labelled())
  count = max(1, round(HELD_OUT * len(rows)))
  held, rest = rows[:count], rows[count:]
  if len(np.unique(train.labels[rest])) < 2:
    raise ValueError(
      f'{len(rows)} labelled images are too few for a linear probe, which needs '
      'two classes besides the images that it holds out: give a larger split '
      '(--train)'
    )

  def solve():
    found = {}
    with cli.bar(
      total=len(l2s) + 1, desc='L-BFGS', delay=3, leave=False
    ) as bar:
      for l2 in sorted(l2s, reverse=True):
        model = fit(train.values[rest], train.labels[rest], l2)
        found[l2] = model.score(train.values[held], train.labels[held])
        bar.update()
    best = max(found, key=found.get)  # The strongest, of equal ones.
    model = fit(train.values[rows], train.labels[rows], best)
    tested = test.labelled()
    score = model.score(test.values[tested], test.labels[tested])
    return [score, best, list(found.items())]

  accuracy, best, held_out = processes.from_first('the linear probe', solve)
  held_out = {l2: value for l2, value in held_out}
  return Result(accuracy, best, held_out, 'L-BFGS')


def fit(
  x: np.ndarray, labels: np.ndarray, l2: float, each: bool = True
) -> pipeline.Pipeline:
  """Fits a classifier by L-BFGS, on standardised features.

  Args:
    x: features, float32 [n, D].
    labels: int [n], at least two different ones.
    l2: see L2.
    each: whether to divide each feature by its standard deviation; otherwise
      features are centred only.

  Returns:
    scikit-learn's classifier.
  """
  model = pipeline.make_pipeline(
    preprocessing.StandardScaler(with_std=each),
    linear_model.LogisticRegression(
      C=1 / (l2 * len(x)), max_iter=1000, tol=1e-5
    ),
  )
  with threadpoolctl.threadpool_limits(1 if x.size <= _SMALL else None):
    return model.fit(x, labels)


def probe_layers(
  task, mesh, layers: Sequence[str], train, test, params, extra, pp=None
) -> dict[str, Result]:
  """Probes layers by L-BFGS or SGD, see the top of this module.

  Args:
    task: see probe_sgd.
    mesh: the mesh.
    layers: names of layers, see vit_jax.evaluators.features.Extractor.
    train: source of the training images.
    test: source of the test images.
    params: parameters of the model, which stay as they are.
    extra: other state of the task.
    pp: see vit_jax.evaluators.features.Extractor.

  Returns:
    Results by the names of the layers.

  Raises:
    ValueError: if there is no such layer; see also `probe`.
  """
  extractor = features.Extractor(task, mesh, layers, pp)
  count, widest = train.num_examples, max(extractor.widths.values())
  state = params, extra
  if not fits(count, widest, len(train.class_names)):
    return probe_sgd(task, mesh, extractor, train, test, *state)
  found = {}
  limit = _GROUP * cli.machine_memory() / 4 / (count + test.num_examples)
  for names in groups(extractor.widths, limit):
    if len(names) < len(layers):
      extractor = features.Extractor(task, mesh, names, pp)
    known, asked = (extractor.run(split, *state) for split in (train, test))
    parts = [extractor.split(x.values) for x in (known, asked)]
    for name in names:
      x, y = (np.ascontiguousarray(part.pop(name)) for part in parts)
      found[name] = probe(known._replace(values=x), asked._replace(values=y))
  return found


def groups(widths: Mapping[str, int], limit: float) -> list[list[str]]:
  """Splits layers, in their order, into groups of a limited width.

  Args:
    widths: number of features by name.
    limit: greatest number of features of a group; a wider layer is alone.
  """
  found, total = [], 0
  for name, width in widths.items():
    total += width
    if not found or total > limit:
      found.append([])
      total = width
    found[-1].append(name)
  return found


def probe_sgd(
  task,
  mesh,
  extractor: features.Extractor,
  train,
  test,
  params,
  extra,
  epochs: float = 10,
  learning_rate: float = 0.1,
) -> dict[str, Result]:
  """Trains by SGD, computing the features of each batch anew.

  Momentum is .9, and the learning rate falls to 0 by a cosine. Means and
  deviations of the features come from a sample of the training images.

  Args:
    task: reads `config.batch`, `config.seed` and how to read data.
    mesh: the mesh.
    extractor: computes the features.
    train: source of the training images.
    test: source of the test images.
    params: parameters of the model, which stay as they are.
    extra: other state of the task.
    epochs: number of passes over the training images.
    learning_rate: learning rate at the start, per 256 images of a batch.

  Returns:
    Results by the names of the extractor's layers.
  """
  config, count = task.config, train.num_examples
  mean, scale = _moments(extractor, train, params, extra, config.seed)
  steps = max(1, round(epochs * count / config.batch))
  rate = learning_rate * config.batch / 256
  tx = optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=0.9)

  def standardised(params, extra, batch):
    x = (extractor.compute(params, extra, batch) - mean) / scale
    return extractor.split(x)

  update = _sgd_update(standardised, mesh, tx)
  classes = len(train.class_names)
  weights = {
    name: {'kernel': jnp.zeros((width, classes)), 'bias': jnp.zeros(classes)}
    for name, width in extractor.widths.items()
  }
  state = tx.init(weights)
  batches = input_pipeline.train_batches(config, train, extractor.example, mesh)
  with cli.bar(total=steps, desc='SGD', unit='step', leave=False) as bar:
    for _ in range(steps):
      with jax.set_mesh(mesh):
        weights, state = update(weights, state, params, extra, next(batches))
      jax.block_until_ready(weights)
      bar.update()

  example, frozen = extractor.example, (params, extra)
  found = _score(config, mesh, example, standardised, weights, test, frozen)
  return {name: found[name] for name in extractor.widths}


def _score(config, mesh, example, standardised, weights, test, state):
  """Returns the results on the test images; the arguments as in `probe_sgd`."""

  @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
  def classify(weights, state, batch):
    logits = _logits(weights, standardised(*state, batch))
    best = {name: x.argmax(axis=-1) for name, x in logits.items()}
    return {**{k: batch[k] for k in ('index', 'mask', 'label')}, **best}

  found = engine.collect(
    config,
    mesh,
    test.evaluated,
    example,
    lambda batch: classify(weights, state, batch),
    what='Testing',
  )
  labels = found.pop('label')
  rows = features.Features(None, labels).labelled()
  return {
    name: Result(float((found[name] == labels)[rows].mean()), 0.0, {}, 'SGD')
    for name in weights
  }


def _moments(extractor, train, params, extra, seed):
  """Returns mean and deviation [D] of the features of a sample of images."""
  memory = cli.machine_memory() // (16 * 4 * extractor.width)
  size = min(train.num_examples, _SAMPLE, max(2, memory))
  sample = np.random.default_rng(seed).choice(
    train.num_examples, size, replace=False
  )
  values = extractor.run(train, params, extra, np.sort(sample)).values
  return values.mean(axis=0), values.std(axis=0) + _EPS


def _logits(weights, x):
  """Returns the logits [B, C] of each layer's features x[name], [B, D]."""
  return {
    name: x[name] @ layer['kernel'] + layer['bias']
    for name, layer in weights.items()
  }


def _sgd_update(standardised, mesh, tx):
  """Returns the compiled update of `probe_sgd`."""

  def loss(weights, x, labels):
    counted = labels >= 0
    total = 0.0
    for logits in _logits(weights, x).values():
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.maximum(labels, 0)
      )
      total += (losses * counted).sum()
    return total / jnp.maximum(1, counted.sum())

  def update(weights, state, params, extra, batch):
    x = standardised(params, extra, batch)
    grads = jax.grad(loss)(weights, x, batch['label'])
    updates, state = tx.update(grads, state)
    return optax.apply_updates(weights, updates), state

  return jax.jit(update, out_shardings=sharding.replicated(mesh))
