"""The web demo of detectors, see `page` of their predictors; imports Gradio."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gradio as gr
import jax
import numpy as np

from vit_jax.figures import drawing as figures_drawing, grids, overlays
from vit_jax.inference import demo
from vit_jax.tasks.detection import attention_figures

Page = tuple[Callable[..., dict], list, list]  # See Predictor.page.


class _Result(NamedTuple):
  """The predictions for the photo of a visitor."""

  pixels: np.ndarray  # The enlarged photo, uint8 [H, W, 3].
  inputs: Mapping[str, np.ndarray]
  outputs: Mapping[str, np.ndarray]


class _Components(NamedTuple):
  """Components of the page."""

  result: gr.State  # A _Result, or None.
  threshold: gr.Slider
  picture: gr.Image


def detection_page(model: Any) -> Page:
  """Shows boxes above a score, and the attention of a box that is clicked.

  Predictor.page describes the result.
  """

  @jax.jit
  def compute(params: Any, extra: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
    attention = attention_figures.compute_at_once(model.task, params, extra, batch)
    fields = attention._asdict()
    del fields['encoder']  # It takes much memory.
    return fields

  def list_objects(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], min_score: float
  ) -> tuple[None, list]:
    return None, model.objects(inputs, outputs, min_score)

  (show, inputs, outputs), components = _page(model, compute, list_objects)
  attention = demo.picture('Attention of the box that you click')

  def click(
    result: _Result | None, min_score: float, event: gr.SelectData
  ) -> np.ndarray | None:
    if not result:
      return None
    objects = model.objects(result.inputs, result.outputs, min_score)
    number = clicked([box for *_, box in objects], *event.index)
    if number is None:
      gr.Info('Click inside of a box')
      return None
    query = np.argsort(-result.outputs['scores'], kind='stable')[number]
    overlay = figures_drawing.overlay(
      result.pixels / np.float32(255),
      result.outputs['decoder'][query],
      result.outputs['filled'],
    )
    pixels = grids.to_pixels(2 * overlay - 1)
    return model.draw(pixels, None, objects[number : number + 1])

  components.picture.select(click, [components.result, components.threshold], attention)
  return show, inputs, [*outputs, attention]


def segmentation_page(model: Any, instances: Any = None) -> Page:
  """Shows segments above a score, or the instances of another predictor."""
  page, _ = _page(model, None, model.postprocess, instances)
  return page


def _page(
  model: Any,
  compute: Callable | None,
  postprocess: Callable[..., tuple[Any, list]],
  instances: Any = None,
) -> tuple[Page, _Components]:
  """Shows the predictions above a score that the visitor chooses.

  For `compute` see Predictor.stream, for `postprocess` Detector.postprocess. With a
  predictor of instances, the visitor chooses between segments and instances.
  """
  noun = model.NOUN
  threshold = gr.Slider(
    0, 1, model.MIN_SCORE, step=0.01, label=f'Minimum score of the {noun}s'
  )
  controls: list[Any] = [threshold]
  if instances is not None:
    nouns = [f'{noun}s', f'{instances.NOUN}s']
    controls.append(gr.Radio(nouns, value=nouns[0], label='What to show'))
  summary = gr.Markdown()
  picture = demo.picture(f'{noun}s'.capitalize(), enlarged=False)
  state = gr.State()

  def draw(result: _Result | None, min_score: float, choice: str = '') -> dict:
    if not result:
      return {picture: None, summary: ''}
    view, view_postprocess = model, postprocess
    if instances is not None and choice.startswith(instances.NOUN):
      view = instances
      view_postprocess = instances.postprocess
    regions, predictions = view_postprocess(result.inputs, result.outputs, min_score)
    ending = '' if len(predictions) == 1 else 's'
    text = (
      f'{len(predictions)} {view.NOUN}{ending} with a score of at least '
      f'{100 * min_score:g} %'
    )
    return {picture: view.draw(result.pixels, regions, predictions), summary: text}

  def show(photo: demo.Photo, *values: Any) -> dict:
    columns = model.columns()
    [(_, inputs, outputs)] = model.stream(
      [photo.path], compute, columns.keep, columns.parts
    )
    pixels = figures_drawing.enlarged(photo.pixels, overlays.LEAST)
    # Boxes and maps are made for the enlarged picture.
    inputs = {**inputs, 'size': np.array(pixels.shape[:2])}
    result = _Result(pixels, inputs, outputs)
    return {state: result, **draw(result, *values)}

  for control in controls:
    control.change(draw, [state, *controls], [picture, summary])
  page = show, controls, [state, picture, summary]
  return page, _Components(state, threshold, picture)


def clicked(boxes: Sequence[Sequence[float]], x: float, y: float) -> int | None:
  """Returns the number of the smallest box that contains a point, if any."""
  smallest = None
  smallest_area = np.inf
  for number, (x0, y0, x1, y1) in enumerate(boxes):
    area = (x1 - x0) * (y1 - y0)
    # The last one of several boxes of the same area is on top.
    if x0 <= x <= x1 and y0 <= y <= y1 and area <= smallest_area:
      smallest, smallest_area = number, area
  return smallest
