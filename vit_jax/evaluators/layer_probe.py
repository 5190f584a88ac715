"""Linear probes of all layers of a model: accuracy by depth.

A linear classifier of the features of each layer shows where in a model what
can be told apart easily (arXiv section 4.1 of "Generative Pretraining from
Pixels": for a generative model, in the middle). The classifier is multinomial
logistic regression with an L2 penalty, by L-BFGS, on all training images or on
a few of each class, drawn several times. Features are centred and divided by
one number, the root mean square of their length, so that one penalty suits
layers of any width, and raw pixels, the baseline, keep their scale.

  found = layer_probe.probe(train, labels, test, test_labels, per_class=10,
                            draws=5)
  found['layer_3']  # (mean, standard deviation) of the accuracy over the draws
"""

from collections.abc import Callable
from collections.abc import Mapping
import csv
import io
import json
import statistics

from etils import epath
import jax
import numpy as np

from vit_jax import cli
from vit_jax.distributed import processes
from vit_jax.evaluators import features as features_lib
from vit_jax.evaluators import fewshot
from vit_jax.evaluators import linear_probe
from vit_jax.inference import engine
from vit_jax.run import workdir as workdir_lib

# Factor of half of the squared weights, for features of length 1.
L2 = 1e-3


def probe(
  features: Mapping[str, np.ndarray],
  labels: np.ndarray,
  test_features: Mapping[str, np.ndarray],
  test_labels: np.ndarray,
  *,
  per_class: int | None = None,
  draws: int = 1,
  seed: int = 0,
  l2: float = L2,
) -> dict[str, tuple[float, float]]:
  """Measures the accuracy of linear probes of several sets of features.

  Args:
    features: float [n, D] by name, such as 'layer_3' or 'pixels'; D may differ.
    labels: int [n], classes 0, 1, ...; examples of class -1 do not count.
    test_features: float [m, D] by name.
    test_labels: int [m], see `labels`.
    per_class: training examples of each class, drawn at random; None: all.
    draws: number of draws; the same for all names.
    seed: seed of the first draw; the next ones have seed + 1, ...
    l2: penalty, see L2.

  Returns:
    (mean, sample standard deviation over the draws) of the accuracy on the test
    examples, from 0 to 1, by name.

  Raises:
    ValueError: if there are fewer than two classes, a class has fewer examples
      than `per_class`, or an argument is out of range.
  """
  chosen = draw(labels, per_class, draws, seed)
  known = np.flatnonzero(np.asarray(test_labels) >= 0)
  found = {}
  with cli.bar(
    total=len(features) * len(chosen), desc='Probes', delay=3, leave=False
  ) as bar:
    for name, x in features.items():
      accuracies = []
      for rows in chosen:
        classify = fit(x[rows], labels[rows], l2)
        right = classify(test_features[name][known]) == test_labels[known]
        accuracies.append(float(right.mean()))
        bar.update()
      found[name] = mean_std(accuracies)
  return found


def draw(
  labels: np.ndarray, per_class: int | None, draws: int, seed: int
) -> list[np.ndarray]:
  """Draws the training examples of each probe, see `probe`.

  Returns:
    Numbers of examples, an int64 array for each draw.
  """
  for name, value in (('per_class', per_class), ('draws', draws)):
    if value is not None and value < 1:
      raise ValueError(f'{name}={value} must be 1 or more')
  labels = np.asarray(labels)
  classes, counts = np.unique(labels[labels >= 0], return_counts=True)
  if len(classes) < 2:
    raise ValueError(
      f'labels have the classes {classes.tolist()}: a probe needs two at least'
    )
  if per_class is None:
    return [np.flatnonzero(labels >= 0)] * draws
  if counts.min() < per_class:
    raise ValueError(
      f'per_class={per_class} are more than the {counts.min()} training examples '
      f'of class {classes[counts.argmin()]}: lower per_class, or take more '
      'examples'
    )
  # Classes without an example are left out.
  places = np.where(labels >= 0, np.searchsorted(classes, labels), -1)
  names = [str(name) for name in classes]
  return [
    fewshot.choose(places, names, per_class, seed + i).reshape(-1)
    for i in range(draws)
  ]


