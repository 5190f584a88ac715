r"""Prints what a trained model says of images: their classes, for one.

  python -m vit_jax.predict --workdir=/tmp/digits image.png other.jpg

In Python:

  model = predict.load('/tmp/digits')
  model.predict(['image.png'])  # [[('7', 0.98), ('9', 0.01), ...]]

What there is to say, and what else the model can do, depends on the task of the
run: see the class Predictor in its file, vit_jax/tasks/classify.py for one.
"""

import argparse
import math

import jax

from vit_jax import cli


def load(
  workdir: str, step: int | None = None, mesh: jax.sharding.Mesh | None = None
):
  """Loads a trained model: parameters (their average where there is one) and extra.

  Args:
    workdir: folder of a run, local or gs://.
    step: the checkpoint to take, by default the newest that is complete.
    mesh: where the parameters go; by default to as many devices as the run split
      them over, or to one where there are fewer. They are split as in the run
      where the mesh has its axes.

  Returns:
    The predictor of the run's task, see vit_jax.tasks.base.Predictor: it has
    `params`, `config`, `metadata`, `class_names` and `predict(images)`.

  Raises:
    FileNotFoundError: if there is no run in the folder, or no checkpoint yet.
    ValueError: if no checkpoint is good, or there is none of that step.
    OSError: if the storage does not answer.
  """
  # Imported late: they bring TensorFlow, which takes seconds to load.
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.run import checkpoints as checkpoints_lib
  from vit_jax.run import workdir as workdir_lib

  config, metadata = workdir_lib.load(workdir)
  mesh = mesh or _mesh(config)
  if {k for k, v in config.mesh.items() if v is not None} - set(mesh.shape):
    config.sharding_rules = ()
  if 'transformer' in config.model:  # This may be another device.
    config.model.transformer.attention = 'default'
  program = train.make_program(config, metadata, mesh)
  checkpoints = checkpoints_lib.Checkpoints(workdir, read_only=True)
  abstract = program.abstract
  weights = checkpoints.restore_weights(abstract.params, abstract.extra, step)
  model = program.task.predictor(weights.params, weights.extra, weights.step)
  model.workdir = str(workdir)
  return model


def _mesh(config):
  """Returns the axes that split the run's parameters, where the devices allow."""
  from vit_jax.scale import sharding

  devices = jax.local_devices()
  axes = {name: size for name, size in config.mesh.items() if size is not None}
  axes['data'] = 1
  count = len(devices) if -1 in axes.values() else math.prod(axes.values())
  try:
    return sharding.make_mesh(axes, devices[:count])
  except ValueError:
    return sharding.make_mesh({'data': 1}, devices[:1])


def main() -> None:
  """Prints what is to be said of the images that the command line names."""
  parser = argparse.ArgumentParser(
    prog='python -m vit_jax.predict',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('images', nargs='+', help='image files of any size')
  parser.add_argument('--workdir', required=True, help='folder of the run')
  parser.add_argument('--step', type=int, help='checkpoint (the newest)')
  parser.add_argument('--top', type=int, default=5, help='classes to print (5)')
  parser.add_argument(
    '--out', help='PNG to write, for tasks whose result is a picture'
  )
  args = parser.parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  from vit_jax.run import workdir as workdir_lib

  if args.out and not workdir_lib.absolute(args.out).parent.is_dir():
    raise ValueError(f"out='{args.out}' is in no folder that exists (--out)")
  model = load(args.workdir, args.step)
  if bool(args.out) != model.task.DRAWS:
    raise ValueError(
      f"what a run of task '{model.config.task}' says of an image is "
      + (
        'a picture: give --out=FILE.png'
        if model.task.DRAWS
        else 'no picture: leave --out away'
      )
    )
  for line in model.report(args.images, args):
    print(line)


if __name__ == '__main__':
  cli.run(main)
