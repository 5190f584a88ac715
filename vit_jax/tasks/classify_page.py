"""The web demo of classifiers, see Predictor.page of classify.py; imports Gradio."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import gradio as gr
import jax
import numpy as np

from vit_jax.data.images import false_colours
from vit_jax.figures import drawing, explanations, grids
from vit_jax.inference import demo

_SHOWN = 5  # Classes on the page.


class _Result(NamedTuple):
  """The predictions for the photo of a visitor."""

  pixels: np.ndarray  # The picture to draw on, float32 [H, W, 3] in [0, 1].
  image: np.ndarray  # The model's input, float32 [H, W, C].
  classes: list[int]  # The most probable classes, the most probable first.


def make(
  model: Any, compute: Callable[..., dict[str, jax.Array]]
) -> tuple[Callable[..., dict], list, list]:
  """Shows the top predictions, and how much each patch speaks for one of them.

  Takes a Predictor of a classifier, and a function for its `stream` that returns
  `probabilities`; returns the result of `page`.
  """
  label = gr.Label(label='Top predictions', num_top_classes=_SHOWN)
  network = model.task.model
  methods = [m for m in explanations.METHODS if not explanations.lacks(network, m)]
  choices = [(explanations.METHODS[method], method) for method in methods]
  if methods:
    number = gr.Radio(label='Explained class', interactive=True)
    choice = gr.Radio(choices, value=methods[0], label='Explanation')
    picture = demo.picture('Explanation')
    state = gr.State()

  @functools.cache
  def explainer(method: str) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(explanations.explain, network, method=method))

  def draw(result: _Result | None, method: str, rank: int | None) -> np.ndarray | None:
    if not result or rank is None:
      return None
    classes = np.array([result.classes[rank]])
    [relevance] = explainer(method)(model.params, result.image[None], classes)
    overlay = drawing.overlay(result.pixels, np.asarray(relevance))
    return grids.to_pixels(2 * overlay - 1)

  def show(photo: demo.Photo, method: str | None = None) -> dict:
    [(_, inputs, outputs)] = model.stream([photo.path], compute, ['image'])
    probabilities = outputs['probabilities']
    classes = np.argsort(-probabilities, kind='stable')[:_SHOWN].tolist()
    rows = [(model.class_names[i], float(probabilities[i])) for i in classes]
    names = demo.confidences(rows)
    if method is None:
      return {label: names}
    # The model may see only a centre crop of the photo.
    if model.config.pp.resize is None:
      image = photo.pixels / 127.5 - 1
    else:
      image = false_colours.of_inputs(inputs['image'], model.config.pp)
    result = _Result(drawing.as_pixels(image), inputs['image'], classes)
    ranks = [(name, rank) for rank, name in enumerate(names)]
    return {
      label: names,
      state: result,
      number: gr.Radio(ranks, value=0),
      picture: draw(result, method, 0),
    }

  if not methods:
    return show, [], [label]
  for radio in (number, choice):
    radio.input(draw, [state, choice, number], picture)
  return show, [choice], [label, number, state, picture]
