"""Tests of README.md and docs/: commands, flags, messages, links, figures."""

import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import tomllib

import pytest

from tests import commands, markdown, models_test
from vit_jax import __main__ as program
from vit_jax.configs import common, models as model_configs, schema
from vit_jax.figures import gallery
from vit_jax.run import config as run_config

README, DOCS = markdown.ROOT / 'README.md', markdown.ROOT / 'docs'
NAMES = [page.name for page in markdown.PAGES if page.parent == DOCS]


@pytest.fixture(autouse=True)
def where(monkeypatch):
  """The working directory of the pages' commands."""
  monkeypatch.chdir(markdown.ROOT)


def test_commands_are_found():
  found = markdown.commands()
  assert len(found) >= 40
  assert {command for _, command, _ in found} <= {*program.COMMANDS, 'benchmarks'}
  assert set(commands.MODULES.values()) <= {command for _, command, _ in found}
  pods = [args for _, _, args in found if '--config.mesh.data=-1' in args]
  assert pods[0][-1] == '--workdir=gs://bucket/runs/l16'


def test_commands_are_valid(monkeypatch, tmp_path):
  markdown.write_modules(DOCS / 'extend.md', tmp_path, '/tmp/parity')
  monkeypatch.syspath_prepend(str(tmp_path))  # A command names one of them.
  for page, command, args in markdown.commands():
    args = [
      arg.replace('--config=activations', f'--config={tmp_path}/activations')
      for arg in args
    ]
    try:
      commands.parse(command, args)
    except ValueError as e:
      raise AssertionError(f'{page}: vit_jax {command} {args}: {e}') from e


@pytest.mark.parametrize(
  'line',
  [
    'python -m vit_jax.main --config=configs/digits.py --workdir=w --confg=3',
    'python -m vit_jax.main --config=configs/digits.py --workdir=w --config.batch=0',
    'vit_jax convert a b --tu=onnx',
  ],
)
def test_wrong_commands_are_rejected(line):
  ((command, args),) = markdown.calls(line)
  with pytest.raises(ValueError):  # noqa: PT011
    commands.parse(command, args)


def test_flags_are_valid():
  found = {
    code
    for page in markdown.PAGES
    for code in markdown.inline(page)
    if code.startswith('--')
  }
  assert len(found) > 40
  wrong = [code for code in found if not commands.accepted(shlex.split(code))]
  assert not wrong
  assert not commands.accepted(['--config.accum_step=8'])
  assert not commands.accepted(['--config.accum_steps=none'])


def test_keys_modules_files_and_functions_exist():
  known = {
    *schema.flat(common.Config),
    *(
      f'model.{name}'
      for kind in model_configs.FIELDS.values()
      for name in schema.flat(kind)
    ),
    'task_options',
  }
  known |= {name.split('.')[0] for name in known}
  known |= {name.rpartition('.')[0] for name in known}
  for page in markdown.PAGES:
    for code in markdown.inline(page):
      if re.fullmatch(r'config\.(?!json)[\w.]+', code):
        assert code.removeprefix('config.') in known, (page.name, code)
      elif re.fullmatch(r'vit_jax(\.\w+)+', code):
        assert importlib.util.find_spec(code), (page.name, code)
      elif re.fullmatch(
        r'(vit_jax|benchmarks|configs|tests|docs|colabs)/[\w./]+', code
      ):
        assert (markdown.ROOT / code).exists(), (page.name, code)
      elif re.fullmatch(r'[a-z]\w+\.\w+\(.*\)', code):
        check_call(page.name, code)


def check_call(page, code):
  """Checks that a function of this package accepts the arguments on a page."""
  module, name = code.split('(')[0].split('.')
  if importlib.util.find_spec(f'vit_jax.{module}') is None:
    return  # From another package.
  module = importlib.import_module(f'vit_jax.{module}')
  assert hasattr(module, name), (page, code)
  if '(...)' in code:
    return  # The page shows no arguments.
  call = ast.parse(code, mode='eval').body
  inspect.signature(getattr(module, name)).bind(
    *call.args, **{keyword.arg: None for keyword in call.keywords}
  )


def test_extras_exist():
  settings = tomllib.loads((markdown.ROOT / 'pyproject.toml').read_text())
  extras = settings['project']['optional-dependencies'].keys()
  for page in markdown.PAGES:
    for named in re.findall(r"'\.\[([\w,]+)\]'", page.read_text()):
      assert set(named.split(',')) <= extras, page.name


def test_links_are_not_broken():
  count = 0
  for page in markdown.PAGES:
    for link in markdown.links(page):
      path, _, anchor = link.partition('#')
      if '://' in link:
        continue
      target = (page.parent / path).resolve() if path else page
      assert target.exists(), (page.name, link)
      if anchor:
        assert anchor in markdown.anchors(target), (page.name, link)
      count += 1
  assert count > 60


