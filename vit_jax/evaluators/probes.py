"""Probes of a frozen model: how well its features separate classes.

FewShot trains on a few images of each class, by the protocol of the paper's few-shot
numbers (arXiv 2010.11929, section 4.1 and figure 4) as in big_vision's `fewshot_lsr`:
several random choices of images, and least squares in closed form, which takes little
more time than an evaluation.

LayerProbe measures all layers, and the pixels, by logistic regression: accuracy by
depth shows which layers separate the classes best ("Generative Pretraining from
Pixels", section 4.1: in a generative model, those in the middle).

`Probe.linear` trains on all training images, and `Probe.neighbours` compares the test
images with all of them.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import itertools
import json
from typing import Any, ClassVar, NamedTuple

from etils import epath
import jax
import ml_collections
import numpy as np

from vit_jax import console, preprocess
from vit_jax.configs import common, schema
from vit_jax.data import records, sources
from vit_jax.distributed import files, processes
from vit_jax.evaluators import base, features, solvers
from vit_jax.figures import drawing, studies
from vit_jax.inference import engine
from vit_jax.run import config as run_config, metrics as metrics_lib

# Accuracies of one or several draws, from 0 to 1, by layer.
Accuracies = Mapping[str, Sequence[float]]

ALL = 'all'  # The name of all layers, see select.
# Draws of LayerProbe, and its penalty, see solvers.logistic.
DRAWS = 5
L2 = 1e-3
_LINEAR_COPIES = 4  # Copies of features and logits that L-BFGS keeps.
_KNN_COPIES = 2  # The features, and the same at unit length.


class Probe:
  """Classifies the test images by features of a few images of each class.

  Classes of the test images are matched by name; some may be missing.

  Args:
    task, mesh, layers, pp: see features.Extractor.
    workdir: folder of the run, see vit_jax.data.sources.open_split.
    splits: data set (None: the run's), training and test split.
    shots: numbers of training images of each class; () if only for `linear`.
    seeds: seeds of the choice of these images.
    fit: function from features to a classifier, see solvers.
    skip_empty: whether to leave out classes without training images.
    knn: numbers of neighbours for `neighbours`, to be checked.
    drop_shots: whether to leave out `shots` that the smallest class has not, instead of
      raising ValueError.
  """

  def __init__(
    self,
    task: Any,
    mesh: jax.sharding.Mesh,
    workdir: epath.PathLike | None,
    *,
    splits: tuple[str | None, str, str],
    layers: Sequence[str],
    shots: Sequence[int],
    seeds: Sequence[int],
    fit: Callable,
    pp: ml_collections.ConfigDict,
    skip_empty: bool = False,
    knn: Sequence[int] = (),
    drop_shots: bool = False,
  ):
    self.task = task
    self.mesh = mesh
    self.workdir = workdir
    self.shots = tuple(shots)
    self._fit = fit
    dataset, train, test = splits
    self.extractor = features.Extractor(task, mesh, layers, pp)
    options: dict[str, Any] = dict(dataset=dataset, workdir=workdir)
    self.train = sources.open_split(task.config, train, **options).evaluated
    self.test = sources.open_split(task.config, test, **options).evaluated
    self.class_names = self.train.class_names
    self._numbers = class_numbers(self.test.class_names, self.class_names)
    # Numbers of training images of each seed, int64 [classes, most shots].
    self._draws: list[np.ndarray] = []
    if not shots and not knn:
      return
    labels = features.read_labels(task.config, mesh, self.train)
    _check_neighbours(knn, labels)
    if drop_shots:
      self.shots = _fitting(self.shots, labels, self.class_names)
    if self.shots:
      most = max(self.shots)
      for seed in seeds:
        draw = choose(labels, self.class_names, most, seed, skip_empty)
        self._draws.append(draw)

  def extract(
    self,
    params: Mapping,
    extra: Mapping,
    *,
    all_images: bool,
    stop: Callable[[], bool] = engine.never,
  ) -> 'Extracted':
    """Computes the features that the probes need, once.

    Args:
      params, extra: state of the model.
      all_images: whether to take all training images, as `linear` and `neighbours`
        need, or only those that were chosen for few-shot probes.
      stop: see features.Extractor.run.
    """
    extractor = self.extractor
    rows = None if all_images else np.unique(self._draws)
    train = extractor.run(self.train, params, extra, rows, stop)
    test = extractor.run(self.test, params, extra, stop=stop)
    test = test._replace(labels=self._numbers[test.labels])
    if rows is None:
      rows = np.arange(self.train.num_examples)
    return Extracted(rows, extractor.split(train), extractor.split(test))

  def accuracies(self, extracted: 'Extracted') -> dict[str, dict[int, list[float]]]:
    """Returns the accuracy for each seed, by layer and number of shots."""
    probes = list(itertools.product(extracted.train, self.shots, self._draws))

    def solve() -> list[float]:
      results = []
      with console.bar(
        iterable=probes, desc='Few-shot probes', delay=3, leave=False
      ) as bar:
        for layer, shots, draw in bar:
          rows = np.searchsorted(extracted.rows, draw[:, :shots]).reshape(-1)
          model = self._fit(extracted.train[layer].take(rows))
          test = extracted.test[layer]
          results.append(test.accuracy(model.predict(test.values)))
      return results

    accuracies: dict[str, dict[int, list[float]]] = {}
    for layer in extracted.train:
      accuracies[layer] = {shots: [] for shots in self.shots}
    results = processes.from_first('solving the few-shot probes', solve)
    for (layer, shots, _), accuracy in zip(probes, results, strict=True):
      accuracies[layer][shots].append(accuracy)
    return accuracies

  def linear(self, extracted: 'Extracted') -> dict[str, solvers.Result]:
    """Probes layers by logistic regression on all training images."""
    probes = {}
    for layer, train in extracted.train.items():
      probes[layer] = solvers.tuned(train, extracted.test[layer])
    return probes

  def neighbours(
    self, extracted: 'Extracted', counts: Sequence[int]
  ) -> dict[int, float]:
    """Returns the accuracy by k nearest training images, see solvers.neighbours."""
    [train], [test] = extracted.train.values(), extracted.test.values()

    def solve() -> list[float]:
      by_count = solvers.neighbours(train, test.values, counts)
      return [test.accuracy(classes) for classes in by_count]

    return dict(zip(counts, processes.from_first('the nearest neighbours', solve)))

  def check_memory(self, linear: bool, knn: bool) -> None:
    """Raises ValueError if the features of all training images do not fit."""
    num_images = self.train.num_examples
    if knn:
      features.check_memory(num_images, self.extractor.width, _KNN_COPIES)
    if linear:
      widest = max(self.extractor.widths.values())
      features.check_memory(num_images, widest + len(self.class_names), _LINEAR_COPIES)


class Extracted(NamedTuple):
  """Features of images for probes, by layer.

  Classes have the same numbers in the test as in the training split.
  """

  rows: np.ndarray  # int64 [n], ascending: numbers of the training images.
  train: dict[str, features.Features]
  test: dict[str, features.Features]


def class_numbers(test_names: Sequence[str], train_names: Sequence[str]) -> np.ndarray:
  """Returns the numbers in training of the test split's classes, then -1."""
  if tuple(test_names) == tuple(train_names):
    return np.append(np.arange(len(train_names)), -1)
  if repeated := records.repeated_names(train_names):
    raise ValueError(
      f"several classes of the probe's training split are named '{repeated[0]}', and "
      'its test split lists other classes, or in another order: rename them'
    )
  numbers = {name: i for i, name in enumerate(train_names)}
  unknown = [name for name in test_names if name not in numbers]
  if unknown:
    raise ValueError(
      f'classes {unknown[:10]} of the test split are not in the training split of '
      'the probe: add images of them there, or remove them from the test split'
    )
  return np.array([numbers[name] for name in test_names] + [-1])


def _fitting(
  shots: Sequence[int], labels: np.ndarray, class_names: Sequence[str]
) -> tuple[int, ...]:
  """Returns the shots that the smallest class has; prints the others."""
  sizes = np.bincount(labels[labels >= 0], minlength=len(class_names))
  least = int(sizes.min())
  dropped = [str(n) for n in shots if n > least]
  if dropped:
    images = console.pluralize(least, 'training image')
    console.log(
      f"Class '{class_names[sizes.argmin()]}' has only {images}: no probes with "
      f'{", ".join(dropped)} shots.'
    )
  return tuple(n for n in shots if n <= least)


def _check_neighbours(counts: Sequence[int], labels: np.ndarray) -> None:
  num_labelled = int((labels >= 0).sum())
  if max(counts, default=0) > num_labelled:
    raise ValueError(
      f'knn={max(counts)} is more than the {num_labelled} labelled images of the training '
      'split: use fewer neighbours or a larger split (--knn, --train; '
      'config.fewshot.knn, config.fewshot.train)'
    )


class FewShot(Probe):
  """Measures few-shot and nearest-neighbour accuracy at each evaluation, see `config.fewshot`.

  Images are resized to `config.fewshot.squeeze` times the size of the model's
  images, of which the centre is cropped (256 and 224 pixels in big_vision).
  """

  @classmethod
  def metrics(
    cls, config: ml_collections.ConfigDict, **options: Any
  ) -> dict[str, metrics_lib.Metric]:
    """Returns 'fewshot_5', ..., 'knn_20', ... of the options, see `config.fewshot`."""
    keys = _complete(options)
    names = [f'fewshot_{shots}' for shots in keys.shots]
    names += [f'knn_{k}' for k in keys.knn]
    return dict.fromkeys(names, metrics_lib.SHARE)

  def __init__(
    self,
    evaluation: base.Evaluation,
    layers: Sequence[str] = (),
    drop_shots: bool = False,
    **options: Any,
  ):
    task = evaluation.task
    keys = _complete(options)
    self.knn = tuple(keys.knn)
    super().__init__(
      task,
      evaluation.mesh,
      evaluation.workdir,
      splits=splits(task.config, keys),
      layers=layers or keys.layer,
      shots=keys.shots,
      seeds=keys.seeds,
      pp=squeezed(task.config.pp, keys.squeeze),
      fit=lambda x: solvers.least_squares(x, len(self.class_names), keys.l2),
      knn=keys.knn,
      drop_shots=drop_shots,
    )

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns {'fewshot_5': mean accuracy over the seeds, ..., 'knn_20': accuracy}."""
    self.check_memory(linear=False, knn=bool(self.knn))
    extracted = self.extract(params, extra, all_images=bool(self.knn), stop=stop)
    result = {}
    if self.shots:
      [by_shots] = self.accuracies(extracted).values()
      result |= {f'fewshot_{n}': float(np.mean(draws)) for n, draws in by_shots.items()}
    if self.knn:
      by_count = self.neighbours(extracted, self.knn)
      result |= {f'knn_{k}': accuracy for k, accuracy in by_count.items()}
    return result


class LayerProbe(Probe):
  """Probes all layers of a model, and its pixels, after the last update.

  Prints a table, and writes probe.json and probe.png into the workdir unless that
  is None. `images` is the number of training images of each class.
  """

  final = True
  metrics: ClassVar = dict.fromkeys(('probe_best', 'probe_pixels'), metrics_lib.SHARE)

  def __init__(self, evaluation: base.Evaluation, images: schema.Count):
    task = evaluation.task
    config = evaluation.task.config
    super().__init__(
      task,
      evaluation.mesh,
      evaluation.workdir,
      splits=(None, *own_splits(config)),
      layers=(*select(task, ALL), features.PIXELS),
      shots=(images,),
      seeds=range(DRAWS),
      pp=config.pp,
      skip_empty=True,
      fit=lambda x: solvers.logistic(x, L2, per_feature=False),
    )

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns the mean accuracy of the best layer and of the pixels."""
    extracted = self.extract(params, extra, all_images=False, stop=stop)
    by_shots = self.accuracies(extracted)
    [images] = self.shots
    by_layer = {layer: draws[images] for layer, draws in by_shots.items()}
    console.log(table(by_layer))
    if self.workdir is not None:
      rows = []
      for layer, draws in by_layer.items():
        mean, std = metrics_lib.mean_std(draws)
        rows.append({'layer': layer, 'accuracy': mean, 'std': std})
      write(epath.Path(self.workdir) / 'probe.json', {'layers': rows}, by_layer)
    best = by_layer[best_layer(by_layer)]
    pixels = by_layer[features.PIXELS]
    return {'probe_best': float(np.mean(best)), 'probe_pixels': float(np.mean(pixels))}


def _complete(options: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """Returns all keys of common.FewShot, checked."""
  keys = ml_collections.ConfigDict(dict(options))
  schema.check_group(keys, common.FewShot, 'fewshot.')
  schema.fill(keys, common.FewShot)
  if keys.shots and not keys.seeds:
    raise ValueError(
      f'fewshot.shots={keys.shots} needs at least one seed: set '
      '--config.fewshot.seeds=(0,1,2)'
    )
  return keys


def splits(
  config: ml_collections.ConfigDict, options: ml_collections.ConfigDict
) -> tuple[str | None, str, str]:
  """Returns data set (None: the run's), training and test split of few-shot options."""
  if options.dataset is None:
    train, test = own_splits(config)
  else:
    train, test = common.SPLITS.get(options.dataset, ('train', 'test'))
  return options.dataset, options.train or train, options.test or test


def own_splits(config: ml_collections.ConfigDict) -> tuple[str, str]:
  """Returns the training and the first test split of the run's data set."""
  first = run_config.evaluations(config)[0]
  test = first.split if first.dataset is None else config.pp.test
  return config.pp.train, test


def squeezed(
  pp: ml_collections.ConfigDict, factor: float | None
) -> ml_collections.ConfigDict:
  """Returns preprocessing for a key `config.fewshot.squeeze`."""
  if factor is None:
    if pp.antialias:
      return pp
    factor = 8 / 7
  pp = copy.deepcopy(pp)
  with pp.ignore_type():
    pp.resize = tuple(round(factor * x) for x in preprocess.crop_size(pp))
  return pp


def choose(
  labels: np.ndarray,
  class_names: Sequence[str],
  shots: int,
  seed: int,
  skip_empty: bool = False,
) -> np.ndarray:
  """Chooses `shots` examples of each class at random, int64 [classes, shots].

  The choice depends only on the seed, the class and its examples; fewer shots are the
  first columns of more. Labels are int [n], -1 for none. `skip_empty` leaves out classes
  without an example, so that those after them have other choices.
  """
  classes = np.arange(len(class_names))
  if skip_empty:
    classes = np.intersect1d(classes, labels)
  if len(classes) < 2:
    raise ValueError(
      f'classes {[class_names[c] for c in classes]}: a probe needs at least two '
      '(--dataset, config.fewshot.dataset, config.dataset)'
    )
  order = np.argsort(labels, kind='stable')
  begins = np.searchsorted(labels[order], classes)
  counts = np.searchsorted(labels[order], classes, 'right') - begins
  if counts.min() < shots:
    raise ValueError(
      f'shots={shots} is more than the {counts.min()} examples of class '
      f"'{class_names[classes[counts.argmin()]]}' in the training split: use fewer "
      'shots or a larger split (--shots, --train; config.fewshot.shots, '
      'config.fewshot.train; config.layer_probe)'
    )
  rows = []
  for i, (begin, count) in enumerate(zip(begins, counts)):
    examples = np.random.default_rng([seed, i]).permutation(count)[:shots]
    rows.append(order[begin + examples])
  return np.stack(rows)


def select(task: Any, layer: str) -> list[str]:
  """Returns the layers of 'all', 'last', a number or a name."""
  if layer not in (ALL, 'last') and not layer.isdecimal():
    return [layer]
  layers = list(features.layers(task))
  if not layers:
    raise ValueError(
      f"model.kind='{task.config.model.get('kind', 'vit')}' does not sow layer_0, "
      "layer_1, ... into the collection 'intermediates': sow them, or probe a single "
      'layer by its path'
    )
  if layer == ALL:
    return layers
  name = layers[-1] if layer == 'last' else f'layer_{layer}'
  if name not in layers:
    raise ValueError(
      f'layer={layer} is not in the model, which has {", ".join(layers)} (--layer)'
    )
  return [name]


def line(name: str, accuracies: Sequence[float], note: str = '') -> str:
  """Returns a line of a table: the mean of accuracies, and the spread of several."""
  mean, std = metrics_lib.mean_std(accuracies)
  spread = f' ± {100 * std:.2f}' if std else ''
  return f'{name:<10} {100 * mean:7.2f} %{spread}{note}'


def header(title: str) -> str:
  """Returns the first line of a table."""
  return f'{title:<10} {"accuracy":>9}'


def table(by_layer: Accuracies) -> str:
  """Returns the accuracy by layer as text, with the best layer marked."""
  best = best_layer(by_layer)
  lines = [header('layer')]
  for layer, accuracies in by_layer.items():
    note = '  best layer' if layer == best else ''
    lines.append(line(layer, accuracies, note))
  return '\n'.join(lines)


def best_layer(by_layer: Accuracies) -> str:
  """Returns the layer of the highest accuracy, the first one on a tie."""
  names = [name for name in by_layer if name != features.PIXELS]
  return max(names, key=lambda name: np.mean(by_layer[name]))


def write(path: epath.Path, content: dict, by_layer: Accuracies | None = None) -> None:
  """Writes `content` as JSON, and a plot of the accuracy by layer, if any, next to it.

  Process 0 writes. Without matplotlib, the plot is left out.
  """

  def write_files() -> None:
    files.write(path, json.dumps(content, indent=1) + '\n')
    if by_layer:
      _plot(path.with_suffix('.png'), by_layer)

  processes.from_first('writing the probes', write_files)


def _plot(path: epath.Path, by_layer: Accuracies) -> None:
  """Plots the accuracy by layer; that of the pixels is a horizontal line."""
  layers = [x for name, x in by_layer.items() if name != features.PIXELS]
  curves = {'layers': (range(len(layers)), 100 * np.array(layers))}
  if features.PIXELS in by_layer:
    pixels = 100 * np.array([by_layer[features.PIXELS]] * 2)
    curves['raw pixels'] = ((0, len(layers) - 1), pixels)
  best = best_layer(by_layer)
  accuracy = 100 * np.mean(by_layer[best])
  title = f'Linear probes: {best.replace("_", " ")} is best, {accuracy:.1f} %'
  labels = ('layer, from the input on', 'accuracy (%)', title)
  drawing.to_file(studies.curves, curves, *labels, path=path)
