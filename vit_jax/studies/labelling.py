"""Labels images with a trained model: the pseudo-labels of Noisy Student.

The model sees each image once, without noise. Confident labels are kept and
balanced over the classes (arXiv 1911.04252, section 3). Images are labelled in
blocks; after an interruption the same call resumes with the first missing block.
"""

import json
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import console, predict
from vit_jax.data import pseudo_labels, records
from vit_jax.distributed import files, processes
from vit_jax.evaluators import evaluation
from vit_jax.inference import engine
from vit_jax.run import workdir as workdir_lib
from vit_jax.tasks import classify

# Number of classes whose probabilities are stored for an image by default, and
# number of images in a block with as many classes.
SOFT_CLASSES, BLOCK = 32, 2**18
_LABELS = ('images', 'classes', 'probabilities')


class Settings(NamedTuple):
  """How to make pseudo-labels of the images of a split."""

  teacher: str  # Workdir of a run, whose newest checkpoint labels the images.
  dataset: str
  split: str
  confidence: float  # Labels with a lower probability are dropped.
  per_class: int | None  # Images per class, see `balance`; None for all.
  soft: bool  # Whether a label is the probability of every class, or the best one.
  seed: int  # Of `balance`.
  # Number of top classes whose probabilities are stored; None for all.
  soft_classes: int | None = SOFT_CLASSES


def label(settings: Settings, source, folder: str, batch: int) -> dict:
  """Labels images and writes a folder of pseudo-labels, unless it exists.

  `batch` is the number of images per step, over all devices and hosts. Returns the
  content of pseudo_labels.json; its `counts` are the numbers of images seen
  (`images`), of confident labels per class (`by_class`), and of examples after
  balancing (`examples`). Raises ValueError for a folder with other settings or
  images, a run that is not a classifier, and images without any confident label.
  """
  path = epath.Path(folder)
  asked = {**settings._asdict(), 'images': source.fingerprint()}
  done = processes.from_first(
    'looking for pseudo-labels', lambda: _begin(path, asked, source)
  )
  if not done:
    model, mesh = load_teacher(settings.teacher)
    model.config.batch_eval = batch
    evaluation.fit_batches(model.config, mesh)
    _label_blocks(model, mesh, settings, source, path)
    processes.from_first(
      'writing the pseudo-labels', lambda: _finish(path, asked, model.task)
    )
  return processes.from_first(
    'reading the pseudo-labels', lambda: pseudo_labels.read_facts(folder)
  )


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


def _begin(path, asked, source) -> bool:
  """Checks the settings against the folder's; returns whether it is complete."""
  asked = json.loads(json.dumps(asked))
  done = pseudo_labels.exists(path)
  begun = path / 'settings.json'
  if done:
    facts = pseudo_labels.read_facts(path)
    before = {**facts.get('settings', {}), 'images': facts['images']}
  elif begun.exists():
    again = f"delete the folder '{path}' to label its images anew"
    before = pseudo_labels.read_json(begun, again)
  else:
    path.mkdir(parents=True, exist_ok=True)
    source.store(path)
    files.write(begun, json.dumps(asked, indent=1))
    return False
  if differing := workdir_lib.differences(before, asked):
    raise ValueError(
      f"'{path}' has pseudo-labels of other settings:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or the same config to resume'
    )
  return done


def _label_blocks(model, mesh, settings, source, path):
  """Writes a file of confident labels for each block that lacks one."""
  task = model.task
  count = len(task.class_names)
  known = min(settings.soft_classes or count, count)

  def best(params, extra, batch):
    logits = task.outputs(params, extra, batch)
    shares = task.squash(logits.astype(jnp.float32))
    probabilities, classes = jax.lax.top_k(shares, known)  # [B, known]
    return {'classes': classes, 'probabilities': probabilities}

  best = engine.everywhere(mesh, best)
  size = max(1, BLOCK * SOFT_CLASSES // max(known, SOFT_CLASSES))
  begins = range(0, source.num_examples, size)
  missing = processes.from_first(
    'looking for labelled blocks',
    lambda: [begin for begin in begins if not _block(path, begin).exists()],
  )
  for begin in missing:
    end = min(begin + size, source.num_examples)
    found = engine.collect(
      model.config,
      mesh,
      records.Subset(source, np.arange(begin, end)),
      task.inputs,
      lambda batch: best(model.params, model.extra, batch),
      what=f'Labelling images {begin:,} to {end:,}',
    )
    found = confident(found, begin, settings.confidence)
    processes.from_first(
      'writing a block of labels',
      lambda begin=begin, found=found: pseudo_labels.write_arrays(
        _block(path, begin), found
      ),
    )
    if begin != missing[-1]:
      console.say(f'  {end:,} of {source.num_examples:,} images are labelled.')


def _block(path, begin):
  return path / 'blocks' / f'{begin:012}.npz'


def confident(found, begin: int, confidence: float) -> dict[str, np.ndarray]:
  """Selects the images with a confident label of a block that begins at `begin`.

  `found` has `classes` and `probabilities` [b, k] of all its images, the top class
  first. Returns `images`, int64 [m], numbers of the images; `classes` and
  `probabilities` [m, k]; and `highest`, the highest probability of all images.
  """
  first = found['probabilities'][:, 0]
  kept = np.flatnonzero(first >= confidence)
  return {
    'images': kept.astype(np.int64) + begin,
    'classes': found['classes'][kept],
    'probabilities': found['probabilities'][kept],
    'highest': first.max(),
  }


def _finish(path, asked: dict[str, Any], task):
  """Balances the labels of all blocks, and writes the result."""
  again = 'delete it and run the same command again to label these images anew'
  found = [
    pseudo_labels.read_arrays(block, (*_LABELS, 'highest'), again)
    for block in sorted((path / 'blocks').glob('*.npz'))
  ]
  arrays = {name: np.concatenate([part[name] for part in found]) for name in _LABELS}
  if not len(arrays['images']):
    highest = max(part['highest'] for part in found)
    raise ValueError(
      f"no label of the teacher in '{asked['teacher']}' reaches confidence="
      f'{asked["confidence"]}: the highest probability is {highest:.3f}; lower '
      '--config.confidence, or train the teacher longer'
    )
  best, confidence = (arrays[name][:, 0] for name in _LABELS[1:])
  arrays['rows'] = balance(best, confidence, asked['per_class'], asked['seed'])
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
  (path / 'blocks').rmtree()
  (path / 'settings.json').unlink()


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
