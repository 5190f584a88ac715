"""Tests of the web demo, in Chromium."""

from concurrent import futures
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import threading
import time
import types
from urllib import parse

import httpx
import jax
import ml_collections
import numpy as np
from PIL import ExifTags, Image, PngImagePlugin
from playwright import sync_api
import pytest

from tests import conftest, tiny_models
from tests.figures import visualize_test
from tests.inference import export_test
from tests.tasks import input_spec_test, masked_patches_test
from tests.tasks.detection import segment_test
from tests.tasks.image_text import image_text_test
from tests.tasks.pixels import pixels_test
from vit_jax import predict
from vit_jax.commands import demo as command
from vit_jax.data.images import images
from vit_jax.figures import explanations, grids
from vit_jax.inference import predictor, user_images
from vit_jax.tasks import classify
from vit_jax.tasks.detection import attention_figures
from vit_jax.tasks.pixels import finetune

TITLE = '*A* <model> [x](/y) ${1 + 1}'
NAMES = ['ant', 'bee', '<cow>']
CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
_CHROMIUM = ('chromium', 'chromium-browser', 'google-chrome')
_ARGS = (
  '--headless', '--no-sandbox', '--disable-gpu', '--no-first-run',
  '--disable-background-networking', '--disable-component-update',
  '--disable-sync', '--disable-quic',
)  # fmt: skip


@pytest.fixture(scope='module')
def demo():
  """The module; importing Gradio takes seconds, so only one process does it."""
  from vit_jax.inference import demo

  return demo


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
def visit(browser, url, width=1280):
  """Opens a page as a new visitor; fails on errors and requests to other hosts."""
  context = browser.new_context(viewport={'width': width, 'height': 900})
  page, problems = context.new_page(), []
  page.on('console', lambda m: m.type == 'error' and problems.append(m.text))
  page.on('pageerror', lambda error: problems.append(str(error)))
  page.on('request', lambda r: problems.append(r.url) if '//' in r.url and not r.url.removeprefix('blob:').startswith(url) else None)  # fmt: skip
  page.goto(url)
  yield page
  context.close()
  assert not problems


def upload(page, path):
  page.locator('input[type=file]').set_input_files(path)


def best(page):
  """The top prediction shown on the page."""
  return page.get_by_test_id('label-output-value')


def expect_probabilities(page, classes, **kwargs):
  """Waits until the page shows the result of `predict` for an image: `classes`."""
  sync_api.expect(best(page)).to_have_text(classes[0][0], **kwargs)
  for name, probability in classes:
    row = page.get_by_test_id(f'{name}-confidence-set')
    sync_api.expect(row).to_contain_text(f'{100 * probability:.0f}%', **kwargs)


def width_of(picture):
  """The width in pixels of the file behind a displayed image."""
  return picture.evaluate('async x => (await x.decode(), x).naturalWidth')


def post_file(url, content=b'', name='a.png', **kwargs):
  """The response to an upload by a client program."""
  files = {'files': (name, content)}
  return CLIENT.post(f'{url}/gradio_api/upload', files=files, **kwargs)


def events(url):
  """(id, number of inputs) of every event that the server handles."""
  found = CLIENT.get(f'{url}/config').json()['dependencies']
  return [(x['id'], len(x['inputs'])) for x in found if x['backend_fn']]


def send_event(url, number, data, session='me', **headers):
  """The reply to an event: (status, text) if rejected, else warnings and values."""
  event = {'data': data, 'fn_index': number, 'session_hash': session}
  joined = CLIENT.post(
    f'{url}/gradio_api/queue/join',
    content=json.dumps(event),
    headers={'Content-Type': 'application/json', **headers},
  )
  if joined.status_code != 200:
    return joined.status_code, joined.text
  stream = CLIENT.stream('GET', f'{url}/gradio_api/queue/data?session_hash={session}')
  found = []
  with stream as lines:
    for line in filter(None, lines.iter_lines()):
      message = json.loads(line.removeprefix('data:'))
      if message['msg'] == 'log':
        found.append(message['log'])
      if message['msg'] == 'process_completed':
        return [*found, message['output'].get('data')]


