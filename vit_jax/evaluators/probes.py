"""Linear probes of a frozen model: how well its features tell classes apart.

FewShot measures one layer after a few images of each class, by the protocol of
the paper's few-shot numbers (arXiv 2010.11929, section 4.1 and figure 4) as
big_vision's `fewshot_lsr` has it: images chosen at random, several times; least
squares in closed form, so that a probe takes little more time than an
evaluation.

LayerProbe measures all layers, and the pixels, the same way by logistic
regression: accuracy by depth shows where in a model what can be told apart
easily (arXiv section 4.1 of "Generative Pretraining from Pixels": for a
generative model, in the middle).

`Probe.linear` measures layers after all training images, see there.
"""

from collections.abc import Mapping, Sequence
import copy
import itertools
import json

from etils import epath
import numpy as np

from vit_jax import console, preprocess
from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.distributed import files, processes
from vit_jax.evaluators import features, solvers
from vit_jax.figures import drawing, studies
from vit_jax.inference import engine
from vit_jax.run import config as run_config, metrics

# Accuracies of one or several draws, from 0 to 1, by layer.
Accuracies = Mapping[str, Sequence[float]]

ALL = 'all'  # The name of all layers, see select.
# Draws of LayerProbe, and its penalty, see solvers.logistic.
DRAWS = 5
L2 = 1e-3
# Share of the memory that features of a layer and logits may take for L-BFGS,
# which keeps several copies of both, and that the layers of one pass may take.
_SHARE = 1 / 8
_GROUP = 1 / 4


class Probe:
  """Classifies the test images by features of a few images of each class.

  Classes of the test images are told by name; some may be missing. Its
  attributes are the features' `extractor`, the sources `train` and `test`, and
  the names of the training images' classes.

  Args:
    task: the objective, see features.Extractor; likewise mesh, layers and pp.
    workdir: folder of the run, see vit_jax.data.sources.open_split.
    data: data set (None: that of the run), training and test split.
    shots: numbers of training images of each class; () for `linear` alone.
    seeds: seeds of the choice of these images.
    fit: function from features to a classifier, see solvers.
  """

  def __init__(self, task, mesh, workdir, data, layers, shots, seeds, fit, pp):
    dataset, train, test = data

    def open_split(split, wanted=sources.LABELLED):
      return sources.open_split(
        task.config, split, wanted, dataset=dataset, workdir=workdir
      ).evaluated

    self._make = lambda names: features.Extractor(task, mesh, names, pp)
    self._task, self._mesh, self._shots, self._fit = task, mesh, shots, fit
    self.extractor = self._make(layers)
    self.train, self.test = open_split(train), open_split(test)
    self.class_names = self.train.class_names
    self._numbers = _numbers(self.test.class_names, self.class_names)
    self._chosen = []
    if shots:
      labels = features.read_labels(task.config, mesh, open_split(train, ('label',)))
      self._chosen = self._draw(labels, seeds)

  def _draw(self, labels, seeds, **kwargs) -> list[np.ndarray]:
    """Returns the result of `choose` for each seed."""
    names, shots = self.class_names, max(self._shots)
    return [choose(labels, names, shots, seed, **kwargs) for seed in seeds]

  def accuracies(
    self, params, extra, stop=engine.never
  ) -> dict[str, dict[int, list[float]]]:
    """Returns the accuracy for each seed, by layer and number of shots."""
    rows = np.unique(self._chosen)
    train, test = self._extract(self.extractor, params, extra, rows, stop)
    shots = self._shots

    def solve():
      found = []
      x, y = (self.extractor.split(part.values) for part in (train, test))
      work = itertools.product(x, shots, self._chosen)
      with console.bar(
        iterable=list(work), desc='Few-shot probes', delay=3, leave=False
      ) as bar:
        for layer, count, draw in bar:
          at = np.searchsorted(rows, draw[:, :count]).reshape(-1)
          model = self._fit(train._replace(values=x[layer]).take(at))
          found.append(test.accuracy(model.predict(y[layer])))
      return np.reshape(found, (-1, len(shots), len(self._chosen))).tolist()

    found = processes.from_first('solving the few-shot probes', solve)
    return {
      layer: dict(zip(shots, values))
      for layer, values in zip(self.extractor.widths, found)
    }

  def linear(self, layers: Sequence[str], params, extra) -> dict[str, solvers.Result]:
    """Probes layers by logistic regression on all training images.

    All layers are probed by one method, so that they compare: L-BFGS if the
    features of the widest fit in memory, otherwise SGD, see solvers. With
    L-BFGS, a pass over the images extracts as many layers as fit.
    """
    extractor, state, found = self._make(layers), (params, extra), {}
    count, widest = self.train.num_examples, max(extractor.widths.values())
    # All processes must choose the same method and the same passes.
    memory = features.least_memory()
    if 4 * count * (widest + len(self.class_names)) > _SHARE * memory:
      task, mesh, splits = self._task, self._mesh, (self.train, self.test)
      test = self._named(solvers.sgd(task, mesh, extractor, *splits, *state))
      for layer, classes in zip(extractor.widths, test.values.T):
        found[layer] = solvers.Result(test.accuracy(classes), 0.0, {}, 'SGD')
      return found
    size = 4 * widest * (count + self.test.num_examples)
    at_once = max(1, int(_GROUP * memory / size))
    for begin in range(0, len(layers), at_once):
      extractor = self._make(layers[begin : begin + at_once])
      known, asked = self._extract(extractor, *state)
      x, y = (extractor.split(part.values) for part in (known, asked))
      for layer in x:
        found[layer] = solvers.tuned(
          known._replace(values=x[layer]), asked._replace(values=y[layer])
        )
    return found

  def _extract(self, extractor, params, extra, rows=None, stop=engine.never):
    """Returns the features of training images and of all test images."""
    train = extractor.run(self.train, params, extra, rows, stop)
    test = extractor.run(self.test, params, extra, stop=stop)
    return train, self._named(test)

  def _named(self, test):
    """Returns test images with the training images' numbers of classes."""
    return test._replace(labels=self._numbers[test.labels])


