"""Serves a web demo of a model, made with Gradio.

The page has a photo, examples, and what the predictor's `page` adds, such as the top
classes (vit_jax/tasks/classify.py). It needs no other machine, and uploads are
deleted. vit_jax/inference/guard.py decides which requests are answered.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import ctypes
import html
import io
import os
import pathlib
import socket
import tempfile
import threading
import time
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from PIL import Image

from vit_jax import console, preprocess
from vit_jax.data.images import (
  false_colours,
  formats,
  images as images_lib,
  multichannel,
  scaling,
)
from vit_jax.inference import guard, user_images

gr = console.require('gradio', 'demo', 'vit_jax demo')

LARGEST = 64 * 2**20  # Bytes of an upload, or of any other body.
_EXAMPLES = 6
_NOT_IN_BROWSERS = ('tiff', 'heif', 'jpeg2000')
_SIDE = 1024  # Longest side of a picture on the page, in pixels.
# Texts of a PNG. Each can take 8 kB and decompress to 8 MB, which the decoder reads.
_MOST_TEXTS = 20
_SMALL = 64  # Smaller images are shown without smoothing.
LIFETIME = 600  # Seconds until an upload is deleted.
_VISITORS = 16  # Sessions in memory, and length of the queue.
_ALL = '0.0.0.0'  # All addresses of this machine.
_FOLDER = 'GRADIO_TEMP_DIR'  # Names Gradio's folder of uploads.
_ENLARGED = 'enlarged'  # CSS class: the picture fills the component.
_STYLE = (
  f'.{_ENLARGED} .image-frame img '
  '{width: 100%; height: 22rem; object-fit: contain}'
  '#heading * {padding: 0}'
  # Warnings cover the photo, not the results: the left half of a wide screen. (Gradio
  # does not apply media queries to them.)
  '.toast-wrap {left: var(--size-3) !important; '
  'max-width: max(45vw, min(100vw, (768px - 100vw) * 99)) !important}'
  # On narrow screens, results come before the examples.
  '@media (max-width: 767px) {'
  '#columns {flex-flow: column nowrap; align-items: stretch}'
  '#photo {display: contents}'
  '#examples {order: 1}'
  '}'
)
_PIXELATED = 'img {image-rendering: pixelated}'


class Photo(NamedTuple):
  """A photo of a visitor."""

  path: str
  pixels: np.ndarray  # uint8 [H, W, 3], sides of at most 1,024 pixels.


def picture(label: str, enlarged: bool = True) -> Any:
  """Returns a picture for a predictor's `page`; clicks need `enlarged=False`."""
  classes = _ENLARGED if enlarged else None
  return gr.Image(
    label=label, format='png', interactive=False, elem_classes=classes, buttons=[]
  )


def check(host: str, port: int | None) -> None:
  """Raises ValueError if a server cannot listen there."""
  try:
    socket.create_server((host, port or 0)).close()
  except (OSError, OverflowError) as e:
    raise ValueError(
      f"host='{host}', port={port}: this machine cannot listen there "
      f'({getattr(e, "strerror", None) or e}): use another --host or --port'
    ) from None


def serve(
  model: Any, title: str, facts: Mapping[str, str], host: str, port: int
) -> None:
  """Serves the page until a signal ends it; see `served` for the arguments."""
  console.interrupt_on_signals()
  with contextlib.suppress(KeyboardInterrupt):
    with served(model, title, facts, host, port) as url:
      console.log(f'Serving the demo on {url} until you press Ctrl-C.')
      if not guard.is_loopback(host):
        console.log(
          'Everyone who can reach this machine can use it: there is no password.'
        )
      threading.Event().wait()


@contextlib.contextmanager
def served(
  model: Any,
  title: str,
  facts: Mapping[str, str],
  host: str = '127.0.0.1',
  port: int | None = None,
) -> Iterator[str]:
  """Serves the page of a Predictor inside a `with` block, and yields its URL.

  `facts` stand below the title, by name. The default port is the first free one from
  7860. Raises ValueError if the task has no page.
  """
  host = socket.gethostbyname(host)
  previous_folder = os.environ.get(_FOLDER)
  with tempfile.TemporaryDirectory(prefix='vit_jax_demo_') as folder:
    folder = os.environ[_FOLDER] = os.path.realpath(folder)
    try:
      examples = _write_examples(model.config, pathlib.Path(folder))
      page = _make_page(model, title, facts, folder, examples)
      page.queue(max_size=_VISITORS, api_open=False)
      small = min(model.task.image_size) < _SMALL
      _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        inline=False,
        share=False,
        max_file_size=LARGEST,
        state_session_capacity=_VISITORS,
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        footer_links=[],
        css=_STYLE + (_PIXELATED if small else ''),
        app_kwargs={'middleware': guard.middleware(page, folder, host, LARGEST)},
      )
      if host == _ALL:
        url = f'http://{_address()}:{page.server_port}/'
      try:
        with _sweeping(folder, examples):
          yield url
      finally:
        page.close(verbose=False)
    finally:
      del os.environ[_FOLDER]
      if previous_folder is not None:
        os.environ[_FOLDER] = previous_folder


def _address() -> str:
  """Returns the network address of this machine, or its name."""
  try:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
      # Selects a route; nothing is sent over UDP.
      probe.connect(('192.0.2.1', 9))
      return probe.getsockname()[0]
  except OSError:
    return socket.gethostname()


