"""Tests of the page that shows a model, in Chromium."""

import contextlib
import io
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time
import types

import gradio
import httpx
import jax
import numpy as np
from PIL import Image
from playwright import sync_api
import pytest

from tests import conftest
from tests import visualize_test
from tests.inference import export_test
from vit_jax import predict
from vit_jax.commands import demo as command
from vit_jax.commands import visualize as visualize_command
from vit_jax.inference import demo
from vit_jax.inference import given
from vit_jax.inference import predictor
from vit_jax.tasks import classify
from vit_jax.tasks.detection import looking
from vit_jax.tasks.detection import page as page_lib

NAMES = ['ant', 'bee', '<cow>']
_CHROMIUM = ('chromium', 'chromium-browser', 'google-chrome')
_ARGS = (
  '--headless', '--no-sandbox', '--disable-gpu', '--no-first-run',
  '--disable-background-networking', '--disable-component-update',
  '--disable-sync', '--disable-quic',
)  # fmt: skip


@pytest.fixture(scope='module')
def browser():
  paths = list(filter(None, map(shutil.which, _CHROMIUM)))
  if not paths:
    pytest.skip(f'no browser is installed: none of {", ".join(_CHROMIUM)}')
  with sync_api.sync_playwright() as playwright:
    launched = playwright.chromium.launch(executable_path=paths[0], args=_ARGS)
    yield launched
    launched.close()


@contextlib.contextmanager
def visit(browser, url):
  """Opens a page as a new visitor; it must be right, and ask nobody else."""
  context = browser.new_context()
  page, wrong = context.new_page(), []
  page.on('console', lambda m: m.type == 'error' and wrong.append(m.text))
  page.on('pageerror', lambda error: wrong.append(str(error)))
  page.on('request', lambda r: wrong.append(r.url) if '//' in r.url and not r.url.removeprefix('blob:').startswith(url) else None)  # fmt: skip
  page.goto(url)
  yield page
  context.close()
  assert not wrong


def upload(page, path):
  page.locator('input[type=file]').set_input_files(path)


def best(page):
  """The most probable class that the page shows."""
  return page.get_by_test_id('label-output-value')


def expect_shares(page, classes, **kwargs):
  """Waits until the page shows the result of `predict` for an image."""
  sync_api.expect(best(page)).to_have_text(classes[0][0], **kwargs)
  for name, probability in classes:
    row = page.get_by_test_id(f'{name}-confidence-set')
    sync_api.expect(row).to_contain_text(f'{100 * probability:.0f}%', **kwargs)