def fit(x: np.ndarray, labels: np.ndarray, l2: float) -> Callable:
  """Fits a probe; returns a function from features [m, D] to classes [m].

  Args:
    x: features, float [n, D].
    labels: int [n], at least two different ones.
    l2: see L2.
  """
  scale = float(np.sqrt(np.var(x, axis=0, dtype=np.float64).sum())) or 1.0
  model = linear_probe.fit(x / scale, labels, l2, each=False)
  return lambda x: model.predict(x / scale)


def mean_std(values) -> tuple[float, float]:
  """Returns mean and sample standard deviation (0 of a single value)."""
  several = len(values) > 1
  return statistics.mean(values), statistics.stdev(values) if several else 0.0


class LayerProbe:
  """Probes all layers of a model, and its pixels, in an evaluation.

  Prints a table, and writes probe.json, probe.csv and probe.png into the
  workdir; each evaluation replaces those of the last one.

  Attributes:
    final: see vit_jax.tasks.base.Task.evaluators.

  Args:
    task: the objective, see vit_jax.evaluators.features.Extractor.
    mesh: the mesh.
    workdir: folder of the run, or None to write nothing.
    train_source: the training images, with the features 'image' and 'label'.
    test_source: the test images, with the same; their classes are told by
      name, and some may be missing.
    per_class: see `probe`; drawn images are read alone where the data give
      random access.
    draws: see `probe`.
    seed: see `probe`.
    l2: see `probe`.
    pp: see vit_jax.evaluators.features.Extractor.

  Raises:
    ValueError: if a source has no labels, the training images lack a class of
      the test images, or the model sows no layers; see also `probe`.
  """

  final = True

  def __init__(
    self,
    task,
    mesh,
    workdir,
    train_source,
    test_source,
    *,
    per_class: int | None = 10,
    draws: int = 5,
    seed: int = 0,
    l2: float = L2,
    pp=None,
  ):
    for what, source in (('training', train_source), ('test', test_source)):
      if 'label' not in source.features:
        raise ValueError(
          f'the {what} images of the probe have no labels: open them with the '
          "features 'image' and 'label' (vit_jax.data.sources.LABELLED)"
        )
    self._workdir = workdir
    self._train, self._test = train_source.evaluated, test_source.evaluated
    self._numbers = _numbers(self._test.class_names, self._train.class_names)
    self._options = dict(per_class=per_class, draws=draws, seed=seed, l2=l2)
    names = (*require_layers(task), features_lib.PIXELS)
    self._extractor = features_lib.Extractor(task, mesh, names, pp)
    self._rows = None
    if per_class is not None:
      labels = features_lib.read_labels(task.config, mesh, self._train)
      self._rows = np.unique(draw(labels, per_class, draws, seed))

  def run(self, params, extra, stop: Callable[[], bool] = engine.never):
    """Probes the layers.

    Args:
      params: the parameters.
      extra: other state of the task.
      stop: called between batches; returns whether to stop.

    Returns:
      {'probe_best': mean accuracy of the best layer, 'probe_pixels': that of
      the pixels}.

    Raises:
      engine.Stopped: if `stop` became true.
    """
    extractor = self._extractor
    train = extractor.run(self._train, params, extra, self._rows, stop)
    test = extractor.run(self._test, params, extra, stop=stop)
    solve = lambda: probe(
      extractor.split(train.values),
      train.labels,
      extractor.split(test.values),
      self._numbers[test.labels],
      **self._options,
    )
    found = processes.from_first('the linear probes of all layers', solve)
    found = {name: tuple(value) for name, value in found.items()}
    cli.say(table(found))
    if self._workdir is not None:
      path = epath.Path(self._workdir) / 'probe.json'
      write(path, found, {'layers': as_rows(found)})
    pixels, _ = found.pop(features_lib.PIXELS)
    best = max(mean for mean, _ in found.values())
    return {'probe_best': best, 'probe_pixels': pixels}