def as_file(path):
  """An uploaded file as the page refers to it."""
  return {'path': str(path), 'meta': {'_type': 'gradio.FileData'}}


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
  """Paths of two images of noise."""
  folder, rng = tmp_path_factory.mktemp('photos'), np.random.RandomState(0)
  paths = [folder / f'{number}.png' for number in range(2)]
  for path in paths:
    pixels = rng.randint(0, 256, (30, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path)
  return paths


@pytest.fixture(scope='module')
def workdir(image_folder, tmp_path_factory):
  """The workdir of a classifier with random parameters."""
  config = visualize_test.tiny_config(image_folder)
  metadata = {'class_names': NAMES}
  params = visualize_test.random_numbers(classify.Task(config, metadata))
  workdir = tmp_path_factory.mktemp('run')
  return conftest.write_run(workdir, config, metadata, params)


@pytest.fixture(scope='module')
def model(workdir):
  return predict.load(str(workdir))


@pytest.fixture(scope='module')
def url(demo, model):
  """The URL of the classifier's demo."""
  with demo.served(model, TITLE, {'classes': '3'}) as url:
    yield url.removesuffix('/')


def test_classifies_uploads_and_examples(browser, url, model, photos, image_folder):
  with visit(browser, url) as page:
    sync_api.expect(page.locator('h1')).to_have_text(TITLE)
    upload(page, photos[0])
    expect_probabilities(page, *model.predict([str(photos[0])]))
    picture = page.locator('.image-frame img').nth(1)
    assert width_of(picture) == 50 * 5  # The shorter side is enlarged to at least 128.
    page.locator('.gallery-item').first.click()
    first = user_images.examples(model.config, 1).name(0)
    assert first.startswith(f'{image_folder}/test/')
    expect_probabilities(page, *model.predict([first]))
    page.get_by_label('Remove Image').click()
    sync_api.expect(best(page)).to_have_count(0)


def test_visitors_choose_class_and_method_of_the_explanation(browser, url, photos):
  with visit(browser, url) as page:
    upload(page, photos[0])
    best(page).wait_for()
    picture = page.locator('.image-frame img').nth(1)
    sources = [picture.get_attribute('src')]
    choices = page.get_by_role('radio')
    assert choices.count() == len(NAMES) + len(explanations.METHODS)
    assert choices.first.is_checked()
    for choice in (choices.nth(1), page.get_by_label('Grad-CAM')):
      choice.check()
      sync_api.expect(picture).not_to_have_attribute('src', sources[-1])
      sources.append(picture.get_attribute('src'))
    assert len({*sources}) == 3


def test_images_of_six_channels_are_uploaded_as_files(demo, tmp_path):
  config = visualize_test.tiny_config(tmp_path / 'missing')
  with config.ignore_type():
    config.pp.update(channels=6, range=(0, 9), resize=None)
  task = classify.Task(config, {'class_names': NAMES})
  params = visualize_test.random_numbers(task)
  model = task.predictor(params, {}, 1)
  files = []
  for values in (np.random.RandomState(0).uniform(0, 9, (20, 30, 6)), np.ones((9, 9))):
    files.append(io.BytesIO())
    np.save(files[-1], values)
  good, grey = (file.getvalue() for file in files)
  with demo.served(model, TITLE, {}) as url:  # With photos as examples.
    url = url.removesuffix('/')
    [path] = post_file(url, good, 'a.npy').json()
    [values] = send_event(url, photo_event(url), [as_file(path), 'legrad'])
    assert values[0]['label'] == model.predict([good])[0][0][0]
    shown = CLIENT.get(values[-1]['url']).content
    assert Image.open(io.BytesIO(shown)).size == (30, 20)
    [path] = post_file(url, grey, 'grey.npy').json()
    text, _ = send_event(url, photo_event(url), [as_file(path), 'legrad'])
    assert "'grey.npy' is not an image" in text
    assert '1 channel, and pp.channels=6' in text


def photo_event(url):
  """The id of the event for a new photo."""
  return max(number for number, _ in events(url))


def test_only_uploads_and_examples_are_read(url, photos):
  # Every event rejects everything else with the same response.
  [upload] = post_file(url, photos[0].read_bytes()).json()
  (pathlib.Path(upload).parent / 'link.png').symlink_to(photos[0])
  link = f'{pathlib.Path(upload).parent}/link.png'
  paths = [
    '/no/picture.png', str(photos[0]), photos[0].as_uri(), f'{upload}/../link.png', link,
    os.path.relpath(photos[0]), str(pathlib.Path(upload).parent), '/proc/self/environ',
    'gs://bucket/a.png', 'http://192.0.2.1/a.png', '~/a.png', '', None, [str(photos[0])],
  ]  # fmt: skip
  refusal = 403, CLIENT.get(f'{url}/no').text
  for number, inputs in events(url):
    forged = [{'path': path} for path in paths]
    forged += [as_file(paths[1]), {'value': {'path': paths[1]}}, [{'path': paths[1]}]]
    for x in forged:
      assert send_event(url, number, [x] * inputs) == refusal
  for body in ('', '{', '[]', 1900 * '[', '{"data": [null], "fn_index": 99}'):
    for name in ('queue/join', 'run/predict'):
      answer = CLIENT.post(f'{url}/gradio_api/{name}', content=body)
      assert (answer.status_code, answer.text) == refusal
  for path in map(parse.quote, paths[1:11]):
    answer = CLIENT.get(f'{url}/gradio_api/file={path}')
    assert (answer.status_code, answer.text) == refusal
  [example] = pathlib.Path(upload).parents[1].glob('example_1.*')
  for path in (upload, example):
    label, *_, picture = send_event(url, photo_event(url), [as_file(path), 'legrad'])[0]
    assert label['label'] in NAMES
    assert CLIENT.get(picture['url']).status_code == 200
  for x in (str(photos[0]), upload, [str(photos[0])]):
    answer = send_event(url, photo_event(url), [x, 'legrad'])
    assert answer == [None]  # An error, no message.
  no_path = {'url': photos[0].as_uri()}
  text, values = send_event(url, photo_event(url), [no_path, 'legrad'])
  assert 'upload it again' in text
  assert not any(values)


def test_loopback_server_rejects_other_host_names(url):
  for host, status in (
    ('LocalHost:80', 200), ('[::1]:80', 200), ('localhost.evil.example', 400), ('', 400)
  ):  # fmt: skip
    for path in ('/', '/config', '/gradio_api/heartbeat/me'):
      with CLIENT.stream('GET', url + path, headers={'Host': host}) as answer:
        assert answer.status_code == status
    assert post_file(url, headers={'Host': host}).status_code == status
    assert (send_event(url, 0, [], Host=host)[0] == 400) == (status == 400)


def test_rejects_requests_from_other_origins(url):
  [upload] = post_file(url, headers={'Origin': url}).json()
  before = set(pathlib.Path(upload).parents[1].rglob('*'))
  for origin in (
    'http://evil.example',
    'null',
    'http://127.0.0.1:1',
    f'{url}.evil.example',
  ):
    assert post_file(url, b'x', headers={'Origin': origin}).status_code == 403
    assert send_event(url, photo_event(url), [None], Origin=origin)[0] == 403
  assert set(pathlib.Path(upload).parents[1].rglob('*')) == before


def test_an_upload_cannot_be_larger_than_a_file(url):
  """Gradio keeps other fields of a form in memory, whatever their size."""
  form = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n'

  def endless():
    yield form
    for _ in range(70):
      yield bytes(2**20)

  headers = {'Content-Type': 'multipart/form-data; boundary=B'}
  answer = CLIENT.post(f'{url}/gradio_api/upload', content=endless(), headers=headers)
  assert answer.status_code == 413
  assert 'upload has more than' in answer.text


def test_other_requests_are_small(url):
  """They are held in memory, those of all visitors at once."""
  for size, status in (2**20, 403), (2**20 + 1, 413):
    answer = CLIENT.post(f'{url}/gradio_api/queue/join', content=b' ' * size)
    assert answer.status_code == status


def test_uploads_cannot_fill_the_disk(url, monkeypatch):
  monkeypatch.setattr('vit_jax.inference.guard._STORED', 0)
  answer = post_file(url)
  assert (answer.status_code, 'Too many uploads' in answer.text) == (503, True)
  monkeypatch.undo()
  assert post_file(url).status_code == 200


def test_shows_errors_about_uploaded_files(browser, url, model, photos, tmp_path):
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
      (
        large,
        "'large.png' has 9500 x 9500 pixels, more than max_image_pixels=89478485",
      ),
    ):
      upload(page, path)
      sync_api.expect(toast).to_contain_text(text)
      assert '/' not in toast.inner_text()  # No local paths.
      sync_api.expect(best(page)).to_have_count(0)
      toast.get_by_role('button').last.click()
    upload(page, photos[0])
    best(page).wait_for()


