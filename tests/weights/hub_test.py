"""Tests of models on the Hugging Face Hub, against a fake hub on loopback."""

import base64
import hashlib
import http.server
import json
import pathlib
import re
import threading

from huggingface_hub import constants
import jax
import numpy as np
import pytest
import safetensors.torch
import torch

from tests import stored_runs, torch_models, trees
from tests.weights import conftest
from vit_jax import checkpoint, predict
from vit_jax.commands import convert as convert_command
from vit_jax.distributed import processes
from vit_jax.tasks.pixels import palette
from vit_jax.weights import convert, hub, reading

WHOLE = ('config.json', 'model.safetensors', 'preprocessor_config.json')
TOKEN = 'hf_right'


class Hub:
  """A fake hub: its content, the requests it received and its faults.

  Attributes:
    models: {OWNER/NAME: {branch or commit: {file: content}}}.
    gated: models that need the token.
    requests: (method, path) of all requests.
    breaks: how often the connection drops in the middle of a large file.
    changed: files with one byte changed in transit.
  """

  def __init__(self):
    self.models, self.gated = {}, set()
    self.requests, self.breaks, self.changed = [], 0, set()

  def add(self, name, folder, files, revision='main'):
    content = {file: (folder / file).read_bytes() for file in files}
    model = self.models.setdefault(name, {})
    model[revision] = model[commit_of(content)] = content

  def find(self, name, revision):
    """Returns the files of a branch or a commit, or an error code."""
    known = self.models.get(name, {}).get(revision)
    return known or f'{"Revision" if name in self.models else "Repo"}NotFound'


def commit_of(files):
  """Returns the commit hash of a model's files."""
  content = [etag(name, files[name]) for name in sorted(files)]
  return hashlib.sha1(''.join(content).encode()).hexdigest()


