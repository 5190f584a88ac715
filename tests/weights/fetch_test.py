"""Tests of weights and files fetched from servers and buckets."""

import http.server
import json
import threading

from etils import epath
import numpy as np
import pytest

from tests import tiny_models, torch_models, trees
from tests.weights import conftest
from vit_jax import checkpoint
from vit_jax.commands import flags
from vit_jax.configs import igpt
from vit_jax.run import config as run_config
from vit_jax.tasks.pixels import pixels
from vit_jax.weights import convert, fetch, reading, writing


@pytest.fixture
def server(tmp_path, monkeypatch):
  """A server on loopback; yields its address and the requested paths."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  # The loopback server has no certificate and is not encrypted.
  monkeypatch.setenv(fetch.INSECURE, '1')
  requested = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      requested.append(self.path)
      if self.path.startswith('/garbage'):
        self.wfile.write(b'\0 no HTTP\r\n')
        return
      status = {'/403': 403, '/404': 404}.get(self.path[:4], 200)
      served = tmp_path / 'served'
      if served.is_dir():
        served = served / self.path[1:]
        status = 200 if served.exists() else 404
      self.send_response(status)
      body = served.read_bytes() if status == 200 else b''
      short = 10 if self.path.startswith('/short') else 0
      self.send_header('Content-Length', str(len(body)))
      if self.path.startswith('/login'):
        self.send_header('Content-Type', 'text/html; charset=utf-8')
      self.end_headers()
      self.wfile.write(body[: len(body) - short])

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as httpd:
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{httpd.server_port}', requested
    httpd.shutdown()


def test_a_url_is_fetched_once(tmp_path, server):
  address, requested = server
  params = {'cls': np.arange(3.0), 'head': {'kernel': np.ones((2, 3))}}
  checkpoint.save(params, str(tmp_path / 'some.npz'))
  (tmp_path / 'some.npz').rename(tmp_path / 'served')
  for _ in range(2):
    trees.assert_same(checkpoint.load(f'{address}/ViT-B_16.npz'), params)
  assert requested == ['/ViT-B_16.npz']


def test_the_config_next_to_a_url_is_fetched(tmp_path, server):
  address, requested = server
  theirs = torch_models.hf_model(hidden_act='gelu_new')
  theirs.save_pretrained(tmp_path / 'served')
  found = reading.read(f'{address}/model.safetensors')
  # The last two files do not exist.
  assert requested == [
    '/model.safetensors',
    '/config.json',
    '/processor_config.json',
    '/preprocessor_config.json',
  ]
  assert found.class_names == ('ant', 'bee', 'cow')
  assert found.model['transformer']['gelu'] == 'tanh'
  assert found.image_size == (8, 12)


def test_the_palette_next_to_a_url_is_fetched(tmp_path, server):
  address, requested = server
  (tmp_path / 'served').mkdir()
  colors = {'clusters': [[-1.0] * 3, [0.5] * 3]}
  file = tmp_path / 'served' / 'preprocessor_config.json'
  file.write_text(json.dumps(colors))
  config = igpt.get_config('s,cifar10,32')
  config.pretrained = f'{address}/model.safetensors'
  config.model.num_colors = 2
  config = run_config.complete(config)
  assert pixels.Task.learn(config, None)['palette'] == colors['clusters']
  assert requested == ['/palette.json', '/preprocessor_config.json']
  file.unlink()
  config.task_options.palette = f'{address}/other/model.safetensors'
  with pytest.raises(FileNotFoundError, match='/other. has no palette'):
    pixels.Task.learn(config, None)


@pytest.mark.parametrize(
  'page, error, message',
  [
    ('403/ViT-B_16.npz', PermissionError, '403 .*huggingface.co/google'),
    ('404/R_Ti_16.npz', FileNotFoundError, '404 .*huggingface.co/timm'),
    ('short.npz', OSError, 'bytes arrived; try'),
    ('login.npz', OSError, "login.npz' cannot be fetched: .* a web page"),
    ('garbage.npz', OSError, "garbage.npz' cannot be fetched: .*try again"),
    ('a b.npz', OSError, "a b.npz' cannot be fetched: .*check the URL"),
  ],
)
def test_url_errors(tmp_path, server, page, error, message):
  address, _ = server
  (tmp_path / 'served').write_bytes(b'x' * 100)
  with pytest.raises(error, match=message):
    checkpoint.load(f'{address}/{page}')
  assert not list((tmp_path / 'cache').rglob('*.npz*'))


def test_rejects_unencrypted_urls(monkeypatch, tmp_path):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  monkeypatch.delenv(fetch.INSECURE, raising=False)
  url = 'http://127.0.0.1:9/a.npz'  # Nothing listens there.
  with pytest.raises(ValueError, match=f"'{url}'.*--insecure"):
    checkpoint.load(url)
  for target in url, 'ftp://127.0.0.1/a.npz':
    with pytest.raises(ValueError, match=f"'{target}'"):
      fetch._Redirects().redirect_request(None, None, 302, '', {}, target)
  parser = flags.Parser('some-command', '')
  flags.add_model_flags(parser)
  parser.parse_args(['--weights=a', '--insecure'])
  with pytest.raises(OSError, match='cannot be fetched: .*refused'):
    fetch.fetch(url)


def test_bucket_that_answers_403(monkeypatch, tmp_path):
  """The error names other sources of the weights."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))

  def urlopen(_, request, timeout):
    assert request.full_url == (
      'https://storage.googleapis.com/vit_models/augreg/R_Ti_16-i21k.npz'
    )
    raise fetch.urllib.error.HTTPError(request.full_url, 403, 'Forbidden', {}, None)  # fmt: skip

  monkeypatch.setattr(fetch.urllib.request.OpenerDirector, 'open', urlopen)
  monkeypatch.setattr(fetch, 'copy', None)  # No library for buckets.
  with pytest.raises(
    PermissionError,
    match='403 Forbidden. .*Hub: .*hf://OWNER/NAME',
  ):
    checkpoint.load('gs://vit_models/augreg/R_Ti_16-i21k.npz')