def test_pages_are_in_the_index():
  index = markdown.links(DOCS / 'README.md')
  assert set(index) == set(NAMES) - {'README.md'}


def test_config_table_is_up_to_date():
  """Run `python docs/config_table.py` to update it."""
  generator = runpy.run_path(str(DOCS / 'config_table.py'))
  assert generator['PAGE'].read_text() == generator['page']()
  rows = markdown.rows(DOCS / 'config.md', 'key')
  assert {row[0].strip('`') for row in rows} == {*schema.flat(common.Config)}
  by_key = {row[0].strip('`'): row[1:] for row in rows}
  assert by_key['batch'][:3] == ['an integer of at least 1', '`512`', '']
  assert by_key['best_metric'][2] == 'free, swept'
  assert by_key['fewshot.shots'][2] == 'measured'
  assert by_key['pp.crop_ratio'][1] == '`(3 / 4, 4 / 3)`'


def test_gallery_is_up_to_date():
  """Run `python docs/gallery_page.py` to update it."""
  generator = runpy.run_path(str(DOCS / 'gallery_page.py'))
  assert generator['PAGE'].read_text() == generator['page']()
  models_column = [row[2] for row in markdown.rows(DOCS / 'gallery.md', '| purpose')]
  assert models_column[0] == (
    'ViT-B/16 (`b16`), 86,567,656 parameters, 35.13 GFLOPs, 84.61 % (384 px) trained '
    'on ImageNet-21k, 74.79 % trained on only ImageNet'
  )


# --- Figures ---


def test_tables_of_models_are_up_to_date():
  """Run `python docs/model_tables.py` to update them."""
  generator = runpy.run_path(str(DOCS / 'model_tables.py'))
  table = markdown.rows(DOCS / 'models.md', 'model | name')
  names = generator['classifiers']()
  assert [row[:2] for row in table] == [*map(generator['names_of'], names)]
  by_name = dict(zip(names, table, strict=True))
  for name, (*_, parameters, giga, jft, i21k, scratch) in by_name.items():
    if name in models_test.COUNTS:
      assert parameters == f'{models_test.COUNTS[name]:,}'
    if name in ('ViT-B_32', 'BiT-R50x1'):  # Tracing takes seconds.
      assert parameters == f'{generator["count_parameters"](name):,}'
      assert giga == f'{generator["gigaflops"](name):,.2f}'
    assert (jft, i21k, scratch) == generator['PUBLISHED'].get(name, ('', '', ''))
  few = markdown.rows(README, 'model | name')
  assert few == [by_name[name][:4] for name in generator['FEW']]
  assert generator['kinds_table']() in (DOCS / 'train.md').read_text()


# --- Messages ---


def texts_of(path):
  """Yields the strings of a file, with '…' for interpolated values."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant):
      text = text_of(node)
      if text:
        yield re.sub(r'%[sd]', '…', text)


def text_of(node):
  if isinstance(node, ast.Constant):
    return node.value if isinstance(node.value, str) else '…'
  if isinstance(node, ast.JoinedStr):
    return ''.join(map(text_of, node.values))
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    return text_of(node.left) + text_of(node.right)
  return '…'


def test_quoted_messages_exist_in_the_code():
  texts = [
    text
    for folder in ('vit_jax', 'configs')
    for path in (markdown.ROOT / folder).rglob('*.py')
    for text in texts_of(path)
  ]
  quoted = [row[0] for row in markdown.rows(DOCS / 'trouble.md', 'message')]
  assert len(quoted) > 25
  for message in quoted:
    pattern = '.*'.join(map(re.escape, message.strip('`').split('…')))
    assert any(re.search(pattern, text, re.DOTALL) for text in texts), message


def test_table_of_figures_is_complete():
  shown = {
    name
    for row in markdown.rows(DOCS / 'look_inside.md', 'figure')
    for name in re.findall(r'`(\w+)`', row[0])
  }
  tasks = map(run_config.get_task, run_config.TASKS)
  assert shown == {e.name for task in tasks for e in gallery.entries_of(task)}


def test_table_of_packages_is_complete():
  rooms = [
    row[0].strip('`') for row in markdown.rows(DOCS / 'inside_the_code.md', 'room')
  ]
  package = markdown.ROOT / 'vit_jax'
  there = {p.parent.relative_to(package) for p in package.rglob('*/*.py')}
  assert sorted(rooms) == sorted(
    f'vit_jax/{room}/' for room in map(str, there) if room != 'configs'
  )