def etag(name, content):
  """Like the Hub: SHA-256 for files in LFS, Git's blob hash for others."""
  if name.endswith(('.safetensors', '.bin')):
    return hashlib.sha256(content).hexdigest()
  blob = b'blob %d\0' % len(content) + content
  return hashlib.sha1(blob).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers like the Hub; the server holds the `hub`."""

  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    hub_ = self.server.hub
    path = self.path.partition('?')[0]
    hub_.requests.append((self.command, path))
    found = re.fullmatch(r'/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(\w+))?', path)
    if found:
      name, what, revision = found.groups()
      files = hub_.find(name, revision or 'main')
      if isinstance(files, str):
        return self.refuse(404, files)
      if what != 'tree':
        return self.answer({'id': name, 'sha': commit_of(files)})
      info = {k: {'size': len(v), 'oid': etag(k, v)} for k, v in files.items()}
      return self.answer([{'type': 'file', 'path': k, **info[k]} for k in info])
    found = re.fullmatch(r'/([^/]+/[^/]+)/resolve/(\w+)/(.+)', path)
    if not found:
      return self.refuse(404, '')
    name, revision, file = found.groups()
    if name in hub_.gated:
      token = self.headers.get('Authorization')
      if token != f'Bearer {TOKEN}':
        return self.refuse(403 if token else 401, 'GatedRepo')
    files = hub_.find(name, revision)
    if file not in files:
      return self.refuse(404, 'EntryNotFound')
    return self.send_file(commit_of(files), file, files[file])

  do_HEAD = do_GET

  def do_POST(self):
    hub_, path = self.server.hub, self.path.partition('?')[0]
    body = self.rfile.read(int(self.headers['Content-Length']))
    hub_.requests.append(('POST', path))
    if self.headers.get('Authorization') != f'Bearer {TOKEN}':
      return self.refuse(401, '')
    if path == '/api/validate-yaml':
      return self.answer({'errors': [], 'warnings': []})
    if path == '/api/repos/create':
      fields = json.loads(body)
      name = f'{fields["organization"]}/{fields["name"]}'
      exists = name in hub_.models
      hub_.models.setdefault(name, {'main': {}})
      url = f'{constants.ENDPOINT}/{name}'
      return self.answer({'url': url, 'id': name}, 409 if exists else 200)
    name, what = re.fullmatch(
      r'/api/models/([^/]+/[^/]+)/(preupload|commit)/main', path
    ).groups()
    if what == 'preupload':
      mode = {'uploadMode': 'regular', 'shouldIgnore': False}
      files = [{'path': x['path'], **mode} for x in json.loads(body)['files']]
      return self.answer({'files': files})
    files = hub_.models[name]['main']
    for line in map(json.loads, body.splitlines()):
      if line['key'] == 'file':
        value = line['value']
        files[value['path']] = base64.b64decode(value['content'])
    hub_.models[name][commit_of(files)] = files
    return self.answer({'commitUrl': f'{name}/commit/0', 'commitOid': '0' * 40})

  def send_file(self, commit, name, content):
    start = re.match(r'bytes=(\d+)', self.headers.get('Range', ''))
    start = int(start[1]) if start else 0
    self.send_response(206 if start else 200)
    self.send_header('X-Repo-Commit', commit)
    self.send_header('ETag', f'"{etag(name, content)}"')
    if name in self.server.hub.changed:
      content = content[:-1] + bytes([content[-1] ^ 1])
    self.send_header('Content-Length', str(len(content) - start))
    self.end_headers()
    if self.command == 'HEAD':
      return
    content = content[start:]
    if len(content) > 2000 and self.server.hub.breaks:
      self.server.hub.breaks -= 1
      content, self.close_connection = content[:1000], True
    self.wfile.write(content)

  def answer(self, value, status=200):
    body = json.dumps(value).encode()
    self.send_response(status)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def refuse(self, status, code):
    self.send_response(status)
    self.send_header('X-Error-Code', code)
    self.send_header('Content-Length', '0')
    self.end_headers()

  def log_message(self, *_):
    pass


@pytest.fixture
def fake_hub(tmp_path, monkeypatch, good):
  """A hub with two revisions of o/n, and an empty cache."""
  found = Hub()
  found.add('o/n', good / 'hf', WHOLE)
  found.add('o/n', good / 'timm', ('config.json', 'model.safetensors'), 'v1')
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    server.hub = found
    serve = threading.Thread(target=server.serve_forever, args=[0.01])
    serve.start()
    found.address = f'http://127.0.0.1:{server.server_port}'
    # huggingface_hub read these from the environment on import.
    url = f'{found.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
    for name, value in {
      'ENDPOINT': found.address,
      'HUGGINGFACE_CO_URL_TEMPLATE': url,
      'HF_HUB_CACHE': str(tmp_path / 'hub'),
      'HF_HUB_OFFLINE': False,
      'HF_HUB_DISABLE_XET': True,
      'HF_TOKEN_PATH': str(tmp_path / 'token'),
    }.items():
      monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv('HF_TOKEN', raising=False)
    monkeypatch.delenv('HUGGING_FACE_HUB_TOKEN', raising=False)
    yield found
    server.shutdown()


def downloads(fake_hub):
  return [path.split('/')[-1] for how, path in fake_hub.requests if how == 'GET'
          and '/resolve/' in path]  # fmt: skip


def test_a_model_is_fetched_once_with_its_files(fake_hub, good, monkeypatch):
  want = reading.read(str(good / 'hf'))
  for path in (
    'hf://o/n', 'hf://o/n@main', 'hf://o/n/model.safetensors',
    'https://huggingface.co/o/n/resolve/main/model.safetensors',
  ):  # fmt: skip
    found = reading.read(path)
    trees.assert_same(found.params, want.params)
    assert found._replace(params={}) == want._replace(params={})
  assert sorted(downloads(fake_hub)) == sorted(WHOLE)
  assert reading.read('hf://o/n@v1').kind == 'timm'
  # Offline, files come from the cache.
  count = len(fake_hub.requests)
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  assert reading.read('hf://o/n').kind == 'hf'
  assert reading.read('hf://o/n@v1').kind == 'timm'
  assert len(fake_hub.requests) == count


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors'])
def test_rejects_files_with_a_wrong_hash(fake_hub, name):
  """Changed in transit, and changed in the cache."""
  fake_hub.changed = {name}
  with pytest.raises(OSError, match=r"'hf://o/n' .*sha\d+ of '.*delete") as e:
    reading.read('hf://o/n')
  fake_hub.changed = set()
  file = pathlib.Path(re.search(r"sha\d+ of '([^']+)'", str(e.value))[1])
  file.unlink()
  assert reading.read('hf://o/n').kind == 'hf'
  content = file.read_bytes()
  file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  with pytest.raises(OSError, match=f"'hf://o/n' .*'{file}'"):
    reading.read('hf://o/n')


def test_all_processes_use_the_same_commit(fake_hub, good, monkeypatch):
  """A branch may move after process 0 has sent its commit to the others."""
  first, model = processes.from_first, fake_hub.models['o/n']

  def then_move_the_branch(what, make):
    commit = first(what, make)
    model['main'] = model['v1']
    return commit

  monkeypatch.setattr(processes, 'from_first', then_move_the_branch)
  assert reading.read('hf://o/n').kind == 'hf'
  assert reading.read('hf://o/n').kind == 'timm'


def test_names_of_timm_and_pytorch_files(fake_hub, good):
  name = 'timm/vit_base_patch16_224.augreg_in21k'
  fake_hub.add(name, good / 'timm', ('config.json', 'model.safetensors'))
  want = reading.read(str(good / 'timm')).params
  trees.assert_same(checkpoint.load(f'hf://{name}'), want)
  (good / 'hf' / 'pytorch_model.bin').write_bytes(
    (good / 'hf' / 'new.bin').read_bytes()
  )
  fake_hub.add('o/old', good / 'hf', ('config.json', 'pytorch_model.bin'))
  trees.assert_same(checkpoint.load('hf://o/old'), want)


def test_sharded_weights(fake_hub, good, tmp_path):
  want = reading.read(str(good / 'hf')).params
  folder = tmp_path / 'parts'
  names = conftest.write_shards(good, folder)
  fake_hub.add('o/large', folder, names)
  index = 'model.safetensors.index.json'
  for path in (folder, folder / index, 'hf://o/large', f'hf://o/large/{index}'):
    trees.assert_same(reading.read(str(path)).params, want)
  assert sorted(downloads(fake_hub)) == names
  (folder / names[1]).unlink()
  with pytest.raises(FileNotFoundError, match=f'{names[1]}'):
    reading.read(str(folder))
  (folder / index).write_text(json.dumps({'weight_map': ['a']}))
  with pytest.raises(ValueError, match='index.json.*weight_map'):
    reading.read(str(folder))


@pytest.mark.parametrize(
  'name, shards',
  [
    ('model.fp16.safetensors', ()),
    ('open_clip_pytorch_model.bin', ()),
    (
      'pytorch_model.bin.index.json',
      ('pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin'),
    ),
    (
      'model.safetensors.index.fp16.json',
      (
        'model.fp16-00001-of-00002.safetensors',
        'model.fp16-00002-of-00002.safetensors',
      ),
    ),
  ],
)
def test_variants_and_indices(fake_hub, good, tmp_path, name, shards):
  state = safetensors.torch.load_file(good / 'hf' / 'model.safetensors')
  save = torch.save if '.bin' in name else safetensors.torch.save_file
  files = {file: dict([*state.items()][i::2]) for i, file in enumerate(shards)}
  for file, arrays in (files or {name: state}).items():
    save(arrays, tmp_path / file)
  if shards:
    weight_map = {key: file for file, arrays in files.items() for key in arrays}
    (tmp_path / name).write_text(json.dumps({'weight_map': weight_map}))
  (tmp_path / 'config.json').write_bytes((good / 'hf' / 'config.json').read_bytes())
  fake_hub.add('o/variant', tmp_path, ('config.json', name, *shards))
  want = reading.read(str(good / 'hf')).params
  for path in tmp_path, tmp_path / name, 'hf://o/variant', f'hf://o/variant/{name}':
    trees.assert_same(reading.read(str(path)).params, want)


@pytest.mark.parametrize(
  'path, error, message',
  [
    ('hf://o', ValueError, "'hf://o'.*'namespace/name'.*hf://OWN"),
    ('hf://datasets/o/n', ValueError, 'but a dataset: pass hf://OWNER'),
    ('hf://o/m', FileNotFoundError, 'no model o/m, or it is private: .*HF_TOKEN'),
    ('hf://o/n@v2', FileNotFoundError, "has no revision 'v2': choose .*/o/n$"),
    ('hf://o/n/a.npz', FileNotFoundError, "no file 'a.npz': .*/o/n/tree/"),
    ('hf://o/empty', FileNotFoundError, 'none of .*model.safetensors'),
    ('hf://o/gated', PermissionError, 'is gated: accept .*/o/gated, then log in'),
    ('hf://o/broken', OSError, "'hf://o/broken' .*the hub says: .*; try again"),
  ],
)
def test_fetch_errors(fake_hub, good, monkeypatch, path, error, message):
  monkeypatch.setattr('time.sleep', lambda _: None)
  fake_hub.add('o/empty', good / 'hf', ('config.json',))
  fake_hub.add('o/gated', good / 'hf', WHOLE)
  fake_hub.gated.add('o/gated')
  fake_hub.add('o/broken', good / 'hf', WHOLE)
  fake_hub.breaks = 100 * (path == 'hf://o/broken')
  with pytest.raises(error, match=message) as e:
    reading.read(path)
  assert '\n' not in str(e.value)


def test_a_token_opens_a_gated_model(fake_hub, good, monkeypatch):
  fake_hub.gated.add('o/n')
  monkeypatch.setenv('HF_TOKEN', TOKEN)
  assert reading.read('hf://o/n').kind == 'hf'


def test_download_resumes_after_a_lost_connection(fake_hub, good, monkeypatch):
  monkeypatch.setattr('time.sleep', lambda _: None)
  fake_hub.breaks = 2
  want = reading.read(str(good / 'hf')).params
  trees.assert_same(reading.read('hf://o/n').params, want)
  assert downloads(fake_hub).count('model.safetensors') == 3


def test_hub_that_does_not_answer(fake_hub, monkeypatch):
  url = 'http://127.0.0.1:9'
  monkeypatch.setattr('time.sleep', lambda _: None)
  monkeypatch.setattr(constants, 'ENDPOINT', url)
  with pytest.raises(OSError, match="'hf://o/n' cannot be used: .*not answer"):
    hub.fetch('hf://o/n')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(OSError, match='HF_HUB_OFFLINE=1 is set, .*not in the cache'):
    hub.fetch('hf://o/n')


def test_palette_on_the_hub(fake_hub, good, tmp_path):
  colors = [[-1.0] * 3, [0.5] * 3]
  processor = tmp_path / 'preprocessor_config.json'
  processor.write_text(json.dumps({'clusters': colors}))
  np.save(tmp_path / 'centers.npy', np.array(colors))
  (tmp_path / 'model.safetensors').write_bytes(b'x')
  fake_hub.add('o/p', tmp_path, (WHOLE[1], 'centers.npy', processor.name))
  for path in ('hf://o/p', 'hf://o/p/centers.npy'):
    assert palette.load(path).tolist() == colors


# --- Pushing ---


@pytest.fixture
def run(good, tmp_path):
  """The workdir of a run on a folder of images, with its metrics."""
  workdir = tmp_path / 'run'
  convert.convert(str(good / 'hf'), str(workdir), 'workdir')
  stored_runs.change_config(
    workdir, dataset='/home/me/secret/pets', total_steps=500, batch=64
  )
  (workdir / 'metrics.jsonl').write_text(
    '{"step": 1, "accuracy_test": 0.5, "train_loss": 1.5}\n'
    '{"step": 2, "accuracy_test": 0.75, "lr": 0.1}\n'
  )
  return workdir


@pytest.mark.parametrize('to', ['hf', 'timm'])
def test_a_run_is_pushed_with_a_card(fake_hub, run, monkeypatch, capsys, to):
  monkeypatch.setenv('HF_TOKEN', TOKEN)
  argv = [str(run), f'--to={to}', '--push=hf://me/pets']
  convert_command.main(argv)
  assert f'the model is at {fake_hub.address}/me/pets' in capsys.readouterr().out
  if to == 'hf':  # A second commit of the same model.
    convert_command.main(argv)
  files = fake_hub.models['me/pets']['main']
  card = files['README.md'].decode()
  assert card.startswith('---\n')
  assert 'pipeline_tag: image-classification' in card
  library = {'hf': 'transformers', 'timm': 'timm'}[to]
  assert f'library_name: {library}' in card
  for line in (
    '- task: classify, 5 classes', '- data: pets',
    '- training: 500 steps of 64 images', '- metrics: accuracy_test 75.00 %',
    '- images: whole image to 8 x 8, bilinear; values from -1 to 1',
    "predict.load_weights('hf://me/pets')",
    {'hf': 'from_pretrained(', 'timm': 'timm.create_model('}[to],
  ):  # fmt: skip
    assert line in card, line
  assert 'secret' not in card
  assert str(run) not in card
  trees.assert_same(checkpoint.load('hf://me/pets'), reading.read(str(run)).params)
  if to == 'timm':  # timm reads the hub itself.
    theirs = torch_models.timm.create_model('hf-hub:me/pets', pretrained=True)
    image = np.random.RandomState(0).uniform(-1, 1, (1, 8, 8, 3))
    model = predict.load_weights('hf://me/pets')
    want = jax.jit(model.task.outputs)(model.params, {}, {'image': image})
    got = torch_models.logits(theirs, image.astype(np.float32))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_push_errors(fake_hub, run, monkeypatch, tmp_path):
  to = '--to=hf'
  for flags, error, message in (
    (['--push=hf://me/pets'], PermissionError, 'token.*HF_TOKEN'),
    (['--push=hf://me/pets@v1'], ValueError, 'must be hf://OWNER/NAME .--push'),
    (['hf://me/pets'], ValueError, '--push=hf://me/pets'),
    ([], ValueError, 'DST.*--push'),
  ):
    with pytest.raises(error, match=message):
      convert_command.main(['/no/where', to, *flags])
  assert fake_hub.requests == []
  monkeypatch.setenv('HF_TOKEN', 'hf_wrong')
  with pytest.raises(PermissionError, match='401 Unauthorized.*check the token'):
    convert.push(str(run), 'hf://me/pets')
  with pytest.raises(ValueError, match=r'needs --to=hf\|timm, not npz'):
    convert.push(str(run), 'hf://me/pets', to='npz')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(ValueError, match='unset HF_HUB_OFFLINE'):
    convert.push(str(run), 'hf://me/pets')