def width_of(picture):
  """The width in pixels of the file of a picture that a page shows."""
  return picture.evaluate('async x => (await x.decode(), x).naturalWidth')


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
  """Images of noise: their paths."""
  folder, rng = tmp_path_factory.mktemp('photos'), np.random.RandomState(0)
  paths = [folder / f'{number}.png' for number in range(20)]
  for path in paths:
    pixels = rng.randint(0, 256, (30, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path)
  return paths


@pytest.fixture(scope='module')
def workdir(image_folder, tmp_path_factory):
  """A run of a classifier with random parameters."""
  config = visualize_test.tiny_config(image_folder)
  metadata = {'class_names': NAMES}
  params = visualize_test.random_numbers(classify.Task(config, metadata))
  workdir = tmp_path_factory.mktemp('run')
  return conftest.write_run(workdir, config, metadata, params)


@pytest.fixture(scope='module')
def model(workdir):
  return predict.load(str(workdir))


@pytest.fixture(scope='module')
def url(model):
  """The page of the classifier."""
  with demo.served(model, 'A <model>', {'classes': '3'}) as url:
    yield url


def test_a_photograph_and_an_example_are_classified(
  browser, url, model, photos, image_folder
):
  with visit(browser, url) as page:
    sync_api.expect(page.locator('h1')).to_have_text('A <model>')
    upload(page, photos[0])
    expect_shares(page, *model.predict([str(photos[0])]))
    rollout = page.locator('.image-frame img').nth(1)
    assert (
      width_of(rollout) == 50 * 5
    )  # The lower side, 30, is enlarged to 128 or more.
    page.locator('.gallery-item').first.click()
    first = given.sample(model.config, 1)[0].name(0)
    assert first.startswith(f'{image_folder}/test/')
    expect_shares(page, *model.predict([first]))
    page.get_by_label('Remove Image').click()
    sync_api.expect(best(page)).to_have_count(0)


def test_what_is_wrong_with_a_file_stands_on_the_page(
  browser, url, model, photos, tmp_path
):
  broken = tmp_path / 'my photo.jpg'
  broken.write_bytes(b'no image')
  large = tmp_path / 'large.png'
  Image.new('L', (9_500, 9_500)).save(large)
  assert model.config.max_image_pixels < 9_500**2
  with visit(browser, url) as page:
    toast = page.locator('.toast-body')
    upload(page, photos[0])
    best(page).wait_for()
    for path, text in (
      (broken, "'my photo.jpg' is not an image that can be read"),
      (large, "'large.png' is not an image that can be read (jpeg, png, webp, bmp, gif): it has 9500 x 9500 pixels, more than max_image_pixels=89478485"),
    ):  # fmt: skip
      upload(page, path)
      sync_api.expect(toast).to_contain_text(text)
      assert '/' not in toast.inner_text()  # A folder of this machine.
      sync_api.expect(best(page)).to_have_count(0)
      toast.get_by_role('button').last.click()
    upload(page, photos[0])
    best(page).wait_for()


def test_two_visitors_at_once(browser, url, model, photos, monkeypatch):
  """Both are served at the same time, or the barrier breaks."""
  paths = [*map(str, photos)]
  found = model.predict(paths)
  # Two that are told apart by what the page shows.
  one, other = (
    0,
    next(
      i for i, x in enumerate(found) if abs(x[0][1] - found[0][0][1]) > 0.02
    ),
  )
  barrier, read = threading.Barrier(2, timeout=60), demo._read

  def together(*args):
    barrier.wait()
    return read(*args)

  monkeypatch.setattr(demo, '_read', together)
  with visit(browser, url) as page, visit(browser, url) as another:
    upload(page, paths[one])
    upload(another, paths[other])
    expect_shares(page, found[one], timeout=60_000)
    expect_shares(another, found[other], timeout=60_000)
  assert not barrier.broken


def test_the_page_of_visualize(browser, workdir, photos, tmp_path):
  out = tmp_path / 'figures'
  visualize_command.main(
    [
      f'--workdir={workdir}', f'--out={out}', '--images', str(photos[0]),
      '--figures', 'filters', 'attention_rollout',
    ]
  )  # fmt: skip
  with visit(browser, (out / 'index.html').as_uri()) as page:
    sync_api.expect(page.locator('h2')).to_have_count(2)
    for picture in page.locator('img').all():
      assert picture.evaluate('x => x.naturalWidth') > 400


@pytest.fixture(scope='module')
def detector():
  """A narrow detector on canvases whose queries differ."""
  sides = dict(sides=(96, 128), eval_side=128, longest_side=192)
  task = export_test.make_detector(**sides)
  params, extra = export_test.randomised(task)
  params['query_embedding'] *= 10
  attention = params['decoder_layer_0']['cross_attention']
  for name in ('query', 'key', 'value', 'out'):
    attention[name]['kernel'] *= 6
  return task.predictor(params, extra, 1)


def green(picture):
  """How green each pixel is: of viridis, more for larger values."""
  red, middle, blue = np.moveaxis(np.asarray(picture, np.float32), -1, 0)
  return middle - (red + blue) / 2


def test_boxes_above_a_score_and_attention_of_one(browser, detector, photos):
  path, count = str(photos[0]), 4
  [objects] = detector.detect([path], threshold=0.0)
  scores = [score for _, score, _ in objects]
  least = np.ceil(100 * scores[count]) / 100
  assert scores[count - 1] > least > 0.05
  parts = detector.columns().parts
  ((_, inputs, _),) = detector.stream(
    [path], lambda *_: (), detector.task.input_spec(), parts
  )
  batch = jax.tree.map(lambda x: x[None], inputs)
  seen = looking.look(detector.task, detector.params, detector.extra, batch)
  areas = [(x1 - x0) * (y1 - y0) for *_, (x0, y0, x1, y1) in objects[:count]]
  number = int(np.argmin(areas))
  query = np.argsort(-seen.scores[0])[number]
  (x0, y0, x1, y1), times = objects[number][-1], 9  # Of 30 x 50 pixels.
  with (
    demo.served(detector, 'A detector', {}) as url,
    visit(browser, url) as page,
  ):
    upload(page, path)
    words = page.get_by_text('with a score of at least')
    sync_api.expect(words).to_contain_text('at least 70 %')
    field = page.get_by_role('spinbutton')
    for value, found in ((0, 8), (0.99, 0), (least, count)):
      field.fill(f'{value:g}')
      field.press('Enter')
      text = f'{found} objects with a score of at least {100 * value:g} %'
      sync_api.expect(words).to_have_text(text)
    picture = page.locator('.image-frame img').nth(1)
    assert width_of(picture) == 50 * times
    shown = picture.bounding_box()['width'] / 50  # Pixels of the screen.
    picture.click(position={'x': 1, 'y': 1})
    expect = sync_api.expect(page.locator('.toast-body'))
    expect.to_contain_text('Click inside of a box')
    place = {'x': (x0 + x1) / 2 * shown, 'y': (y0 + y1) / 2 * shown}
    picture.click(position=place)
    attention = page.locator('.image-frame img').nth(2)
    content = page.request.get(attention.get_attribute('src')).body()
    drawn = Image.open(io.BytesIO(content)).convert('RGB')
    assert drawn.size == (50 * times, 30 * times)
  down, across = seen.filled[0] * seen.decoder.shape[2:]
  maps = [
    np.asarray(Image.fromarray(x).resize(drawn.size, 2, (0, 0, across, down)))
    for x in seen.decoder[0]
  ]
  likeness = [np.corrcoef(green(drawn).ravel(), x.ravel())[0, 1] for x in maps]
  assert np.argmax(likeness) == query
  assert likeness[query] > 0.7


def test_the_smallest_box_is_the_one_that_is_clicked():
  boxes = [(0, 0, 10, 10), (2, 2, 6, 8), (5, 5, 20, 20)]
  assert page_lib.clicked(boxes, 3, 3) == 1
  assert page_lib.clicked(boxes, 8, 8) == 0
  assert page_lib.clicked(boxes, 12, 20) == 2
  assert page_lib.clicked(boxes, 12, 2) is None
  assert page_lib.clicked([], 1, 1) is None


def free_port():
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


@pytest.fixture
def _own_signals():
  before = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures('_own_signals')
def test_the_command_serves_this_machine_and_keeps_nothing(
  workdir, monkeypatch
):
  port, folders = free_port(), []
  url = f'http://127.0.0.1:{port}'

  class Event:
    """What the command waits for; here the visit of a program."""

    def wait(self):
      folders.append(pathlib.Path(os.environ['GRADIO_TEMP_DIR']))
      assert httpx.get(url).status_code == 200
      with pytest.raises(OSError, match='refused'):
        socket.create_connection(('127.0.0.2', port))

      def send(size):
        return httpx.post(
          f'{url}/gradio_api/upload', files={'files': ('a.png', bytes(size))}
        )

      assert send(2_001).status_code == 413
      [path] = send(2_000).json()
      path = pathlib.Path(path)
      assert path.is_relative_to(folders[0])
      deadline = time.monotonic() + 30
      while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(demo, 'threading', types.SimpleNamespace(Event=Event))
  monkeypatch.setattr(demo, 'LARGEST', 2_000)
  monkeypatch.setattr(demo, '_KEPT', 0.5)
  monkeypatch.setenv('GRADIO_TEMP_DIR', '/tmp/of_the_user')
  # Not capsys: where sys.stderr is another one, the server's logging closes the
  # one of before, which is pytest's.
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    assert command.main([f'--workdir={workdir}', f'--port={port}']) == 0
  assert f'shown on {url}/ until you press Ctrl-C' in output.getvalue()
  assert not folders[0].exists()
  assert os.environ['GRADIO_TEMP_DIR'] == '/tmp/of_the_user'
  with pytest.raises(OSError, match='refused'):
    socket.create_connection(('127.0.0.1', port))


def test_an_address_that_cannot_be_listened_on():
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    for flags, message in (
      ([f'--port={port}'], f"host='127.0.0.1', port={port}: this machine can"),
      (['--port=65536'], "host='127.0.0.1', port=65536: this machine can"),
      (['--host=8.8.8.8'], "host='8.8.8.8', port=None: this machine cannot"),
      (['--port=x'], "--port: 'x' .*integer"),
      (['--step=3', '--weights=x'], '--step=3 selects a checkpoint of a run'),
    ):
      with pytest.raises(ValueError, match=message):
        command.main(['--workdir=/no/run', *flags][len(flags) // 2 :])


def test_without_gradio_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gradio', None)
  monkeypatch.delitem(sys.modules, 'vit_jax.inference.demo')
  monkeypatch.delattr('vit_jax.inference.demo')
  with pytest.raises(ImportError, match=r"pip install -e '.\[demo\]'"):
    command.main(['--workdir=/no/run'])


def test_a_task_without_a_page(model):
  with gradio.Blocks(), pytest.raises(ValueError, match='nothing on a page'):
    predictor.Predictor.page(model)
