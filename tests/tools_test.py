"""Runs the type checker and builds the site, with the settings of the project."""

import json
import pathlib
import re
import subprocess
import sys
import tomllib

from tests import markdown

ROOT = pathlib.Path(__file__).parents[1]


def run(*args, **kwargs):
  return subprocess.run(
    [sys.executable, '-m', *map(str, args)],
    capture_output=True, text=True, check=False, cwd=ROOT, **kwargs,
  )  # fmt: skip


def checked_modules():
  """Returns the paths of the modules that mypy checks."""
  settings = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  patterns = settings['tool']['mypy']['files']
  paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
  for folder in filter(pathlib.Path.is_dir, list(paths)):
    paths.remove(folder)
    paths.update(folder.rglob('*.py'))
  return paths


def test_types_of_the_public_modules():
  done = run('mypy')
  assert done.returncode == 0, done.stdout
  checked = re.search(r'no issues found in (\d+) source files', done.stdout)
  assert int(checked[1]) == len(checked_modules())


def test_site_builds(tmp_path):
  done = run('mkdocs', 'build', '--strict', '--site-dir', tmp_path)
  assert done.returncode == 0, done.stderr
  pages = {page.stem for page in markdown.PAGES if page.parent.name == 'docs'}
  assert {path.parent.name for path in tmp_path.glob('*/index.html')} == (
    pages - {'README'}
  )
  page = (tmp_path / 'api/index.html').read_text()
  assert 'id="vit_jax.models.get_model"' in page
  assert 'id="vit_jax.checkpoint.load_pretrained"' in page
  assert re.search(r'<pre>.*>register<.*>MyModel<', page)  # An example of a docstring.

  home = (tmp_path / 'index.html').read_text()
  for heading in ('install', 'three-commands', 'models', 'all-pages'):
    assert f'<h2 id="{heading}">' in home
  assert 'src="pictures/digits.png"' in home
  assert '<span class="word">--config.base_lr=0.01</span>' in home
  assert 'href="train/#broken-images"' in home
  assert 'rel="next"' in home
  assert 'There is no such page' in (tmp_path / '404.html').read_text()
  search = json.loads((tmp_path / 'search/search_index.json').read_text())
  (document,) = [
    document['location']
    for document in search['docs']
    if 'gradient checkpointing' in document['text']
    and document['location'].startswith('train/#')
  ]
  assert document == 'train/#common-changes'


def test_api_reference_lists_the_checked_modules():
  text = (ROOT / 'docs/api.md').read_text()
  public = {path.stem for path in checked_modules() if path.parent.name == 'vit_jax'}
  assert set(re.findall(r'^::: vit_jax\.(\w+)$', text, re.M)) == public
