"""Makes the evaluators of a task for data that a test has opened."""

from vit_jax.evaluators import base
from vit_jax.run import evaluators as run_evaluators


def evaluation(task, mesh, source=None, split='test', workdir=None):
  """Returns the evaluation of a source."""
  return base.Evaluation(task, mesh, split, lambda *_: source, workdir)


def evaluators(task, mesh, source, split='test'):
  """Returns the evaluators of the task's class, in order."""
  data = evaluation(task, mesh, source, split)
  return [entry.make(data) for entry in run_evaluators.task_entries(task.config)]
