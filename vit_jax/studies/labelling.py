"""Labels images with a trained model: the pseudo-labels of Noisy Student.

The model sees each image once, without noise. Confident labels are kept and
balanced over the classes (arXiv 1911.04252, section 3).
"""

import json
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import predict
from vit_jax.data import pseudo_labels
from vit_jax.distributed import processes
from vit_jax.evaluators import evaluation
from vit_jax.inference import engine
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
  seed: int  # Of `balance`.
  soft_classes: int | None  # Top classes whose probabilities are stored; None: all.


def label(settings: Settings, source, folder: str, batch: int) -> dict:
  """Labels images and writes a folder of pseudo-labels, unless it exists.

  `batch` is the number of images per step, over all devices and hosts. Returns the
  content of pseudo_labels.json; its `counts` are the numbers of images seen
  (`images`), of confident labels per class (`by_class`), and of examples after
  balancing (`examples`). Raises ValueError for a folder with other settings or
  images, a run that is not a classifier, and images without any confident label.
  """
  path, first = epath.Path(folder), processes.from_first
  asked = {**settings._asdict(), 'images': source.fingerprint()}
  if not first('looking for pseudo-labels', lambda: _is_done(path, asked, source)):
    model, mesh = load_teacher(settings.teacher)
    model.config.batch_eval = batch
    evaluation.fit_batches(model.config, mesh)
    found = _predict(model, mesh, source, settings.soft_classes)
    write = lambda: _write(path, asked, model.task, found)
    first('writing the pseudo-labels', write)
  return first('reading the pseudo-labels', lambda: pseudo_labels.read_facts(folder))


def load_teacher(workdir: str):
  """Loads a run that can label images; returns its predictor and the mesh."""
  mesh = evaluation.run_mesh(workdir)
  model = predict.load(workdir, mesh=mesh)
  if not isinstance(model.task, classify.Task):
    raise ValueError(
      f"the run in '{workdir}' has the task '{model.config.task}': only a "
      "classifier (config.task = 'classify') can label images"
    )
  return model, mesh


def _is_done(path, asked, source) -> bool:
  """Returns whether the folder has labels; ValueError if of other settings."""
  if not pseudo_labels.exists(path):
    path.mkdir(parents=True, exist_ok=True)
    source.store(path)
    return False
  facts = pseudo_labels.read_facts(path)
  before = {**facts.get('settings', {}), 'images': facts['images']}
  if differing := workdir_lib.differences(before, json.loads(json.dumps(asked))):
    raise ValueError(
      f"'{path}' has pseudo-labels of other settings:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or the same config'
    )
  return True


def _predict(model, mesh, source, known: int | None) -> dict[str, np.ndarray]:
  """Returns the `known` top `classes` and `probabilities` [n, known] of images."""
  task = model.task
  count = len(task.class_names)

  def best(params, extra, batch):
    logits = task.outputs(params, extra, batch)
    shares = task.squash(logits.astype(jnp.float32))
    probabilities, classes = jax.lax.top_k(shares, min(known or count, count))
    return {'classes': classes, 'probabilities': probabilities}

  best = engine.everywhere(mesh, best)
  return engine.collect(
    model.config,
    mesh,
    source,
    task.inputs,
    lambda batch: best(model.params, model.extra, batch),
    label='Labelling images',
  )


def _write(path, asked: dict[str, Any], task, found):
  """Selects the confident labels, balances them, and writes them."""
  confidence = found['probabilities'][:, 0]
  kept = np.flatnonzero(confidence >= asked['confidence'])
  if not len(kept):
    raise ValueError(
      f"no label of the teacher in '{asked['teacher']}' reaches confidence="
      f'{asked["confidence"]}: the highest probability is {confidence.max():.3f}; '
      'lower --config.confidence, or train the teacher longer'
    )
  best = found['classes'][kept, 0]
  arrays = {
    'images': kept.astype(np.int64),
    **{name: found[name][kept] for name in ('classes', 'probabilities')},
    'rows': balance(best, confidence[kept], asked['per_class'], asked['seed']),
  }
  facts = {
    **{name: asked[name] for name in ('dataset', 'split', 'images', 'soft')},
    'class_names': list(task.class_names),
    'exclusive': task.exclusive,
    'settings': {k: v for k, v in asked.items() if k != 'images'},
    'counts': {
      'images': asked['images']['num_examples'],
      'by_class': np.bincount(best, minlength=len(task.class_names)).tolist(),
      'examples': len(arrays['rows']),
    },
  }
  pseudo_labels.write(path, arrays, facts)


def balance(
  classes: np.ndarray, confidence: np.ndarray, per_class: int | None, seed: int
) -> np.ndarray:
  """Chooses the same number of images of each class (arXiv 1911.04252, 3.1).

  A class with too many images keeps the most confident ones. A class with too few
  repeats its images equally often, and randomly chosen ones once more. A class without
  images stays empty. With per_class=None every image is kept once.

  Takes the class, int [m], and the confidence, float [m], of each image; returns rows
  of these arrays, int64 [n], ascending by class.
  """
  if per_class is None:
    return np.arange(len(classes))
  chosen = []
  order = np.lexsort((-confidence, classes))  # By class, most confident first.
  numbers, begins = np.unique(classes[order], return_index=True)
  for number, mine in zip(numbers, np.split(order, begins[1:])):
    times, rest = divmod(per_class, len(mine))
    lots = np.arange(len(mine))
    if times:
      lots = np.random.default_rng([seed, number]).permutation(len(mine))
    chosen += [np.tile(mine, times), mine[np.sort(lots[:rest])]]
  return np.concatenate(chosen)
