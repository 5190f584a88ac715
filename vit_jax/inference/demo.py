"""Shows what a model makes of photographs, on a page that this machine serves.

The page has the photograph, examples, and what `page` of the model's predictor
adds, such as the classes (vit_jax/tasks/classify.py). Gradio makes the page. It
asks no other machine for anything, and what visitors upload is deleted.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import html
import io
import os
import pathlib
import signal
import socket
import tempfile
import threading
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax import cli
from vit_jax import preprocess
from vit_jax.data.images import images as images_lib
from vit_jax.inference import given

gr = cli.needed('gradio', 'demo', 'the page of vit_jax demo')

LARGEST = '64mb'  # File that is taken.
_EXAMPLES = 6
_SIDE = 1024  # Most pixels of a side of a picture on the page.
_SMALL = 64  # Images with shorter sides are shown without smoothing.
_KEPT = 600  # Seconds until an upload is deleted, while the page is served.
_VISITORS = 16  # Whose results are in memory; and most of those who wait.
_AT_ONCE = 2  # Photographs.
_FOLDER = 'GRADIO_TEMP_DIR'  # Gradio reads the folder of uploads here.
_ENLARGED = 'enlarged'  # Class of components whose picture fills them.
_STYLE = (
  f'.{_ENLARGED} .image-frame img '
  '{width: 100%; height: 22rem; object-fit: contain}'
)
_PIXELATED = 'img {image-rendering: pixelated}'


class Photo(NamedTuple):
  """What a visitor shows to the model."""

  path: str
  pixels: np.ndarray  # uint8 [H, W, 3], reduced to 1,024 pixels a side.


def picture(label: str, enlarged: bool = True):
  """Makes a component that shows a picture, for `page` of a predictor.

  Gradio tells rightly where a picture is clicked if it is not `enlarged`.
  """
  classes = _ENLARGED if enlarged else None
  return gr.Image(
    label=label,
    format='png',
    interactive=False,
    elem_classes=classes,
    buttons=[],
  )


def check(host: str, port: int | None):
  """Raises ValueError if a server cannot listen there."""
  try:
    socket.create_server((host, port or 0)).close()
  except (OSError, OverflowError) as e:
    raise ValueError(
      f"host='{host}', port={port}: this machine cannot listen there "
      f'({getattr(e, "strerror", None) or e}): give another --host or --port'
    ) from None


def serve(model, title: str, facts: Mapping[str, str], host: str, port: int):
  """Serves the page until Ctrl-C or SIGTERM; for the arguments see `served`."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with contextlib.suppress(KeyboardInterrupt):
    with served(model, title, facts, host, port) as url:
      cli.say(f'The model is shown on {url} until you press Ctrl-C.')
      threading.Event().wait()


@contextlib.contextmanager
def served(
  model,
  title: str,
  facts: Mapping[str, str],
  host: str = '127.0.0.1',
  port: int | None = None,
) -> Iterator[str]:
  """Serves the page of a model inside a `with` block, one page a process.

  Args:
    model: a vit_jax.inference.predictor.Predictor.
    title: heading of the page.
    facts: about the model, by name.
    host: address to listen on.
    port: port to listen on; None: the first free one from 7860.

  Yields:
    The address of the page.

  Raises:
    ValueError: if there is nothing to show of the model.
  """
  before = os.environ.get(_FOLDER)
  with tempfile.TemporaryDirectory(prefix='vit_jax_demo_') as folder:
    os.environ[_FOLDER] = folder
    try:
      page = _make_page(model, title, facts, pathlib.Path(folder))
      page.queue(
        default_concurrency_limit=_AT_ONCE, max_size=_VISITORS, api_open=False
      )
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
      )
      try:
        yield url
      finally:
        page.close(verbose=False)
    finally:
      del os.environ[_FOLDER]
      if before is not None:
        os.environ[_FOLDER] = before


def _make_page(model, title, facts, folder):
  """Returns the page, a gradio.Blocks; examples are written to the folder."""
  limit = model.config.max_image_pixels
  examples = _write_examples(model.config, folder)
  words = ' · '.join(f'{k}: {v}' for k, v in facts.items())
  with gr.Blocks(
    title=title, analytics_enabled=False, delete_cache=(_KEPT / 10, _KEPT)
  ) as page:
    gr.Markdown(f'# {html.escape(title)}\n{html.escape(words)}')
    with gr.Row():
      with gr.Column():
        upload = gr.Image(
          label='Photograph',
          sources=['upload', 'clipboard'],
          elem_classes=_ENLARGED,
          buttons=[],
        )
        chosen = gr.Examples(examples, upload, label='Examples')
      with gr.Column():
        show, inputs, outputs = model.page()

    def changed(file, *values):
      found = dict.fromkeys(outputs)
      if file is None:
        return found
      path = file['path']
      try:
        return {**found, **show(_read(path, limit), *values)}
      except (OSError, ValueError) as e:
        text = str(e).replace(path, pathlib.Path(path).name)
        gr.Warning(html.escape(text, quote=False), duration=None)
        return found

    for event in (upload.input, chosen.load_input_event.then):
      # Gradio would decode the file itself, whatever its size.
      event(changed, [upload, *inputs], outputs, preprocess=False)
  with cli.waiting('Compiling the model'):
    show(_read(examples[0], limit), *(x.value for x in inputs))
  return page


def _read(path, max_pixels) -> Photo:
  pixels = preprocess.from_user(path, images_lib.decode, max_pixels).numpy()
  image = Image.fromarray(pixels)
  image.thumbnail((_SIDE, _SIDE))
  return Photo(path, np.asarray(image))


def _write_examples(config, folder) -> list[str]:
  """Writes images of the test split, or photographs; returns their paths."""
  source, _ = given.sample(config, _EXAMPLES)
  paths = []
  for number in range(source.num_examples):
    encoded = source.read(source.record(number))['image'].numpy()
    with Image.open(io.BytesIO(encoded)) as image:
      name = f'example_{number + 1}.{image.format.lower()}'
    paths.append(str(folder / name))
    pathlib.Path(paths[-1]).write_bytes(encoded)
  return paths
