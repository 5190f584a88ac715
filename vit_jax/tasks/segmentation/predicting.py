"""Predicts the class of each pixel of any images; see `Predictor`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import html
import io
import json
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import preprocess
from vit_jax.data.images import image_files, images as images_lib
from vit_jax.distributed import files
from vit_jax.figures import colors, overlays
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.tasks import predict_flags
from vit_jax.tasks.segmentation import class_maps

_SHOWN = 5  # Classes of an image that are printed.
_RECORD = '.masks.json'  # Hashes of the model of a folder of masks.
_CHUNK = 64  # Images whose maps are in memory at the same time.
FLAGS = predict_flags.SEMANTIC.FLAGS


def tints(task: Any) -> np.ndarray:
  """Returns the colours of the classes of a segment_semantic.Task, uint8 [C, 3]."""
  rows = []
  for number, x in enumerate(task.classes, start=1):
    rows.append(x.color or colors.of_class(number % 256))
  return np.array(rows, np.uint8)


def encode(class_map: np.ndarray, ids: Sequence[int], tints: np.ndarray) -> bytes:
  """Returns a mask as PNG, whose pixels are the numbers of their classes in the data.

  It has a palette, or 16 bits of grey if a number is above 255.

  Args:
    class_map: int [H, W], from 0 to C - 1.
    ids: numbers of the C classes.
    tints: colours, uint8 [C, 3].
  """
  numbers = np.array(ids)[class_map]
  file = io.BytesIO()
  if max(ids) > 255:
    Image.fromarray(numbers.astype(np.uint16)).save(file, 'PNG')
    return file.getvalue()
  palette = np.zeros((256, 3), np.uint8)
  palette[list(ids)] = tints
  image = Image.fromarray(numbers.astype(np.uint8), 'P')
  image.putpalette(palette.tobytes())
  image.save(file, 'PNG')
  return file.getvalue()


class Predictor(predictor_lib.Predictor):
  """Finds the class of each pixel of images."""

  BATCH = 8

  def segment(self, images: Sequence[Any]) -> list[np.ndarray]:
    """Returns the class of each pixel, int [height, width] of each image, upright.

    Classes are numbered in the order of `class_names`. For images and errors see
    `outputs`.
    """
    maps = {}
    columns = self._columns()
    for number, inputs, outputs in self.stream(
      images, columns.compute, columns.keep, columns.parts
    ):
      maps[number] = _without_padding(inputs, outputs)
    return [maps[number] for number in range(len(images))]

  @functools.cached_property
  def _class_maps(self) -> Callable[..., dict[str, jax.Array]]:
    task = self.task
    dtype = jnp.uint8 if len(task.classes) <= 256 else jnp.uint16

    def compute(
      params: Any, extra: Any, batch: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
      outputs = task.view_outputs(params, extra, batch)
      canvas = batch['canvas'].shape[1:]
      maps = class_maps.class_maps(task.head, outputs, batch['size'], canvas)
      # The greatest output tells whether outputs are finite.
      leaves = jax.tree.leaves([x.outputs for x in outputs])
      greatest = [x.reshape(len(x), -1).max(axis=1) for x in leaves]
      return {'classes': maps.astype(dtype), 'greatest': jnp.stack(greatest, axis=1)}

    return jax.jit(compute)

  def predict(self, images: Sequence[Any], **options: Any) -> list[np.ndarray]:
    """Returns what `segment` does."""
    self._refuse(options)
    return self.segment(images)

  def shares(self, class_map: np.ndarray) -> list[tuple[str, float]]:
    """Returns name and share of the pixels of the classes of a map, the largest first."""
    counts = np.bincount(class_map.ravel(), minlength=len(self.class_names))
    rows = []
    for number in np.argsort(-counts, kind='stable'):
      if counts[number]:
        rows.append((self.class_names[number], float(counts[number] / class_map.size)))
    return rows

  def _columns(self) -> tables.Columns:
    def row(inputs: dict[str, np.ndarray], outputs: Any) -> dict[str, Any]:
      names, shares = zip(*self.shares(_without_padding(inputs, outputs)))
      return {'classes': names, 'shares': shares}

    return tables.Columns(
      {'classes': [str], 'shares': [float]},
      row,
      self._class_maps,
      keep=('size',),
      parts=self.task.parts_to_predict,
    )

  def report(
    self,
    images: Sequence[str],
    *,
    out: epath.PathLike | None = None,
    masks: str | None = None,
  ) -> Iterable[str]:
    """Yields the shares of the largest classes of each image.

    Writes overlays to a picture `out`, and masks to a folder; a mask that exists stays, and
    its image is only computed for `out`. Raises ValueError if two images have the same name,
    if the mask of an image would have its path, or if the folder has masks of another model.
    """
    mask_paths: dict[str, str] = {}
    if masks is not None:
      mask_paths = _mask_paths(images, masks)
      _make_folder(masks)
      self._claim_folder(masks, mask_paths)
    pictures = []
    for path, class_map in self._maps(images, mask_paths, resume=out is None):
      if class_map is None:
        yield f'{path}\n  {_existing(mask_paths[path])}'
        continue
      lines = [path]
      for name, share in self.shares(class_map)[:_SHOWN]:
        lines.append(f'  {100 * share:6.2f} %  {name}')
      if masks is not None:
        lines.append(f'  {self._write_mask(class_map, mask_paths[path], masks)}')
      if out is not None:
        image = preprocess.from_user(path, images_lib.decode).numpy()
        pictures.append(self.draw(image, class_map))
      yield '\n'.join(lines)
    if out is not None:
      overlays.save(pictures, out)
      yield f'picture: {out}'

  def _claim_folder(self, masks: str, mask_paths: dict[str, str]) -> None:
    """Records the model in the folder; ValueError if its masks are of another one."""
    facts = tables.model_facts(self)
    record = epath.Path(masks) / _RECORD
    if record.exists():
      stored = _read_record(record)
      differing = [key for key, value in facts.items() if stored.get(key) != value]
      if differing:
        raise ValueError(
          f"masks='{masks}' has masks of other {', '.join(differing)}: delete them with "
          f"'{record}', or pass another folder (--masks)"
        )
      return
    for path in mask_paths.values():
      if epath.Path(path).exists():
        raise ValueError(
          f"masks='{masks}' has no '{_RECORD}' that says which model '{path}' is of: "
          'pass another folder (--masks)'
        )
    with files.naming_output(masks, 'masks'):
      files.write(record, json.dumps(facts, indent=1))

  def _write_mask(self, class_map: np.ndarray, path: str, folder: str) -> str:
    """Writes a mask unless it exists; returns what was done."""
    if epath.Path(path).exists():
      return _existing(path)
    with files.naming_output(folder, 'masks'):
      files.write(epath.Path(path), self.encode(class_map))
    return f'mask: {path}'

  def _maps(
    self, images: Sequence[str], mask_paths: dict[str, str], resume: bool
  ) -> Iterator[tuple[str, np.ndarray | None]]:
    """Yields images in order with their maps; to `resume`, None where a mask exists."""
    for start in range(0, len(images), _CHUNK):
      chunk = images[start : start + _CHUNK]
      remaining = chunk
      if resume and mask_paths:
        remaining = [x for x in chunk if not epath.Path(mask_paths[x]).exists()]
      maps = dict(zip(remaining, self.segment(remaining)))
      for path in chunk:
        yield path, maps.get(path)

  def encode(self, class_map: np.ndarray) -> bytes:
    """Returns the result of `segment` for an image as a mask, see `encode`."""
    return encode(class_map, self.task.ids, tints(self.task))

  def draw(self, image: np.ndarray, class_map: np.ndarray) -> np.ndarray:
    """Colours the classes of an image, uint8 [H, W, 3]."""
    return overlays.overlay(image, class_map + 1, self.class_names, tints(self.task))

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows an image with its classes, and a legend with their colours and shares."""
    import gradio as gr

    from vit_jax.inference import demo

    picture = demo.picture('Classes', enlarged=False)
    legend = gr.HTML(label='Legend')

    def show(photo: Any) -> dict:
      if self._is_mask(photo.path):
        raise ValueError(
          f"'{photo.path}' is a mask, whose pixels are numbers of classes: upload the photo"
        )
      [class_map] = self.segment([photo.pixels])
      return {
        picture: self.draw(photo.pixels, class_map),
        legend: self.legend(class_map),
      }

    return show, [], [picture, legend]

  def legend(self, class_map: np.ndarray) -> str:
    """Returns colour, name and share of the classes of a map as HTML."""
    tint_of_name = dict(zip(self.class_names, tints(self.task).tolist()))
    rows = []
    for name, share in self.shares(class_map):
      color = '#{:02x}{:02x}{:02x}'.format(*tint_of_name[name])
      rows.append(
        f'<tr><td><span style="color:{color}">&#9632;</span></td>'
        f'<td>{html.escape(name)}</td><td>{100 * share:.2f} %</td></tr>'
      )
    return f'<table>{"".join(rows)}</table>'

  def _is_mask(self, path: str) -> bool:
    """Returns whether an image has a palette or grey values, all numbers of classes."""
    encoded = image_files.read_file(path)
    try:
      mode = images_lib.from_pillow(encoded, lambda image: image.mode)
      if mode != 'P' and not mode.startswith(('L', 'I')):
        return False
      self.task.read_mask(encoded)
    except images_lib.decode_errors():
      return False
    return True


