"""Labels images with a trained model: the pseudo-labels of Noisy Student.

The model sees each image once, without noise. Confident labels are kept and
balanced over the classes (arXiv 1911.04252, section 3).
"""

from collections.abc import Mapping
import functools
import json
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import predict
from vit_jax.data import pseudo_labels, records
from vit_jax.distributed import processes
from vit_jax.evaluators import evaluation
from vit_jax.inference import engine, predictor
from vit_jax.run import workdir as workdir_lib
from vit_jax.tasks import classify


class Settings(NamedTuple):
  """How to make pseudo-labels of the images of a split."""

  teacher: str  # Workdir of a run, whose newest checkpoint labels the images.
  dataset: str
  split: str
  confidence: float  # Labels with a lower probability are dropped.
  per_class: int | None  # Images per class, see `balance`; None for all.
  soft: bool  # Whether a label is the probability of every class, or the best one.
  seed: int  # Seed of `balance`.
  soft_classes: int | None  # Top classes whose probabilities are stored; None: all.


def label(settings: Settings, source: records.Source, folder: str, batch: int) -> dict:
  """Labels images and writes a folder of pseudo-labels, unless it exists.

  `batch` is the number of images per step, over all devices and hosts. Returns the
  content of pseudo_labels.json; its `counts` are the numbers of images seen
  (`images`), of confident labels per class (`by_class`), and of examples after
  balancing (`examples`). Raises ValueError for a folder with other settings or
  images, a run that is not a classifier, and images without any confident label.
  """
  path = epath.Path(folder)
  request = {**settings._asdict(), 'images': source.fingerprint()}
  if not _is_done(path, request, source):
    model, mesh = load_teacher(settings.teacher)
    model.config.batch_eval = batch
    evaluation.fit_batches(model.config, mesh)
    predictions = _predict(model, mesh, source, settings.soft_classes)
    write_labels(path, request, model.task, predictions)
  return _read_facts(folder)


@processes.by_first('reading the pseudo-labels')
def _read_facts(folder: str) -> dict[str, Any]:
  return pseudo_labels.read_facts(folder)


def load_teacher(workdir: str) -> tuple[predictor.Predictor, jax.sharding.Mesh]:
  """Loads a run that can label images; returns its predictor and the mesh."""
  mesh = evaluation.run_mesh(workdir)
  model = predict.load(workdir, mesh=mesh)
  if not isinstance(model.task, classify.Task):
    raise ValueError(
      f"the run in '{workdir}' has the task '{model.config.task}': only a "
      "classifier (config.task = 'classify') can label images"
    )
  return model, mesh


@processes.by_first('looking for pseudo-labels')
def _is_done(
  path: epath.Path, request: Mapping[str, Any], source: records.Source
) -> bool:
  """Returns whether the folder has labels; ValueError if of other settings."""
  if not pseudo_labels.exists(path):
    path.mkdir(parents=True, exist_ok=True)
    source.store(path)
    return False
  facts = pseudo_labels.read_facts(path)
  before = {**facts.get('settings', {}), 'images': facts['images']}
  if differing := workdir_lib.differences(before, json.loads(json.dumps(request))):
    raise ValueError(
      f"'{path}' has pseudo-labels of other settings:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or the same config'
    )
  return True


def _predict(
  model: predictor.Predictor,
  mesh: jax.sharding.Mesh,
  source: records.Source,
  num_classes: int | None,
) -> dict[str, np.ndarray]:
  """Returns the top `classes` and their `probabilities`, both [n, num_classes]."""
  task = model.task
  count = len(task.class_names)

  def best(params: Any, extra: Any, batch: Any) -> dict[str, jax.Array]:
    logits = task.outputs(params, extra, batch)
    probabilities = task.squash(logits.astype(jnp.float32))
    probabilities, classes = jax.lax.top_k(
      probabilities, min(num_classes or count, count)
    )
    return {'classes': classes, 'probabilities': probabilities}

  predict_batch = engine.on_all_hosts(mesh, best)
  return engine.collect(
    model.config,
    mesh,
    source,
    task.inputs,
    functools.partial(predict_batch, model.params, model.extra),
    label='Labelling images',
  )


@processes.by_first('writing the pseudo-labels')
def write_labels(
  path: epath.Path,
  request: dict[str, Any],
  task: classify.Task,
  predictions: Mapping[str, np.ndarray],
) -> None:
  """Selects the confident labels, balances them, and writes them."""
  confidence = predictions['probabilities'][:, 0]
  confident = np.flatnonzero(confidence >= request['confidence'])
  if not len(confident):
    raise ValueError(
      f"no label of the teacher in '{request['teacher']}' reaches confidence="
      f'{request["confidence"]}: the highest probability is {confidence.max():.3f}; '
      'lower --config.confidence, or train the teacher longer'
    )
  best = predictions['classes'][confident, 0]
  rows = balance(best, confidence[confident], request['per_class'], request['seed'])
  arrays = {
    'images': confident.astype(np.int64),
    'classes': predictions['classes'][confident],
    'probabilities': predictions['probabilities'][confident],
    'rows': rows,
  }
  counts = {
    'images': request['images']['num_examples'],
    'by_class': np.bincount(best, minlength=len(task.class_names)).tolist(),
    'examples': len(rows),
  }
  settings = dict(request)
  images = settings.pop('images')
  facts = {
    'dataset': request['dataset'],
    'split': request['split'],
    'images': images,
    'soft': request['soft'],
    'class_names': list(task.class_names),
    'exclusive': task.exclusive,
    'settings': settings,
    'counts': counts,
  }
  pseudo_labels.write(path, arrays, facts)


def balance(
  classes: np.ndarray, confidence: np.ndarray, per_class: int | None, seed: int
) -> np.ndarray:
  """Chooses the same number of images of each class (arXiv 1911.04252, 3.1).

  A class with too many images keeps the most confident ones. A class with too few
  repeats its images equally often, and randomly chosen ones once more. A class without
  images stays empty. With per_class=None every image is kept once.

  Args:
    classes: class of each image, int [m].
    confidence: confidence of each image, float [m].
    per_class: number of images of each class.
    seed: decides which images are repeated.

  Returns:
    Rows of these arrays, int64 [n], ascending by class.
  """
  if per_class is None:
    return np.arange(len(classes))
  balanced = []
  order = np.lexsort((-confidence, classes))  # By class, most confident first.
  labels, begins = np.unique(classes[order], return_index=True)
  for label, rows in zip(labels, np.split(order, begins[1:])):
    repeats, num_extra = divmod(per_class, len(rows))
    ranks = np.arange(len(rows))
    if repeats:
      ranks = np.random.default_rng([seed, label]).permutation(len(rows))
    balanced.append(np.tile(rows, repeats))
    balanced.append(rows[np.sort(ranks[:num_extra])])
  return np.concatenate(balanced)
