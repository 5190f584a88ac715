r"""Prints what a trained model says of images: their classes, for one.

  python -m vit_jax.predict --workdir=/tmp/digits image.png other.jpg

In Python:

  model = predict.load('/tmp/digits')
  model.predict(['image.png'])  # [[('7', 0.98), ('9', 0.01), ...]]

What there is to say, and what else the model can do, depends on the task of the
run: see the class Predictor in its file, vit_jax/tasks/classify.py for one.
"""

import argparse

import jax

from vit_jax import cli


def load(
  workdir: str, step: int | None = None, mesh: jax.sharding.Mesh | None = None
):
  """Loads a trained model.

  Args:
    workdir: folder of a run, local or gs://.
    step: the checkpoint to take, by default the newest that is complete.
    mesh: where the parameters go, by default to one device.

  Returns:
    The predictor of the run's task, see vit_jax.tasks.base.Predictor: it has
    `params`, `config`, `metadata`, `class_names` and `predict(images)`.

  Raises:
    FileNotFoundError: if there is no run in the folder, or no checkpoint yet.
    ValueError: if no checkpoint can be read, or not the one asked for.
  """
  # Imported late: they bring TensorFlow, which takes seconds to load.
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.learning import state as state_lib
  from vit_jax.run import checkpoints as checkpoints_lib
  from vit_jax.run import workdir as workdir_lib
  from vit_jax.scale import sharding

  config, metadata = workdir_lib.load(workdir)
  mesh = mesh or sharding.make_mesh({'data': 1}, jax.local_devices()[:1])
  config.sharding_rules = ()
  if 'transformer' in config.model:  # This may be another device.
    config.model.transformer.attention = 'default'
  program = train.make_program(config, metadata, mesh)
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
  return program.task.predictor(state_lib.best_params(state), state.extra, step)


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
