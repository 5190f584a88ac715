"""A task with a teacher in its extra state, which a run fills from weights."""

import dataclasses

import jax

from vit_jax.evaluators import means
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

  def evaluators(self, mesh, split, open_split):
    """Adds the number of examples of another data set."""
    source = open_split('test', (), self.options.elsewhere)
    assert source.class_names != self.class_names
    return [*super().evaluators(mesh, split, open_split), Elsewhere(source)]


class Elsewhere(means.Means):
  """Reports how many examples another data set has."""

  def __init__(self, source):
    self._source = source

  def run(self, params, extra, stop=None):
    """Returns the number."""
    return {'num_elsewhere': float(self._source.num_examples)}
