"""Computes the arrays behind figures of a trained model or a run.

Attention for a few images, the confusion matrix and the worst mistakes of a
classifier on a whole split, and learning curves.
"""

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from etils import epath
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import input_pipeline, models
from vit_jax.data import records
from vit_jax.data.images import false_colours
from vit_jax.distributed import sharding
from vit_jax.figures import explanations, internals
from vit_jax.inference import engine
from vit_jax.run import (
  evaluators as run_evaluators,
  metrics as metrics_lib,
  workdir as workdir_lib,
)

# Maximum batch size: on a CPU, larger ones only take more memory.
_BATCH = 32
_NAMES = 10  # Maximum number of classes in a message.


class Curve(NamedTuple):
  """A metric that a run has logged."""

  steps: np.ndarray  # int64 [n].
  values: np.ndarray  # float64 [n].
  kind: metrics_lib.Metric


def learning_curves(workdir: epath.PathLike) -> dict[str, Curve]:
  """Reads the metrics of a run, by name.

  The units of evaluators of users are unknown unless their modules are trusted, see
  vit_jax/user_code.py.
  """
  config, _ = workdir_lib.load(workdir)
  entries = run_evaluators.run_entries(config, trusted=False)
  kinds = dict(run_evaluators.metrics_of(config, entries))
  for name, kind in run_evaluators.measures(entries, config).items():
    kinds[f'train_{name}'] = kind
  steps = collections.defaultdict(list)
  values = collections.defaultdict(list)
  for line in metrics_lib.read(workdir):
    step = line.pop('step')
    for name, value in line.items():
      steps[name].append(step)
      values[name].append(value)
  curves = {}
  for name in values:
    curves[name] = Curve(
      np.array(steps[name], np.int64),
      np.array(values[name], np.float64),
      kinds.get(name, metrics_lib.Metric()),
    )
  return curves


class Mistake(NamedTuple):
  """An image whose class was predicted wrongly."""

  image: np.ndarray  # As pictures show it, float32 [H, W, 1 or 3] in [-1, 1].
  true: int  # Index of the class.
  predicted: int
  probability: float  # Probability of the predicted class.
  name: str  # Path of the image, or its number within the split.


class Results(NamedTuple):
  """Predictions of a classifier for a split, compared with the labels."""

  # int64 [classes, classes]; [i, j] is the number of images of class i that were
  # predicted as class j.
  confusion: np.ndarray
  # The most confident mistakes, the most confident first.
  mistakes: Sequence[Mistake]


def classify(model: Any, source: records.Source, num_mistakes: int = 8) -> Results:
  """Compares the predictions of a classifier with the labels of a split.

  Images that have no label, or several, do not count. Keeps `num_mistakes`
  mistakes at most.
  """
  source, task = source.evaluated, model.task
  mesh = sharding.mesh_of(model.params)

  def compare(
    params: Any, extra: Any, batch: input_pipeline.Batch
  ) -> dict[str, jax.Array]:
    logits = task.outputs(params, extra, batch)
    probabilities = task.squash(logits.astype(jnp.float32))  # [B, classes]
    label = batch['label']
    return {
      'true': jnp.where(label.sum(axis=-1) == 1, label.argmax(axis=-1), -1),
      'predicted': probabilities.argmax(axis=-1),
      'probability': probabilities.max(axis=-1),
    }

  compare_batch = engine.on_all_hosts(mesh, compare)
  predictions = engine.collect(
    engine.limited(model.config, mesh, _BATCH),
    mesh,
    source,
    task.example,
    lambda batch: compare_batch(model.params, model.extra, batch),
    label='Classifying',
  )
  true, predicted = predictions['true'], predictions['predicted']
  is_labelled = true >= 0
  count = len(model.class_names)
  confusion = np.zeros((count, count), np.int64)
  np.add.at(confusion, (true[is_labelled], predicted[is_labelled]), 1)
  wrong = np.flatnonzero(is_labelled & (predicted != true))
  order = np.argsort(-predictions['probability'][wrong], kind='stable')
  wrong = wrong[order][:num_mistakes]
  images: Any = ()
  if len(wrong):
    inputs = _examples(model, source, wrong)['image']
    images = false_colours.of_inputs(inputs, model.config.pp)
  mistakes = []
  for image, number in zip(images, wrong.tolist()):
    mistakes.append(
      Mistake(
        image,
        int(true[number]),
        int(predicted[number]),
        float(predictions['probability'][number]),
        source.name(number),
      )
    )
  return Results(confusion, mistakes)