def _numbers(test_names, train_names) -> np.ndarray:
  """Returns the numbers in training of the test split's classes, and of -1."""
  numbers = {name: i for i, name in enumerate(train_names)}
  unknown = [name for name in test_names if name not in numbers]
  if unknown:
    raise ValueError(
      'the test images of the probe have classes that its training images lack: '
      f'{unknown[:10]}; add them to the training split, or remove them from the '
      'test split'
    )
  return np.array([*(numbers[name] for name in test_names), -1])


class FewShot(Probe):
  """Measures few-shot accuracy at each evaluation, see `config.fewshot`.

  Images are squeezed to `config.fewshot.squeeze` times the size of the model's
  images, of which the centre is cropped (256 and 224 pixels in big_vision).
  """

  def __init__(self, task, mesh, workdir=None):
    config, options = task.config, task.config.fewshot
    super().__init__(
      task, mesh, workdir, splits(config), options.layer, options.shots,
      options.seeds,
      lambda x: solvers.least_squares(x, len(self.class_names), options.l2),
      squeezed(config.pp, options.squeeze),
    )  # fmt: skip

  def run(self, params, extra, stop=engine.never):
    """Returns {'fewshot_5': mean accuracy over the seeds, ...}; see accuracies."""
    [found] = self.accuracies(params, extra, stop).values()
    return {f'fewshot_{n}': float(np.mean(found[n])) for n in found}


class LayerProbe(Probe):
  """Probes all layers of a model, and its pixels, after the last update.

  Prints a table, and writes probe.json, probe.csv and probe.png into the
  workdir unless that is None. `config.layer_probe` is the number of images of
  each class.
  """

  final = True

  def __init__(self, task, mesh, workdir=None):
    config = task.config
    layers = (*select(task, ALL), features.PIXELS)
    self._workdir = workdir
    super().__init__(
      task, mesh, workdir, (None, *own_splits(config)), layers,
      (config.layer_probe,), range(DRAWS),
      lambda x: solvers.logistic(x, L2, each=False), config.pp,
    )  # fmt: skip

  def _draw(self, labels, seeds):
    # A first draw picks a pool of images, as it always did: other draws would
    # not compare with accuracies of earlier releases.
    rows = np.unique(super()._draw(labels, seeds, skip_empty=True))
    again = super()._draw(labels[rows], seeds, skip_empty=True)
    return [rows[draw] for draw in again]

  def run(self, params, extra, stop=engine.never):
    """Returns the mean accuracy of the best layer, and that of the pixels."""
    found = {
      layer: next(iter(by_shots.values()))
      for layer, by_shots in self.accuracies(params, extra, stop).items()
    }
    console.say(table(found))
    if self._workdir is not None:
      path = epath.Path(self._workdir) / 'probe.json'
      write(path, found, {'layers': as_rows(found)})
    best, pixels = (
      metrics.mean_std(found[name])[0] for name in (best_layer(found), features.PIXELS)
    )
    return {'probe_best': best, 'probe_pixels': pixels}


def splits(config) -> tuple[str | None, str, str]:
  """Returns data set (None: that of the run), training and test split."""
  options = config.fewshot
  if options.dataset is None:
    usual = own_splits(config)
  else:
    usual = common.SPLITS.get(options.dataset, ('train', 'test'))
  return options.dataset, options.train or usual[0], options.test or usual[1]


