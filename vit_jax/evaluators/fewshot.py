"""Few-shot linear probes: least squares on the features of a few images.

The protocol of the paper's few-shot numbers (arXiv 2010.11929, section 4.1 and
figure 4) as big_vision's `fewshot_lsr` has it. A few images of each class are
chosen at random; a linear map from their features to -1 or 1 per class is
fitted by regularised least squares, in closed form; its arg-max classifies the
test images. Nothing is trained, so that the probe takes little more time than
an evaluation.
"""

from collections.abc import Callable
from collections.abc import Sequence
import copy
import itertools

import numpy as np
from scipy import linalg

from vit_jax import cli
from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.distributed import processes
from vit_jax.evaluators import features
from vit_jax.inference import engine
from vit_jax.run import config as run_config

CONSTANT = 100.0  # A feature that is the same for all images, for the bias.
_EPS = 1e-5  # Added to standard deviations.
_ROWS = 8192  # Test images that are classified at a time.


class FewShot:
  """Measures few-shot accuracy, see the top of this module.

  Images are squeezed to `config.fewshot.squeeze` times the size of the model's
  images, of which the centre is cropped (256 and 224 pixels in big_vision).

  Args:
    task: the objective, see features.Extractor; reads `config.fewshot`.
    mesh: the mesh.
    workdir: folder of the run, see vit_jax.data.sources.open_split.

  Attributes:
    extractor: computes the features.
    pp: preprocessing of the images.
    train: source of the training images.
    test: source of the test images.
    class_names: names of the classes.

  Raises:
    ValueError, FileNotFoundError: if data set or splits are wrong, if a class
      has fewer examples than shots, or if the model lacks the layer.
  """

  def __init__(self, task, mesh, workdir=None):
    config, options = task.config, task.config.fewshot
    self._options = options
    dataset, train, test = splits(config)

    def open_split(split, wanted=sources.LABELLED, class_names=None):
      return sources.open_split(
        config, split, wanted, class_names, dataset, workdir
      ).evaluated

    self.pp = squeezed(config.pp, options.squeeze)
    self.extractor = features.Extractor(task, mesh, options.layer, self.pp)
    self.train = open_split(train)
    self.class_names = self.train.class_names
    self.test = open_split(test, class_names=self.class_names)
    self._chosen = []
    if not options.shots:
      return
    labels = features.read_labels(config, mesh, open_split(train, ('label',)))
    self._chosen = [
      choose(labels, self.class_names, max(options.shots), seed)
      for seed in options.seeds
    ]

  def run(self, params, extra, stop: Callable[[], bool] = engine.never):
    """Evaluates parameters.

    Args:
      params: the parameters.
      extra: other state of the task.
      stop: called between batches; returns whether to stop the evaluation.

    Returns:
      {'fewshot_5': mean accuracy over the seeds, ...}.

    Raises:
      engine.Stopped: if `stop` became true.
    """
    found = self.accuracies(params, extra, stop)
    return {
      f'fewshot_{shots}': float(np.mean(values))
      for shots, values in found.items()
    }

  def accuracies(
    self, params, extra, stop: Callable[[], bool] = engine.never
  ) -> dict[int, list[float]]:
    """Returns the accuracy for each seed, by the number of shots; see `run`."""
    rows = np.unique(self._chosen)
    train = self.extractor.run(self.train, params, extra, rows, stop)
    test = self.extractor.run(self.test, params, extra, stop=stop)

    def solve():
      shots, draws = self._options.shots, self._chosen
      with cli.bar(
        iterable=list(itertools.product(shots, draws)),
        desc='Few-shot probes', delay=3, leave=False,
      ) as bar:  # fmt: skip
        found = [
          self._accuracy(train, test, np.searchsorted(rows, draw[:, :count]))
          for count, draw in bar
        ]
      return np.reshape(found, (len(shots), len(draws))).tolist()

    found = processes.from_first('solving the few-shot probes', solve)
    return dict(zip(self._options.shots, found))

  def _accuracy(self, train, test, rows):
    """Returns the accuracy on `test` with the rows [classes, shots] to train."""
    rows = rows.reshape(-1)
    kernel, bias = fit(
      train.values[rows],
      train.labels[rows],
      len(self.class_names),
      self._options.l2,
    )
    return accuracy(test, kernel, bias)


def splits(config) -> tuple[str | None, str, str]:
  """Returns data set (None: that of the run), training and test split."""
  options = config.fewshot
  if options.dataset is None:
    usual = own_splits(config)
  else:
    usual = common.SPLITS.get(options.dataset, ('train', 'test'))
  return (
    options.dataset,
    options.train or usual[0],
    options.test or usual[1],
  )