def _examples(model: Any, source: records.Source, numbers: np.ndarray) -> dict:
  """Returns some examples of a split as an evaluation batch."""
  config = model.config.copy_and_resolve_references()
  config.batch_eval = len(numbers)
  rows = np.arange(len(numbers))
  data = input_pipeline.eval_dataset(config, source, model.task.example, rows, numbers)
  return next(data.as_numpy_iterator())


def most_confused(confusion: np.ndarray, count: int) -> list[tuple[int, int, int]]:
  """Returns pairs of classes that are confused, the most frequent first.

  Each is (true class, predicted class, number of images); at most `count`.
  """
  wrong = np.array(confusion)
  np.fill_diagonal(wrong, 0)
  order = np.argsort(-wrong, axis=None, kind='stable')[:count]
  pairs = []
  for true, predicted in zip(*np.unravel_index(order, wrong.shape)):
    if wrong[true, predicted]:
      pairs.append((int(true), int(predicted), int(wrong[true, predicted])))
  return pairs


class AttentionSummary(NamedTuple):
  """Attention and outputs of a model of L layers and K heads for B images."""

  maps: np.ndarray  # Attention maps of each layer, float32 [L, B, h, w].
  rollout: np.ndarray  # Maps of attention rollout, float32 [B, h, w].
  tokens: np.ndarray  # Maps of the tokens before the patches, float32 [T, B, h, w].
  distances: np.ndarray  # Mean attention distances in pixels, float32 [L, K].
  outputs: np.ndarray  # float32 [B, ...].


class Subject:
  """A trained model (a Predictor), and the images for its figures.

  `batch` has the model's inputs for the images, arrays [B, ...], or is None. `source` is
  a split with labels, for the confusion matrix, or None, and `lacking` says why.
  `points` in the images are as for Task.check_points; None: the task chooses.
  `foreground` is as for internals.patch_colours. `methods` of explanations are keys of
  explanations.METHODS, by default all that the model can have; they explain the class
  `class_name`, by default the predicted one.
  """

  def __init__(
    self,
    model: Any,
    images: Sequence[Any] | None = None,
    source: records.Source | None = None,
    split: str = '',
    count: int = 8,
    lacking: str = '',
    points: Sequence[tuple[float, float]] | None = None,
    foreground: str = '',
    methods: Sequence[str] | None = None,
    class_name: str | None = None,
  ) -> None:
    """Reads `images` of any sizes, else the first `count` of `source`."""
    self.model = model
    self._computed: dict[Callable[[Subject], Any], Any] = {}
    self._explain: dict[str, Callable[..., jax.Array]] = {}
    self.source, self.split, self.lacking = source, split, lacking
    self.foreground = foreground
    self.points = None if points is None else model.task.check_points(points)
    self.methods = _methods(model.task.model, methods)
    self.named_class = _class_number(model.class_names, class_name)
    self.batch: Any = None
    self.names: list[str] = []
    self._labels = None
    if images:
      self.batch = model.inputs(images)
      for number, image in enumerate(images, 1):
        is_path = isinstance(image, str)
        self.names.append(image.rpartition('/')[2] if is_path else f'{number}')
    elif source is not None:
      numbers = np.arange(min(count, source.evaluated.num_examples))
      self.batch = _examples(model, source, numbers)
      del self.batch['mask']
      indices = self.batch.pop('index')
      self.names = [source.name(int(i)).rpartition('/')[2] for i in indices]
      self._labels = self.batch.get('label')

  @functools.cached_property
  def params(self) -> dict[str, Any]:
    """The parameters by path, such as 'head/kernel'."""
    return flax.traverse_util.flatten_dict(dict(self.model.params), sep='/')

  @functools.cached_property
  def grid(self) -> tuple[int, int]:
    """Number of patches (down, across) of an image."""
    grid = models.patch_grid(self.model.config.model, self.model.task.image_size)
    assert grid is not None  # Only figures of models with patches read it.
    return grid

  @functools.cached_property
  def pictures(self) -> np.ndarray:
    """The images as figures show them, float32 [B, H, W, 1 or 3] in [-1, 1]."""
    return false_colours.of_inputs(self.batch['image'], self.model.config.pp)

  @functools.cached_property
  def attention(self) -> AttentionSummary:
    """Computes attention and outputs for the images, once."""
    return summarize_attention(self.model, self.batch['image'], self.grid)

  @functools.cached_property
  def patches(self) -> np.ndarray:
    """Computes the tokens of the images' patches, float32 [B, h, w, D], once."""
    model = self.model
    compute = jax.jit(model.task.features('patches'))

    def compute_image(image: np.ndarray) -> jax.Array:
      return compute(model.params, model.extra, {'image': image})

    return engine.by_parts(compute_image, self.batch['image'], 1)

  @functools.cached_property
  def outputs(self) -> np.ndarray:
    """Computes the outputs of the task for the images, once."""
    model = self.model
    compute = jax.jit(model.task.outputs)

    def compute_batch(batch: dict[str, np.ndarray]) -> jax.Array:
      return compute(model.params, model.extra, batch)

    return engine.by_parts(compute_batch, self.batch, 1)

  def relevance(self, method: str, classes: np.ndarray) -> np.ndarray:
    """Explains a class of each image, int [B]: maps [B, h, w]."""
    if method not in self._explain:
      task = self.model.task
      function = functools.partial(explanations.explain, task.model, method=method)
      self._explain[method] = jax.jit(function)
    explain = functools.partial(self._explain[method], self.model.params)
    inputs = self.batch['image'], classes
    return engine.by_parts(lambda rows: explain(*rows), inputs, 1)

  def once(self, compute: Callable[['Subject'], Any]) -> Any:
    """Returns `compute(self)`, which is called once for several figures."""
    if compute not in self._computed:
      self._computed[compute] = compute(self)
    return self._computed[compute]

  @functools.cached_property
  def results(self) -> Results:
    """Classifies the split, once."""
    assert self.source is not None  # Figures that need it are left out otherwise.
    return classify(self.model, self.source)

  @functools.cached_property
  def predictions(self) -> list[str]:
    """A label per image: the predicted class of a classifier."""
    return self.model.task.labels_of(self.outputs, self._labels)

  @functools.cached_property
  def labels(self) -> tuple[list[str], str]:
    """A label per image, what is predicted or its name, and their title."""
    labels = self.model.task.labels_of(self.attention.outputs, self._labels)
    if labels:
      return labels, 'predicted class, probability'
    return self.names, ''