def test_one_photo_is_decoded_at_a_time(demo, url, photos, monkeypatch):
  entered, most = [], []
  read = demo.read_photo

  def slow_read(*args):
    entered.append(args)
    time.sleep(0.2)
    most.append(len(entered))
    entered.pop()
    return read(*args)

  monkeypatch.setattr(demo, 'read_photo', slow_read)
  [path] = post_file(url, photos[0].read_bytes()).json()
  with futures.ThreadPoolExecutor(4) as pool:
    replies = pool.map(
      lambda session: send_event(
        url, photo_event(url), [as_file(path), 'legrad'], session
      ),
      ('a', 'b', 'c', 'd'),
    )
    assert all(reply[0][0]['label'] in NAMES for reply in replies)
  assert most == 4 * [1]


def limited(max_pixels):
  """Returns the part of a config that reading a photo needs."""
  return ml_collections.ConfigDict(
    {'max_image_pixels': max_pixels, 'pp': {'range': None}}
  )


def test_large_jpegs_are_decoded_at_a_reduced_size_for_the_page(demo, tmp_path):
  path = tmp_path / 'photo.jpg'
  exif = Image.Exif()
  exif[ExifTags.Base.Orientation] = 6
  Image.new('RGB', (4_200, 2_200), 'orange').save(path, exif=exif)
  reduced = demo.decode_for_page(path.read_bytes())
  assert reduced.shape == (1_050, 550, 3)  # A quarter: 1,024 is still reached.
  assert demo.read_photo(str(path), limited(4_200 * 2_200)).pixels.shape == (
    1_024,
    536,
    3,
  )
  empty = bytearray(images.encode_png(np.zeros((9, 9, 3), np.uint8)))
  empty[16:24] = bytes(8)  # Its header says 0 x 0 pixels.
  path.write_bytes(empty)
  with pytest.raises(ValueError, match="photo.jpg' is not an image"):
    demo.read_photo(str(path), limited(100))


