"""Draws the paper's figures for a run or a file of weights.

In Python, with or without a list of images:

  figures = visualize.figures(predict.load('/tmp/digits'), ['a.png'])
  figures['attention_rollout']  # A matplotlib Figure.

`vit_jax visualize` (vit_jax/commands/visualize.py) is the command.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from vit_jax import console
from vit_jax.run import workdir as workdir_lib

if TYPE_CHECKING:
  from vit_jax.figures import results


def subject(
  model: Any,
  images: Sequence[Any] | None = None,
  split: str | None = None,
  num_images: int = 8,
  points: Sequence[tuple[float, float]] | None = None,
  foreground: str = '',
  methods: Sequence[str] | None = None,
  class_name: str | None = None,
) -> 'results.Subject':
  """Returns a model and the images for its figures, a figures.results.Subject.

  The model is the result of `predict.load` or `predict.load_weights`. Images are paths,
  PIL images, or arrays uint8 [height, width(, channels)] of any size; by default the
  first `num_images` of `split`, which also gives the confusion matrix: a split of the
  run's data set, by default the first one that the run is tested on. `points` (x, y)
  in every image, as shares of width and height, are for the attention of a detector's
  encoder; by default the centres of boxes. `foreground`, 'positive' or 'negative', is
  the sign of the patches that `patch_components` colours; '' for all. `methods` of
  explanations are keys of vit_jax.figures.explanations.METHODS, by default all that the
  model can have; they explain the class `class_name`, by default the predicted one.

  Raises FileNotFoundError or ValueError if an image or the split cannot be read, a
  point lies outside of the images, a method or class is unknown, or the model was
  loaded in 8 bits.
  """
  from vit_jax.data import sources
  from vit_jax.figures import results
  from vit_jax.inference import int8
  from vit_jax.run import config as run_config

  int8.check(model, 'figures: load it without')
  source = None
  lacking = 'weights without a run have no data'
  if model.workdir:
    first = run_config.evaluations(model.config)[0]
    split_or_default = split or first.split
    try:
      source = sources.open_for(
        model.config, type(model.task), model.metadata, split_or_default, first.dataset
      )
      split = split_or_default
      lacking = ''
    except (OSError, ValueError) as e:
      if split is not None:
        raise
      lacking = f'the data of the run cannot be opened: {e}'
  elif split is not None:
    raise ValueError(
      f"split='{split}' needs a run, and these weights have none: pass images "
      '(--images)'
    )
  return results.Subject(
    model,
    images,
    source,
    split or '',
    num_images,
    lacking,
    points,
    foreground,
    methods,
    class_name,
  )


def figures(
  model: Any,
  images: Sequence[Any] | None = None,
  split: str | None = None,
  names: Sequence[str] | None = None,
  num_images: int = 8,
  points: Sequence[tuple[float, float]] | None = None,
  foreground: str = '',
  methods: Sequence[str] | None = None,
  class_name: str | None = None,
) -> dict[str, Any]:
  """Draws figures of a model; returns matplotlib Figures by name.

  `names` are keys of vit_jax.figures.gallery.entries_of; by default all that the model
  can have. For the other arguments see `subject`. Raises ValueError if a named figure
  cannot be drawn, and ImportError without matplotlib.
  """
  from vit_jax.figures import gallery

  model_subject = subject(
    model, images, split, num_images, points, foreground, methods, class_name
  )
  results = {}
  for entry in gallery.choose(model_subject, names)[0]:
    results.update(gallery.draw(entry, model_subject))
  return results


def describe(model: Any) -> tuple[str, dict[str, str]]:
  """Describes a model: returns its name, and facts by name."""
  from vit_jax.weights import identify

  config = model.config
  name = config.model.get('model_name') or identify.describe(model.params)
  count = sum(x.size for x in jax.tree.leaves(model.params))
  height, width = model.task.image_size
  facts = {
    'parameters': f'{count:,}',
    'images': f'{height} x {width} pixels, {console.pluralize(config.pp.channels, "channel")}',
  }
  if model.class_names:
    facts['classes'] = f'{len(model.class_names):,}'
  if model.workdir:
    facts['run'] = f'{workdir_lib.absolute(model.workdir).name}, step {model.step:,}'
  return name, facts
