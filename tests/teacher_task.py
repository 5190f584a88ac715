"""A task with a teacher in its extra state, which a run fills from weights."""

import dataclasses
from typing import ClassVar

import jax

from vit_jax.run import metrics
from vit_jax.tasks import classify


class Task(classify.Task):
  """Distils a teacher of the same architecture; also evaluated on other data."""

  @dataclasses.dataclass
  class Options(classify.Task.Options):
    elsewhere: str = ''

  def init(self, rng):
    """Returns random parameters, also for the teacher."""
    params, _ = super().init(rng)
    return params, {'teacher': params}

  def loss(self, params, extra, batch, rng):
    """Uses the teacher's probabilities as labels."""
    labels = self.squash(self.outputs(extra['teacher'], {}, batch))
    batch = {**batch, 'label': jax.lax.stop_gradient(labels)}
    return super().loss(params, extra, batch, rng)

  @classmethod
  def evaluators(cls, config):
    """Adds the number of examples of another data set."""
    return [*super().evaluators(config), Elsewhere]


class Elsewhere:
  """Reports how many examples another data set has."""

  metrics: ClassVar = {'num_elsewhere': metrics.Metric()}

  def __init__(self, evaluation):
    task = evaluation.task
    self._source = evaluation.open_split('test', (), task.options.elsewhere)
    assert self._source.class_names != task.class_names

  def run(self, params, extra, stop=None):
    """Returns the number."""
    return {'num_elsewhere': float(self._source.num_examples)}