def test_many_compressed_texts_are_rejected(demo, tmp_path):
  texts = PngImagePlugin.PngInfo()
  for i in range(20):
    texts.add_text(f'key {i}', 'text', zip=True)
  path = tmp_path / 'photo.png'
  Image.new('RGB', (9, 9)).save(path, pnginfo=texts)
  assert demo.read_photo(str(path), limited(100)).pixels.shape == (9, 9, 3)
  texts.add_itxt('last', 'text', zip=True)
  Image.new('RGB', (9, 9)).save(path, pnginfo=texts)
  with pytest.raises(ValueError, match='photo.png.* 21 texts, more than 20'):
    demo.read_photo(str(path), limited(100))


def test_classes_of_the_same_name_are_all_shown(demo):
  choices = [('crane', 0.5), ('cat', 0.3), ('crane', 0.2)]
  assert demo.confidences(choices) == {'crane': 0.5, 'cat': 0.3, 'crane (2)': 0.2}


def test_narrow_screens_show_results_before_examples(browser, url, photos):
  def place(shown):
    found = shown.bounding_box()
    return found['y'], found['y'] + found['height']

  with visit(browser, url, width=400) as page:
    upload(page, photos[0])
    best(page).wait_for()
    photo, rollout = (place(page.locator('.image-frame').nth(i)) for i in (0, 1))
    assert photo[1] < place(best(page))[0] < rollout[0]
    assert rollout[1] < place(page.locator('.gallery-item').first)[0]
    upload(page, __file__)
    toast = page.locator('.toast-body')
    toast.wait_for()
    assert place(toast)[1] < place(page.get_by_text('Top predictions'))[0]