@contextlib.contextmanager
def _sweeping(folder: str, kept_paths: Sequence[str]) -> Iterator[None]:
  """Deletes old files, including incomplete uploads, which Gradio does not know."""
  done = threading.Event()

  def sweep() -> None:
    while not done.wait(LIFETIME / 10):
      _delete_old(folder, kept_paths)

  thread = threading.Thread(target=sweep, daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def _delete_old(folder: str, kept_paths: Sequence[str]) -> None:
  """Deletes the files that are older than `LIFETIME`, except some."""
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      if path in kept_paths:
        continue
      with contextlib.suppress(OSError):
        if time.time() - os.lstat(path).st_mtime > LIFETIME:
          os.remove(path)


def _make_page(
  model: Any, title: str, facts: Mapping[str, str], folder: str, examples: Sequence[str]
) -> Any:
  """Returns the page, a gradio.Blocks; `examples` are paths."""
  config = model.config
  has_channels = config.pp.range is not None
  description = ' · '.join(f'{k}: {v}' for k, v in facts.items())
  heading = f'<h1>{html.escape(title)}</h1>{html.escape(description)}'
  with gr.Blocks(title=title, analytics_enabled=False) as page:
    gr.HTML(heading, elem_id='heading')
    with gr.Row(elem_id='columns'):
      with gr.Column(elem_id='photo'):
        upload = _file_upload() if has_channels else _photo_upload()
        # A browser shows photos, but no other files.
        false_colour = picture('False colours') if has_channels else None
        example = gr.Examples(examples, upload, label='Examples', elem_id='examples')
      with gr.Column():
        show, inputs, outputs = model.page()
    all_outputs = [*outputs, false_colour] if has_channels else outputs

    def update(file: Any, *values: Any) -> dict:
      cleared = dict.fromkeys(all_outputs)
      if file is None:
        return cleared
      path = file.get('path', '') if isinstance(file, dict) else ''
      if not guard.is_inside(path, folder):
        gr.Warning('The photo was deleted: upload it again')
        return cleared
      try:
        photo = read_photo(path, config)
        pictures = {false_colour: photo.pixels} if has_channels else {}
        return {**cleared, **pictures, **show(photo, *values)}
      except (OSError, ValueError, OverflowError) as e:  # A typed number overflows.
        text = str(e).replace(path, pathlib.Path(path).name)
        gr.Warning(html.escape(text, quote=False))
        return cleared
      finally:
        _release_memory()

    uploaded = upload.upload if has_channels else upload.input
    for event in (uploaded, example.load_input_event.then):
      event(
        update,
        [upload, *inputs],
        all_outputs,
        preprocess=False,  # Gradio itself would decode files of any size.
        # One photo is in memory at a time.
        concurrency_limit=1,
        concurrency_id='photo',
      )
  with console.status('Compiling the model'):
    show(read_photo(examples[0], config), *(x.value for x in inputs))
  return page


def confidences(predictions: Iterable[tuple[str, float]]) -> dict[str, float]:
  """Returns (class, probability) pairs for gr.Label, which shows a name only once."""
  labels: dict[str, float] = {}
  counts: collections.Counter[str] = collections.Counter()
  for name, probability in predictions:
    counts[name] += 1
    unique = name if counts[name] == 1 else f'{name} ({counts[name]})'
    labels[unique] = probability
  return labels


def _photo_upload() -> Any:
  return gr.Image(
    label='Photo', sources=['upload', 'clipboard'], elem_classes=_ENLARGED, buttons=[]
  )


def _file_upload() -> Any:
  endings = [*formats.endings(), multichannel.NPY_ENDING]
  return gr.File(label='Image', file_types=endings)


def read_photo(path: str, config: ml_collections.ConfigDict) -> Photo:
  """Reads an image as the page shows it; `config` is the config of the model."""
  pp = config.pp

  def decode(encoded: bytes) -> np.ndarray:
    if pp.range is None:
      return decode_for_page(encoded).numpy()
    _check_texts(encoded)
    scaled = scaling.decode(encoded, pp).numpy()
    visible = false_colours.of_scaled(scaled, pp)
    pixels = ((visible + 1) * 127.5).round().astype(np.uint8)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))

  pixels = preprocess.from_user(path, decode, config.max_image_pixels)
  image = Image.fromarray(pixels)
  image.thumbnail((_SIDE, _SIDE))
  return Photo(path, np.asarray(image))


def _release_memory() -> None:
  """Returns to the system what glibc keeps of freed memory: 0.4 GB after large photos."""
  trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
  if trim:
    trim(0)


def decode_for_page(encoded: bytes) -> Any:
  """Decodes an image; a JPEG with fewer pixels if it is larger than `_SIDE`."""
  _check_texts(encoded)
  short, long = sorted(images_lib.shape_of(encoded).numpy().tolist())
  side = max(1, -(-_SIDE * short // max(1, long)))
  return images_lib.decode(encoded, size=(side, side))


def _check_texts(encoded: bytes) -> None:
  texts = encoded.count(b'zTXt') + encoded.count(b'iTXt')
  if texts > _MOST_TEXTS and not multichannel.is_array(encoded):
    raise ValueError(f'it has {texts} texts, more than {_MOST_TEXTS}: remove them')


def _write_examples(
  config: ml_collections.ConfigDict, folder: pathlib.Path
) -> list[str]:
  """Writes images of the test split, or photos; returns their paths."""
  source = user_images.examples(config, _EXAMPLES)
  paths = []
  for number in range(source.num_examples):
    encoded = source.read(source.record(number))['image'].numpy()
    if multichannel.is_array(encoded):
      ending = 'npy' if encoded.startswith(multichannel.NPY) else 'tiff'
    else:
      with Image.open(io.BytesIO(encoded)) as image:
        ending = image.format.lower()
    if ending in _NOT_IN_BROWSERS and config.pp.range is None:
      encoded = images_lib.encode_png(images_lib.decode(encoded).numpy())
      ending = 'png'
    name = f'example_{number + 1}.{ending}'
    paths.append(str(folder / name))
    pathlib.Path(paths[-1]).write_bytes(encoded)
  return paths
