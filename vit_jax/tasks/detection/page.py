"""The web demo of detectors, see `page` of their predictors; imports Gradio."""

import gradio as gr
import jax
import numpy as np

from vit_jax.figures import drawing as figures_drawing, grids
from vit_jax.inference import demo
from vit_jax.tasks.detection import attention_figures, overlays


def of_objects(model):
  """Shows boxes above a score, and the attention of a box that is clicked.

  Returns the result of `page` of the predictor; likewise `of_segments`.
  """

  @jax.jit
  def compute(*args):
    found = attention_figures.compute_at_once(model.task, *args)._asdict()
    del found['encoder']  # That takes much memory.
    return found

  def make(*args):
    return None, model.objects(*args)

  result, (found, threshold), picture = _page(model, compute, make)
  attention = demo.picture('Attention of the box that you click')

  def click(found, least, event: gr.SelectData):
    if not found:
      return None
    pixels, inputs, results = found
    objects = model.objects(inputs, results, least)
    number = clicked([box for *_, box in objects], *event.index)
    if number is None:
      gr.Info('Click inside of a box')
      return None
    query = np.argsort(-results['scores'], kind='stable')[number]
    over = figures_drawing.overlay(
      pixels / np.float32(255), results['decoder'][query], results['filled']
    )
    drawn = grids.to_pixels(2 * over - 1)
    return model.draw(drawn, None, objects[number : number + 1])

  picture.select(click, [found, threshold], attention)
  show, inputs, outputs = result
  return show, inputs, [*outputs, attention]


def of_segments(model):
  """Shows segments above a score."""
  return _page(model, None, model.make)[0]


def _page(model, compute, make):
  """Shows what is found above a score that the visitor chooses.

  For `compute` see Predictor.stream, for `make` Detector.make. Returns the result
  of `page`; the components of (pixels, inputs, results) and of the threshold; and
  the component of the picture.
  """
  what = model.WHAT
  threshold = gr.Slider(
    0, 1, model.LEAST, step=0.01, label=f'Minimum score of the {what}s'
  )
  words = gr.Markdown()
  picture = demo.picture(f'{what}s'.capitalize(), enlarged=False)
  found = gr.State()

  def draw(found, least):
    if not found:
      return {picture: None, words: ''}
    pixels, inputs, results = found
    numbers, objects = make(inputs, results, least)
    ending = '' if len(objects) == 1 else 's'
    return {
      picture: model.draw(pixels, numbers, objects),
      words: f'{len(objects)} {what}{ending} with a score of at least '
      f'{100 * least:g} %',
    }

  def show(photo, least):
    how = model.columns()
    ((_, inputs, results),) = model.stream([photo.path], compute, how.keep, how.parts)
    pixels = figures_drawing.enlarged(photo.pixels, overlays.LEAST)
    # Boxes and maps are made for the enlarged picture.
    inputs = {**inputs, 'size': np.array(pixels.shape[:2])}
    kept = pixels, inputs, results
    return {found: kept, **draw(kept, least)}

  threshold.change(draw, [found, threshold], [picture, words])
  result = show, [threshold], [found, picture, words]
  return result, (found, threshold), picture


def clicked(boxes, x: float, y: float) -> int | None:
  """Returns the number of the smallest box that contains a point, if any."""
  areas = {
    (x1 - x0) * (y1 - y0): number
    for number, (x0, y0, x1, y1) in enumerate(boxes)
    if x0 <= x <= x1 and y0 <= y <= y1
  }
  return areas[min(areas)] if areas else None