def bucket_backend(root):
  """An epath backend that maps gs:// to a local folder."""

  def redirected(name):
    def call(self, *args, **kwargs):
      here = (str(arg).replace('gs://', f'{root}/', 1) for arg in args)
      return getattr(epath.backend.os_backend, name)(*here, **kwargs)

    return call

  names = epath.backend.Backend.__abstractmethods__
  return type(
    'Bucket',
    (epath.backend.Backend,),
    {name: redirected(name) for name in names},
  )()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """An empty bucket, gs://ours, backed by a local folder."""
  backend = bucket_backend(tmp_path / 'gs')
  monkeypatch.setattr(epath.gpath.backend_lib, 'tf_backend', backend)
  (tmp_path / 'gs' / 'ours').mkdir(parents=True)
  return tmp_path / 'gs' / 'ours'


def test_weight_folders_in_a_bucket(tmp_path, bucket, good, monkeypatch):
  """They are written and read in place, like local folders."""
  params = tiny_models.numbers(tiny_models.tiny(), 8)
  checkpoint.save(params, str(tmp_path / 'a.npz'))
  there = 'gs://ours/some/hf'
  convert.convert(str(tmp_path / 'a.npz'), there, 'hf')
  assert sorted(p.name for p in (bucket / 'some' / 'hf').iterdir())[:2] == [
    'config.json', 'model.safetensors'
  ]  # fmt: skip
  trees.assert_same(checkpoint.load(there), params)
  assert reading.read(there).image_size == (8, 8)
  conftest.write_shards(good, bucket / 'parts')
  want = checkpoint.load(str(good / 'hf'))
  trees.assert_same(checkpoint.load('gs://ours/parts'), want)
  # A failed conversion leaves nothing in the bucket.
  monkeypatch.setitem(writing.WRITERS, 'hf', write_partially)
  with pytest.raises(OSError, match='no space'):
    convert.convert(there, 'gs://ours/other', 'hf')
  assert sorted(p.name for p in bucket.iterdir()) == ['parts', 'some']


def write_partially(_, dst):
  dst.mkdir(exist_ok=True)
  (dst / 'model.safetensors').write_text('some')
  raise OSError('no space')


def test_copies_are_complete_or_absent(tmp_path, capsys):
  (tmp_path / 'a').write_bytes(b'x' * 1000)
  checkpoint.copy(str(tmp_path / 'a'), str(tmp_path / 'b'), block_size=300)
  assert (tmp_path / 'b').read_bytes() == b'x' * 1000
  assert '1.00k/1.00k' in capsys.readouterr().err
  with pytest.raises(FileNotFoundError, match="No such file.*no'"):
    checkpoint.copy(str(tmp_path / 'no'), str(tmp_path / 'c'))
  assert not (tmp_path / 'c').exists()