@pytest.fixture(scope='module')
def detector():
  """A narrow detector on canvases, scaled so that its queries differ."""
  sides = dict(sides=(96, 128), eval_side=128, longest_side=192)
  task = export_test.make_detector((1, 1, 1), **sides)
  params, extra = tiny_models.of_task(task)
  params['query_embedding'] *= 35
  attention = params['decoder_layer_0']['cross_attention']
  for name in ('query', 'key', 'value', 'out'):
    attention[name]['kernel'] *= 6
  return task.predictor(params, extra, 1)


def green(picture):
  """How green each pixel is; in viridis, larger values are greener."""
  red, middle, blue = np.moveaxis(np.asarray(picture, np.float32), -1, 0)
  return middle - (red + blue) / 2


def test_boxes_above_a_threshold_and_attention_of_a_clicked_box(
  browser, demo, detector, photos
):
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
  seen = attention_figures.compute(
    detector.task, detector.params, detector.extra, batch
  )
  areas = [(x1 - x0) * (y1 - y0) for *_, (x0, y0, x1, y1) in objects[:count]]
  number = int(np.argmin(areas))
  query = np.argsort(-seen.scores[0])[number]
  (x0, y0, x1, y1), times = objects[number][-1], 9  # The image has 30 x 50 pixels.
  with demo.served(detector, 'A detector', {}) as url, visit(browser, url) as page:
    upload(page, path)
    words = page.get_by_text('with a score of at least')
    sync_api.expect(words).to_contain_text('at least 70 %', timeout=60_000)
    field = page.get_by_role('spinbutton')
    for value, found in ((0, 8), (0.99, 0), (least, count)):
      field.fill(f'{value:g}')
      field.press('Enter')
      text = f'{found} objects with a score of at least {100 * value:g} %'
      sync_api.expect(words).to_have_text(text)
    picture = page.locator('.image-frame img').nth(1)
    assert width_of(picture) == 50 * times
    shown = picture.bounding_box()['width'] / 50  # Screen pixels per image pixel.
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


def test_a_click_selects_the_smallest_box():
  from vit_jax.tasks.detection import page as page_lib

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
  numbers = (signal.SIGTERM, signal.SIGHUP)
  before = [signal.getsignal(number) for number in numbers]
  yield
  for number, handler in zip(numbers, before):
    signal.signal(number, handler)


def run_command(monkeypatch, flags, visit):
  """Runs the command, calls `visit`, sends SIGHUP; returns the output."""

  class Event(threading.Event):
    def wait(self, timeout=None):
      if timeout is None:  # The command waits for Ctrl-C here.
        visit()
        signal.raise_signal(signal.SIGHUP)
      return super().wait(timeout)

  fake = types.SimpleNamespace(Event=Event, Thread=threading.Thread)
  monkeypatch.setattr('vit_jax.inference.demo.threading', fake)
  # Not capsys: if sys.stderr was replaced, the server's logging closes the previous
  # stream, which is pytest's.
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    assert command.main(flags) == 0
  return output.getvalue()


