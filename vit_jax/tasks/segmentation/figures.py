"""Draws images with their classes, for TensorBoard and `vit_jax visualize`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.figures import drawing, gallery, grids, overlays
from vit_jax.tasks.segmentation import predicting

_MOST = 24  # Classes of a legend.
_LETTERS_PER_INCH = 8.5  # In a title.
_ERROR = np.array([255, 0, 0])  # Colour of pixels of a wrong class.


@drawing.styled
def class_maps(
  images: np.ndarray,
  maps: Mapping[str, np.ndarray],
  names: Sequence[str],
  class_names: Sequence[str],
  tints: np.ndarray,
) -> Any:
  """Draws images, and below them maps over them, with a legend of the classes.

  If there are `true` and `predicted` classes, the last row shows the pixels that differ.

  Args:
    images: float32 [B, H, W, C] in [-1, 1].
    maps: class of each pixel, int [B, H, W], negative for none, by title.
    names: names of the images.
    class_names: names of the C classes.
    tints: their colours, uint8 [C, 3].
  """
  from matplotlib import patches

  colours = tints / 255
  pixels = drawing.as_pixels(images)
  factor = pixels.shape[1] // images.shape[1]
  rows = {'images': pixels}
  for title, classes in maps.items():
    rows[title] = _tinted(pixels, _enlarged(classes, factor), colours)
  if {'true', 'predicted'} <= maps.keys():
    is_wrong = (maps['true'] >= 0) & (maps['true'] != maps['predicted'])
    errors = np.where(is_wrong, 0, -1)
    rows['errors'] = _tinted(
      _grey(pixels), _enlarged(errors, factor), _ERROR[None] / 255
    )
  pictures = np.stack(list(rows.values()))
  ratio = pictures.shape[2] / pictures.shape[3]
  cell = min(11.2 / len(names), 2.2 / ratio)
  fig = drawing.new_figure(1.6 + len(rows) * cell * 1.07 * ratio, 'Classes of pixels')
  letters = max(5, int(_LETTERS_PER_INCH * cell))
  labels = [drawing.shorten(name, letters) for name in names]
  drawing.show_tiles(fig.subplots(), pictures, labels, list(rows))
  values = np.concatenate([x.ravel() for x in maps.values()])
  counts = np.bincount(values[values >= 0], minlength=len(class_names))
  handles = []
  for number in np.argsort(-counts, kind='stable')[:_MOST]:
    if counts[number]:
      name = drawing.shorten(class_names[number])
      handles.append(patches.Patch(color=colours[number], label=name))
  fig.legend(handles=handles, loc='outside lower center', ncols=6, frameon=False)
  return fig


def _enlarged(maps: np.ndarray, factor: int) -> np.ndarray:
  return np.asarray(maps).repeat(factor, axis=1).repeat(factor, axis=2)


def _tinted(pixels: np.ndarray, maps: np.ndarray, colours: np.ndarray) -> np.ndarray:
  """Draws pixels [B, H, W, 3] in [0, 1] in shades of the colours of their classes."""
  shades = (_grey(pixels) + colours[np.maximum(maps, 0)]) / 2
  return np.where(maps[..., None] >= 0, shades, pixels)


def _grey(pixels: np.ndarray) -> np.ndarray:
  return pixels.mean(axis=-1, keepdims=True).astype(pixels.dtype).repeat(3, axis=-1)


def side_by_side(
  images: np.ndarray, maps: Sequence[np.ndarray], task: Any
) -> np.ndarray:
  """Draws images next to their classes, or to true and predicted ones and the errors.

  Args:
    images: uint8 [B, H, W, 3].
    maps: one map, or the true and the predicted one: classes of pixels, int [B, H, W],
      negative for none.
    task: a segment_semantic.Task.

  Returns:
    A picture with a row per image, uint8 [height, width, 3].
  """
  titles = ['image', 'classes']
  if len(maps) == 2:
    titles += ['predicted', 'errors']
  tints = predicting.tints(task)
  pictures = []
  for i, image in enumerate(images):
    blank = np.zeros(image.shape[:2], int)
    pictures.append(overlays.overlay(image, blank, ()))
    for class_map in maps:
      numbers = class_map[i] + 1
      pictures.append(overlays.overlay(image, numbers, task.class_names, tints))
    if len(maps) == 2:
      true, predicted = maps[0][i], maps[1][i]
      is_wrong = (true >= 0) & (true != predicted)
      pictures.append(
        overlays.overlay(_grey(image), is_wrong.astype(int), [''], _ERROR[None])
      )
  return grids.grid(np.stack(pictures), (), len(titles), titles, grids.MOST)


def _draw(subject: Any) -> list[Any]:
  """Draws the images of a figures.results.Subject."""
  model, batch = subject.model, subject.batch
  predicted = jax.jit(model.task.drawn_outputs)(model.params, model.extra, batch)
  maps = {'predicted': np.asarray(predicted)}
  if 'segmentation' in batch:
    maps = {'true': np.asarray(batch['segmentation']), **maps}
  figures = []
  for page in gallery.pages(subject):
    maps_of_page = {title: x[page] for title, x in maps.items()}
    figures.append(
      class_maps(
        subject.pictures[page],
        maps_of_page,
        subject.names[page],
        model.class_names,
        predicting.tints(model.task),
      )
    )
  return figures


FIGURES = (
  gallery.Entry(
    'segmentation',
    'Classes of pixels',
    'The class of each pixel over the images. Images of a split also have their true '
    'classes, and the pixels of another class in red on grey. The images have the size of the '
    "model's input.",
    'the test split of the run, the one that --split names, or --images',
    gallery.needs_images,
    _draw,
  ),
)