def _numbers(test_names, train_names) -> np.ndarray:
  """Returns the numbers in training of the test split's classes, and of -1."""
  unknown = [name for name in test_names if name not in train_names]
  if unknown:
    raise ValueError(
      f'the test images of the probe have classes that its training images lack: '
      f'{unknown[:10]}; add them to the training split, or remove them from the '
      'test split (config.layer_probe)'
    )
  return np.array([*map(train_names.index, test_names), -1])


def require_layers(task) -> dict[str, str]:
  """Returns vit_jax.evaluators.features.layers, at least one of them.

  Raises:
    ValueError: if the model sows none.
  """
  found = features_lib.layers(task)
  if not found:
    raise ValueError(
      f"the model of the kind '{task.config.model.get('kind', 'vit')}' sows no "
      "layer_0, layer_1, ... into its collection 'intermediates': let it do so, "
      'or probe a single layer by its path'
    )
  return found


def table(found: Mapping[str, tuple[float, float]]) -> str:
  """Returns the result of `probe` as text, the best of all layers marked."""
  best = best_layer(found)
  lines = [f'{"layer":<10} {"accuracy":>9}']
  for name, (mean, std) in found.items():
    spread = f' +- {100 * std:.2f}' if std else ''
    mark = '  best layer' if name == best else ''
    lines.append(f'{name:<10} {100 * mean:7.2f} %{spread}{mark}')
  return '\n'.join(lines)


def best_layer(found: Mapping[str, tuple[float, float]]) -> str:
  """Returns the layer of the highest accuracy, the first of equal ones."""
  names = [name for name in found if name != features_lib.PIXELS]
  return max(names, key=lambda name: found[name][0])


def as_rows(found: Mapping[str, tuple[float, float]]) -> list[dict]:
  """Returns the result of `probe` as rows: layer, accuracy, deviation if any."""
  several = any(std for _, std in found.values())
  return [
    {'layer': name, 'accuracy': mean, **({'std': std} if several else {})}
    for name, (mean, std) in found.items()
  ]


def write(
  path: epath.Path, found: Mapping[str, tuple[float, float]], content: dict
):
  """Writes the result of `probe`: JSON, and beside it a CSV and a PNG.

  Process 0 writes for all. Without matplotlib, the plot is left out.

  Args:
    path: path of the JSON file; the others have its name with .csv and .png.
    found: result of `probe`.
    content: content of the JSON file.
  """

  def do():
    rows, text = as_rows(found), io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    workdir_lib.write_atomically(path, json.dumps(content, indent=1) + '\n')
    workdir_lib.write_atomically(path.with_suffix('.csv'), text.getvalue())

  processes.from_first('writing the linear probes', do)
  if jax.process_index() == 0:
    try:
      plot(found, path.with_suffix('.png'))
      cli.say(f'  plot   {path.with_suffix(".png")}')
    except ImportError as e:
      cli.say(f'No plot was drawn: {e}')


def plot(found: Mapping[str, tuple[float, float]], path=None):
  """Draws the accuracy over the depth, and that of the pixels as a line.

  Args:
    found: result of `probe`.
    path: path of a PNG to write.

  Returns:
    A matplotlib Figure.

  Raises:
    ImportError: if matplotlib is missing.
  """
  from vit_jax.figures import studies

  best = best_layer(found)
  return studies.depth(
    {
      name: value
      for name, value in found.items()
      if name != features_lib.PIXELS
    },
    found.get(features_lib.PIXELS),
    f'Linear probes: {best.replace("_", " ")} is best, {100 * found[best][0]:.1f} %',
    path=path,
  )