@pytest.mark.usefixtures('_own_signals')
def test_command_serves_locally_and_keeps_nothing(workdir, monkeypatch):
  port, folders = free_port(), []
  url = f'http://127.0.0.1:{port}'

  def visit():
    folders.append(pathlib.Path(os.environ['GRADIO_TEMP_DIR']))
    page = CLIENT.get(url)
    assert page.status_code == 200
    assert f'run: {workdir.name}, step 1' in page.text
    assert str(workdir.parent) not in page.text
    with pytest.raises(OSError, match='refused'):
      socket.create_connection(('127.0.0.2', port))
    examples = files()
    assert post_file(url, bytes(2_001)).status_code == 413
    [path] = post_file(url, bytes(2_000)).json()
    assert files() == examples | {pathlib.Path(path)}
    deadline = time.monotonic() + 30
    while files() != examples:
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def files():
    return {path for path in folders[0].rglob('*') if path.is_file()}

  monkeypatch.setattr('vit_jax.inference.demo.LARGEST', 2_000)
  monkeypatch.setattr('vit_jax.inference.demo.LIFETIME', 1.0)
  monkeypatch.setenv('GRADIO_TEMP_DIR', '/tmp/of_the_user')
  flags = [f'--workdir={workdir}', f'--port={port}']
  output = run_command(monkeypatch, flags, visit)
  assert f'on {url}/ until you press Ctrl-C' in output
  assert 'password' not in output
  assert not folders[0].exists()
  assert os.environ['GRADIO_TEMP_DIR'] == '/tmp/of_the_user'
  with pytest.raises(OSError, match='refused'):
    socket.create_connection(('127.0.0.1', port))


@pytest.mark.usefixtures('_own_signals')
def test_command_warns_when_others_can_reach_it(workdir, monkeypatch):
  port = free_port()
  url = f'http://127.0.0.1:{port}'

  def visit():
    for host in ('any.example', '192.0.2.7'):
      own, headers = f'http://{host}:{port}', {'Host': f'{host}:{port}'}
      assert CLIENT.get(url, headers=headers).status_code == 200
      for origin, status in ((own, 200), ('http://evil.example', 403)):
        answer = post_file(url, headers={**headers, 'Origin': origin})
        assert answer.status_code == status

  flags = [f'--workdir={workdir}', f'--port={port}', '--host=0.0.0.0']
  output = run_command(monkeypatch, flags, visit)
  [host] = re.findall(rf'on http://(.+):{port}/ until', output)
  assert host not in ('0.0.0.0', 'localhost', '127.0.0.1')
  socket.create_server((host, 0)).close()  # An address of this machine.
  assert 'veryone who can reach this machine' in output
  assert 'password' in output


def test_unusable_addresses_are_named():
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    for flags, message in (
      ([f'--port={port}'], f"host='127.0.0.1', port={port}: this machine can"),
      (['--port=65536'], 'port=65536: this machine cannot'),
      (['--host=8.8.8.8'], "host='8.8.8.8', port=None: this machine cannot"),
    ):
      with pytest.raises(ValueError, match=message):
        command.main(['--workdir=/no/run', *flags])


def page_of(model):
  """Builds the page of a task without a server."""
  import gradio

  with gradio.Blocks():
    return model.page()


def test_a_task_without_a_page(model):
  with pytest.raises(ValueError, match='`page`'):
    predictor.Predictor.page(model)


def photo_of(demo, folder, pixels):
  """A photo, and the path of its file."""
  path = str(folder / 'photo.png')
  Image.fromarray(pixels).save(path)
  return demo.Photo(path, pixels), path


def reported(model, path, folder, **options):
  """The picture that the command draws."""
  out = str(folder / 'out.png')
  model.report([path], out=out, **options)
  with Image.open(out) as picture:
    return np.asarray(picture)