def _without_padding(inputs: dict[str, np.ndarray], outputs: Any) -> np.ndarray:
  """Returns the map of an image without the rest of its canvas, int [H, W]."""
  height, width = inputs['size']
  return outputs['classes'][:height, :width].astype(np.int32)


def _read_record(record: epath.Path) -> dict[str, str]:
  """Returns the hashes in a record, none if it is damaged."""
  with contextlib.suppress(ValueError):
    stored = files.read_json(record)
    if isinstance(stored, dict):
      return stored
  return {}


def _existing(path: str) -> str:
  return f"mask exists: '{path}'; to compute it again, delete it"


def _make_folder(masks: str) -> None:
  """Makes the folder of masks; ValueError if it is a file, or has no name."""
  if not masks:
    raise ValueError("masks='' is empty: pass a folder (--masks)")
  folder = epath.Path(masks)
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"masks='{masks}' is a file: pass a folder (--masks)")
  with files.naming_output(masks, 'masks'):
    folder.mkdir(parents=True, exist_ok=True)


def _mask_paths(images: Sequence[str], folder: str) -> dict[str, str]:
  """Returns the path of the mask of each image.

  ValueError if two have the same, or a mask that of an image.
  """
  paths: dict[str, str] = {}
  image_of: dict[str, str] = {}
  for image in images:
    name = os.path.splitext(os.path.basename(image))[0] + '.png'
    if image_of.setdefault(name, image) != image:
      raise ValueError(
        f"'{image_of[name]}' and '{image}' would have the same mask, '{folder}/{name}': "
        'predict them into two folders (--masks)'
      )
    paths[image] = os.path.join(folder, name)
  files_of_images = {os.path.realpath(image) for image in images}
  for image, path in paths.items():
    if os.path.realpath(path) in files_of_images:
      raise ValueError(
        f"masks='{folder}' is the folder of the images, and the mask of '{image}' would have "
        f"the path of '{path}': pass another folder (--masks)"
      )
  return paths
