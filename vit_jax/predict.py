r"""Prints the classes of images, by a model that was trained before.

  python -m vit_jax.predict --workdir=/tmp/digits image.png other.jpg

In Python:

  model = predict.load('/tmp/digits')
  model.predict(['image.png'])  # [[('7', 0.98), ('9', 0.01), ...]]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import cli

_BATCH = 32


class Predictor:
  """A trained model.

  Attributes:
    params: the parameters (their average, where the run kept one).
    config: the config of the run.
    class_names: names of the classes, in the order of the logits.
    step: the step of the checkpoint.
    task: the objective, see vit_jax.tasks.classify.Task.
  """

  def __init__(self, params, config, class_names, step, task):
    self.params = params
    self.config = config
    self.class_names = class_names
    self.step = step
    self.task = task
    self._logits = jax.jit(task.predict)

  def logits(self, images: Sequence[Any]) -> np.ndarray:
    """Computes logits, float32 [n, classes]; see `predict` for the arguments."""
    from vit_jax import preprocess

    if isinstance(images, (str, bytes)):
      raise ValueError(
        f'images={images!r:.80} must be a list: give [image], also for one'
      )
    results = []
    for start in range(0, len(images), _BATCH):
      loaded = [
        preprocess.load_image(image, self.config.pp)
        for image in images[start : start + _BATCH]
      ]
      # One shape for all batches: compiled once.
      size = 1 if len(images) == 1 else _BATCH
      batch = np.zeros((size, *loaded[0].shape), np.float32)
      batch[: len(loaded)] = loaded
      results.append(
        np.asarray(self._logits(self.params, batch))[: len(loaded)]
      )
    if not results:
      return np.zeros((0, len(self.class_names)), np.float32)
    return np.concatenate(results)

  def probabilities(self, images: Sequence[Any]) -> np.ndarray:
    """Computes probabilities, float32 [n, classes].

    Rows sum to 1, but for a model trained with the sigmoid loss, whose classes
    do not exclude each other.
    """
    activate = (
      jax.nn.sigmoid if self.config.loss == 'sigmoid' else jax.nn.softmax
    )
    return np.asarray(activate(self.logits(images)))

  def predict(
    self, images: Sequence[Any], top: int = 5
  ) -> list[list[tuple[str, float]]]:
    """Returns the most probable classes of each image.

    Args:
      images: a list (or an array [n, height, width, channels]) of images of any
        size: paths, PIL images, or arrays uint8 [height, width(, channels)].
      top: how many classes to return at most.

    Returns:
      For each image a list of (class name, probability), the best first.

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be read,
        or the model has no head.
    """
    if not self.class_names:
      raise ValueError(
        'this model has no head, hence no classes: fine-tune it first '
        '(--config.pretrained), or take its features from .logits(images)'
      )
    results = []
    for row in self.probabilities(images):
      best = np.argsort(-row, kind='stable')[:top]
      results.append([(self.class_names[i], float(row[i])) for i in best])
    return results


def load(
  workdir: str, step: int | None = None, mesh: jax.sharding.Mesh | None = None
) -> Predictor:
  """Loads a trained model.

  Args:
    workdir: folder of a run, local or gs://.
    step: the checkpoint to take, by default the newest that is complete.
    mesh: where the parameters go, by default to one device.

  Raises:
    FileNotFoundError: if there is no run in the folder, or no checkpoint yet.
    ValueError: if no checkpoint can be read, or not the one asked for.
  """
  # Imported late: they bring TensorFlow, which takes seconds to load.
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.run import checkpoints as checkpoints_lib
  from vit_jax.run import config as run_config
  from vit_jax.run import state as state_lib
  from vit_jax.run import workdir as workdir_lib
  from vit_jax.scale import sharding

  config, class_names = workdir_lib.load(workdir)
  config = run_config.complete(config)
  mesh = mesh or sharding.make_mesh({'data': 1}, jax.local_devices()[:1])
  config.sharding_rules = ()
  if 'transformer' in config.model:  # This may be another device.
    config.model.transformer.attention = 'default'
  program = train.make_program(config, class_names, mesh)
  checkpoints = checkpoints_lib.Checkpoints(workdir, read_only=True)
  steps = checkpoints.steps()
  if not steps:
    raise FileNotFoundError(
      f"workdir='{workdir}' has no complete checkpoint: train first, or longer"
    )
  if step is not None and step not in steps:
    raise ValueError(
      f"step={step} is not among the checkpoints of '{workdir}': {steps}"
    )
  state, step = checkpoints.restore(program.abstract, step)
  return Predictor(
    state_lib.best_params(state), config, class_names, step, program.task
  )


def main() -> None:
  """Prints the classes of the images that the command line names."""
  parser = argparse.ArgumentParser(
    prog='python -m vit_jax.predict',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('images', nargs='+', help='image files of any size')
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument('--step', type=int, help='checkpoint (the newest)')
  parser.add_argument('--top', type=int, default=5, help='classes to print (5)')
  args = parser.parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  model = load(args.workdir, args.step)
  results = model.predict(args.images, args.top)
  for path, classes in zip(args.images, results, strict=True):
    print(path)
    for name, probability in classes:
      print(f'  {100 * probability:6.2f} %  {name}')


if __name__ == '__main__':
  cli.run(main)