def test_a_page_shows_an_image_and_its_completions(demo, data_dir, tmp_path):
  task = pixels_test.make_task(data_dir)
  model = task.predictor(*tiny_models.of_task(task), 1)
  pixels = np.zeros((8, 8, 3), np.uint8)
  photo, _ = photo_of(demo, tmp_path, pixels)
  show, [seed], [picture, _] = page_of(model)
  assert seed.value == 0
  found = show(photo, 1)[picture]
  completed = model.complete([pixels] * 3, seed=1)
  upper_half = pixels.copy()
  upper_half[4:] = 128
  want = grids.grid(np.stack([upper_half, *completed]))
  np.testing.assert_array_equal(found, want)
  assert (show(photo, 2)[picture] != found).any()
  bert = pixels_test.make_task(data_dir, causal=False)
  with pytest.raises(ValueError, match=r"masked pixels .*'ar'"):
    page_of(bert.predictor(None, {}, 1))


def test_pixel_classifier_shows_classes_and_completions(demo, data_dir, tmp_path):
  task = pixels_test.make_task(data_dir, finetune.Task)
  model = task.predictor(*tiny_models.of_task(task), 1)
  photo, path = photo_of(demo, tmp_path, np.zeros((8, 8, 3), np.uint8))
  show, _, outputs = page_of(model)
  shares, completions = list(show(photo, 0).values())[:2]
  [classes] = model.predict([path])
  assert shares == pytest.approx(dict(classes))
  assert completions.ndim == 3
  assert len(outputs) == 3


def test_masked_patches_match_the_picture_of_the_command(demo, data_dir, tmp_path):
  task = masked_patches_test.make_task(data_dir)
  model = task.predictor(*tiny_models.of_task(task), 1)
  photo, path = photo_of(demo, tmp_path, np.full((8, 8, 3), 200, np.uint8))
  show, _, [picture] = page_of(model)
  want = reported(model, path, tmp_path)
  np.testing.assert_array_equal(show(photo)[picture], want)


def test_page_shows_the_targets_of_a_regression(demo, data_dir, tmp_path):
  task = input_spec_test.make_regress(data_dir)
  model = task.predictor(*tiny_models.of_task(task), 1)
  photo, path = photo_of(demo, tmp_path, np.full((8, 8, 3), 200, np.uint8))
  show, _, [table] = page_of(model)
  [values] = model.predict([path])
  found = {name: float(value) for name, value in show(photo)[table]}
  assert found == pytest.approx(values, rel=1e-5)
  assert list(found) == ['age', 'weight']


def test_segments_match_the_picture_of_the_command(demo, tmp_path):
  model = segment_test.make_task().predictor({}, {'frozen': {}}, 0)
  pixels = segment_test.COLOURS[segment_test.make_classes()].astype(np.uint8)
  photo, path = photo_of(demo, tmp_path, pixels)
  show, [threshold], (_, picture, words) = page_of(model)
  assert threshold.value == model.MIN_SCORE
  found = show(photo, 0.85)
  assert found[words] == '4 segments with a score of at least 85 %'
  # The command enlarges the map; the page computes it at the picture's size.
  want = reported(model, path, tmp_path, threshold=None, image_size=None)
  assert (found[picture] == want).all(axis=-1).mean() > 0.9
  found = show(photo, 1.0)
  assert found[words] == '0 segments with a score of at least 100 %'


def test_page_ranks_typed_classes_for_a_photo(demo, data_dir, tmp_path):
  task = image_text_test.make_task(data_dir)
  model = task.predictor(*tiny_models.of_task(task), 1)
  photo, path = photo_of(demo, tmp_path, np.full((8, 8, 3), 200, np.uint8))
  show, [typed], [label] = page_of(model)
  assert len(typed.value.splitlines()) == 3
  assert show(photo, ' \n') == {}
  [want] = model.predict([path], classes=['cat', 'the dog'])
  assert len({share for _, share in want}) == 2
  assert show(photo, 'cat\n\n the dog ')[label] == pytest.approx(dict(want))
  with pytest.raises(ValueError, match='20,000 characters: type at most 10,000'):
    show(photo, 10_000 * 'a\n')