def own_splits(config) -> tuple[str, str]:
  """Returns the training and the first test split of the run's data set."""
  _, split, other = run_config.evaluations(config)[0]
  return config.pp.train, split if other is None else config.pp.test


def squeezed(pp, factor: float):
  """Returns preprocessing that squeezes images, and then crops the centre.

  Args:
    pp: `config.pp`.
    factor: size of the squeezed image, relative to `pp.crop`.
  """
  pp = copy.deepcopy(pp)
  with pp.ignore_type():
    pp.resize = tuple(round(factor * x) for x in preprocess.crop_size(pp))
  return pp


def choose(
  labels: np.ndarray, class_names: Sequence[str], shots: int, seed: int
) -> np.ndarray:
  """Chooses examples of each class at random.

  The choice depends on the seed and the examples of the class alone. Fewer
  shots are the first columns of more.

  Args:
    labels: int [n], classes of the examples; -1 for none.
    class_names: names of the classes.
    shots: number of examples per class.
    seed: seed of the choice.

  Returns:
    Numbers of examples, int64 [classes, shots].

  Raises:
    ValueError: if a class has fewer examples.
  """
  order = np.argsort(labels, kind='stable')
  begins = np.searchsorted(labels[order], np.arange(len(class_names) + 1))
  counts = np.diff(begins)
  if len(class_names) < 2 or counts.min() < shots:
    least = int(counts.argmin()) if len(class_names) else 0
    raise ValueError(
      f'shots={shots} are more than the {counts[least]} examples of the class '
      f"'{class_names[least]}' in the training split: lower the shots, or take "
      'a larger split (--shots, --train, config.fewshot.shots, '
      'config.fewshot.train)'
      if len(class_names) > 1
      else f'classes {list(class_names)}: a probe needs two at least '
      '(--dataset, config.fewshot.dataset)'
    )
  return np.stack(
    [
      order[begin + np.random.default_rng([seed, c]).permutation(count)[:shots]]
      for c, (begin, count) in enumerate(zip(begins, counts))
    ]
  )


def fit(x: np.ndarray, labels: np.ndarray, num_classes: int, l2: float):
  """Fits a linear classifier by least squares, in float64.

  Features are standardised by their mean and standard deviation; all weights
  are regularised, also that of the constant feature.

  Args:
    x: features, float [n, D].
    labels: int [n], classes.
    num_classes: number C of classes.
    l2: factor of the squared weights, added to the sum of the squared errors.

  Returns:
    (kernel, bias) for features as they are: float64 [D, C] and [C].

  Raises:
    ValueError: if a feature is not finite.
  """
  mean = x.mean(axis=0, dtype=np.float64)
  inputs = np.full((len(x), x.shape[1] + 1), CONSTANT)  # [n, D + 1]
  centred = np.subtract(x, mean, out=inputs[:, :-1])
  # Without the copy of all of x in float64 that x.std makes.
  variance = np.einsum('nd,nd->d', centred, centred) / len(x)
  scale = np.sqrt(variance) + _EPS
  if not np.isfinite(scale).all():
    raise ValueError(
      'the features are not finite: the training diverged, or its checkpoint is '
      'damaged; choose another checkpoint'
    )
  centred /= scale
  targets = np.full((len(x), num_classes), -1.0)  # [n, C]
  targets[np.arange(len(x)), labels] = 1
  weights = ridge(inputs, targets, l2)
  kernel = weights[:-1] / scale[:, None]
  return kernel, CONSTANT * weights[-1] - mean @ kernel


def ridge(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
  """Returns the W that minimises |x W - y|^2 + l2 |W|^2.

  Solves for the features or, if there are more features than examples, for the
  examples (the dual problem): a matrix of the smaller side, squared.

  Args:
    x: float64 [n, D].
    y: float64 [n, C].
    l2: above 0.

  Returns:
    float64 [D, C].
  """
  dual = x.shape[1] > x.shape[0]
  gram = x @ x.T if dual else x.T @ x
  gram[np.diag_indices_from(gram)] += l2
  # In the order of Fortran, a matrix as large as this one is not copied.
  factor = linalg.cho_factor(gram.T, overwrite_a=True)
  solved = linalg.cho_solve(factor, y if dual else x.T @ y)
  return x.T @ solved if dual else solved


def accuracy(test: features.Features, kernel, bias) -> float:
  """Returns the share of the labelled examples that a classifier gets right.

  Args:
    test: features and labels.
    kernel: float [D, C].
    bias: float [C].

  Raises:
    ValueError: if no example has a label.
  """
  right, labelled = 0, len(test.labelled())
  for begin in range(0, len(test.labels), _ROWS):
    part = slice(begin, begin + _ROWS)
    best = (test.values[part] @ kernel + bias).argmax(axis=-1)
    right += int((best == test.labels[part]).sum())
  return right / labelled
