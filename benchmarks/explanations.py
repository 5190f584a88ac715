r"""Compares explanations by deletion and insertion (arXiv 1806.07421) on trained runs:

  python -m benchmarks.explanations /tmp/fashion_0 /tmp/fashion_1 /tmp/fashion_2

For each test image and its predicted class, each method orders the patches by relevance;
'random' orders them at random. Deletion replaces the patches one by one with the mean
colour of all images, the most relevant first; insertion puts them back into a blurred
image (a Gaussian of one patch). The table has the mean probability of the class over all
steps, the area under the curve: low for deletion and high for insertion if the first
patches matter most. ± is the standard deviation over the runs.
"""

from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from vit_jax import console, predict
from vit_jax.commands import flags
from vit_jax.figures import explanations, results, visualize

RANDOM = 'random'
_ROWS = 50  # Images per batch.


def ranks(relevance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns the rank of each patch, int [B, h, w]; 0 is the most relevant.

  Patches of equal relevance come in random order.
  """
  flat = relevance.reshape(len(relevance), -1)
  order = np.lexsort((rng.random(flat.shape), -flat), axis=-1)
  return np.argsort(order, axis=-1).reshape(relevance.shape)


def curve(
  probabilities: Callable[[jax.Array], jax.Array],
  start: jax.Array,
  end: jax.Array,
  ranks: jax.Array,
  classes: jax.Array,
) -> jax.Array:
  """Computes the probabilities of classes while patches change from start to end.

  Args:
    probabilities: maps images [B, H, W, C] to probabilities [B, classes].
    start: images before the first step, [B, H, W, C].
    end: images after the last step.
    ranks: the step at which each patch changes, int [B, h, w].
    classes: the class of each image, int [B].

  Returns:
    float32 [h * w + 1, B].
  """
  height, width = (
    pixels // cells for pixels, cells in zip(start.shape[1:3], ranks.shape[1:])
  )
  steps = ranks.repeat(height, axis=1).repeat(width, axis=2)[..., None]

  def probability(step: jax.Array) -> jax.Array:
    values = probabilities(jnp.where(steps < step, end, start))
    return jnp.take_along_axis(values, classes[:, None], axis=1)[:, 0]

  return jax.lax.map(probability, jnp.arange(ranks[0].size + 1))


def area(curve: np.ndarray) -> float:
  """Returns the area under curves [steps + 1, B] over [0, 1], mean over B."""
  return float(np.trapezoid(curve, dx=1 / (len(curve) - 1), axis=0).mean())


def measure(subject: results.Subject) -> dict[str, tuple[float, float]]:
  """Returns {method: (deletion, insertion)} of a model on the images of a Subject."""
  model = subject.model
  images = subject.batch['image']
  task = model.task

  def probabilities(params: Any, images: jax.Array) -> jax.Array:
    return task.squash(task.outputs(params, model.extra, {'image': images}))

  @jax.jit
  def compute_curve(params: Any, *args: jax.Array) -> jax.Array:
    return curve(functools.partial(probabilities, params), *args)

  predict_classes = jax.jit(lambda p, x: probabilities(p, x).argmax(axis=-1))
  classes = np.asarray(predict_classes(model.params, images))
  mean = np.broadcast_to(images.mean(axis=(0, 1, 2)), images.shape)
  sides = (size / cells for size, cells in zip(images.shape[1:3], subject.grid))
  blurred = ndimage.gaussian_filter(images, (0, *sides, 0))

  rng = np.random.default_rng(0)
  areas = {}
  for method in (*subject.methods, RANDOM):
    if method == RANDOM:
      relevance = np.zeros((len(images), *subject.grid))
    else:
      function = functools.partial(explanations.explain, task.model, method=method)
      explain = jax.jit(function)
      batches = [explain(model.params, images[i], classes[i]) for i in _batches(images)]
      relevance = np.concatenate(batches)
    order = ranks(relevance, rng)
    curves = []
    for start, end in ((images, mean), (blurred, images)):
      batches = [
        compute_curve(model.params, start[i], end[i], order[i], classes[i])
        for i in _batches(images)
      ]
      curves.append(np.concatenate(batches, axis=1))
    areas[method] = (area(curves[0]), area(curves[1]))
  return areas


def _batches(images: np.ndarray) -> list[slice]:
  return [slice(i, i + _ROWS) for i in range(0, len(images), _ROWS)]


def table(measured: Sequence[dict[str, tuple[float, float]]]) -> str:
  """Returns a table in Markdown of the results of several models."""
  lines = ['| method | deletion | insertion |', '|---|---|---|']
  for method in measured[0]:
    cells = []
    for values in zip(*(areas[method] for areas in measured)):
      spread = f' ± {np.std(values, ddof=1):.3f}' if len(values) > 1 else ''
      cells.append(f'{np.mean(values):.3f}{spread}')
    name = explanations.METHODS.get(method, method)
    lines.append(f'| {name} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main(argv: Sequence[str] | None = None) -> None:
  """Measures all methods on the test images of runs, and prints the table."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.explanations'
  parser.add_argument('workdirs', nargs='+', metavar='WORKDIR', help='trained runs')
  parser.add_argument(
    '--num_images', type=flags.count, default=500, help='images of the test split (500)'
  )
  args = parser.parse_args(argv)
  measured = []
  for workdir in args.workdirs:
    subject = visualize.subject(predict.load(workdir), num_images=args.num_images)
    measured.append(measure(subject))
    console.log(f'{workdir}: {measured[-1]}')
  console.log(table(measured))


if __name__ == '__main__':
  console.use_huge_pages()
  console.quiet()
  try:
    main()
  except (ValueError, ImportError, OSError) as e:
    sys.exit(f'Error: {e}')