def _methods(model: Any, methods: Sequence[str] | None) -> dict[str, str | None]:
  """Returns {method of explanations: what the model lacks for it, or None}."""
  reasons = {}
  for method in methods or explanations.METHODS:
    reasons[method] = explanations.lacks(model, method)
  if methods:
    return reasons
  possible = [method for method, reason in reasons.items() if reason is None]
  return dict.fromkeys(possible) or reasons


def _class_number(class_names: Sequence[str], name: str | None) -> int | None:
  """Returns the index of a class; ValueError if the model does not have it."""
  if name is None:
    return None
  if name not in class_names:
    names = ', '.join(class_names[:_NAMES])
    ellipsis = ', ...' if len(class_names) > _NAMES else ''
    raise ValueError(
      f"class_name='{name}' is not a class of this model: use one of {names}{ellipsis} "
      '(--class)'
    )
  return list(class_names).index(name)


def summarize_attention(
  model: Any, images: np.ndarray, grid: tuple[int, int]
) -> AttentionSummary:
  """Computes attention and outputs, image by image: all weights take much memory.

  Takes a Predictor of a Vision Transformer, float32 [B, H, W, C] in [-1, 1], and
  the number of patches (down, across).
  """
  compute = jax.jit(functools.partial(internals.forward, model.task.model))
  patch = tuple(size / cells for size, cells in zip(images.shape[1:3], grid))

  summaries = []
  for i in range(len(images)):
    weights, outputs = jax.device_get(compute(model.params, images[i : i + 1]))
    attention = internals.make_attention(model.task.model, weights, outputs, grid)
    summary = AttentionSummary(
      internals.maps(attention),
      internals.rollout_maps(attention),
      internals.token_maps(attention),
      internals.mean_distances(attention.weights, grid, patch),
      outputs,
    )
    summaries.append(summary)
  maps, rollouts, tokens, distances, outputs = zip(*summaries)
  return AttentionSummary(
    np.concatenate(maps, axis=1),
    np.concatenate(rollouts),
    np.concatenate(tokens, axis=1),
    np.mean(distances, axis=0),
    np.concatenate(outputs),
  )