def own_splits(config) -> tuple[str, str]:
  """Returns the training and the first test split of the run's data set."""
  _, split, other = run_config.evaluations(config)[0]
  return config.pp.train, split if other is None else config.pp.test


def squeezed(pp, factor: float):
  """Returns preprocessing that squeezes images to `factor` times `pp.crop`."""
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

  The choice depends on the seed and the examples of the class alone. Fewer
  shots are the first columns of more. Labels are int [n], -1 for none;
  `skip_empty` leaves out classes without an example.
  """
  classes = np.arange(len(class_names))
  if skip_empty:
    classes = np.intersect1d(classes, labels)
  if len(classes) < 2:
    raise ValueError(
      f'classes {[class_names[c] for c in classes]}: a probe needs two at least '
      '(--dataset, config.fewshot.dataset, config.dataset)'
    )
  order = np.argsort(labels, kind='stable')
  begins = np.searchsorted(labels[order], classes)
  counts = np.searchsorted(labels[order], classes, 'right') - begins
  if counts.min() < shots:
    raise ValueError(
      f'shots={shots} are more than the {counts.min()} examples of the class '
      f"'{class_names[classes[counts.argmin()]]}' in the training split: lower "
      'the shots, or take a larger split (--shots, --train; '
      'config.fewshot.shots, config.fewshot.train; config.layer_probe)'
    )
  return np.stack(
    [
      order[begin + np.random.default_rng([seed, i]).permutation(count)[:shots]]
      for i, (begin, count) in enumerate(zip(begins, counts))
    ]
  )


def select(task, layer: str) -> list[str]:
  """Returns the names of the layers that 'all', 'last', a number or a name means."""
  if layer not in (ALL, 'last') and not layer.isdecimal():
    return [layer]
  known = list(features.layers(task))
  if not known:
    raise ValueError(
      f"the model of the kind '{task.config.model.get('kind', 'vit')}' sows no "
      "layer_0, layer_1, ... into its collection 'intermediates': let it do so, "
      'or probe a single layer by its path'
    )
  if layer == ALL:
    return known
  name = known[-1] if layer == 'last' else f'layer_{layer}'
  if name not in known:
    raise ValueError(
      f'layer={layer} is no layer of the model: it has {", ".join(known)} (--layer)'
    )
  return [name]


# --- Accuracy by depth ---


def table(found: Accuracies) -> str:
  """Returns the accuracy by layer as text, the best of all layers marked."""
  best = best_layer(found)
  lines = [f'{"layer":<10} {"accuracy":>9}']
  for name, values in found.items():
    mean, std = metrics.mean_std(values)
    spread = f' ± {100 * std:.2f}' if std else ''
    mark = '  best layer' if name == best else ''
    lines.append(f'{name:<10} {100 * mean:7.2f} %{spread}{mark}')
  return '\n'.join(lines)


def best_layer(found: Accuracies) -> str:
  """Returns the layer of the highest accuracy, the first of equal ones."""
  names = [name for name in found if name != features.PIXELS]
  return max(names, key=lambda name: np.mean(found[name]))


def as_rows(found: Accuracies) -> list[dict]:
  """Returns the accuracy by layer as rows, with the deviation of several draws."""
  rows = []
  for name, values in found.items():
    mean, std = metrics.mean_std(values)
    spread = {'std': std} if len(values) > 1 else {}
    rows.append({'layer': name, 'accuracy': mean, **spread})
  return rows


def write(path: epath.Path, found: Accuracies, content: dict):
  """Writes the accuracy by layer as JSON, and beside it as CSV and PNG.

  Process 0 writes for all. Without matplotlib, the plot is left out.
  """
  rows, best = as_rows(found), best_layer(found)
  lines = [rows[0], *(row.values() for row in rows)]
  text = ''.join(','.join(map(str, line)) + '\n' for line in lines)
  layers = [x for name, x in found.items() if name != features.PIXELS]
  curves = {'layers': (range(len(layers)), 100 * np.array(layers))}
  if features.PIXELS in found:  # A line across.
    pixels = 100 * np.array([found[features.PIXELS]] * 2)
    curves['raw pixels'] = ((0, len(layers) - 1), pixels)
  title = (
    f'Linear probes: {best.replace("_", " ")} is best, '
    f'{100 * np.mean(found[best]):.1f} %'
  )
  labels = ('layer, from the input on', 'accuracy (%)', title)
  plot = path.with_suffix('.png')

  def do():
    files.write(path, json.dumps(content, indent=1) + '\n')
    files.write(path.with_suffix('.csv'), text)
    drawing.to_file(studies.curves, curves, *labels, path=plot)

  processes.from_first('writing the linear probes', do)
