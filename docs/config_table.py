"""Writes docs/config.md, the table of config keys, from configs/common.py.

python docs/config_table.py
"""

import ast
from collections.abc import Mapping, Set
import inspect
import pathlib
import re

from vit_jax.configs import common, schema

PAGE = pathlib.Path(__file__).parent / 'config.md'
_INTRO = """# Config keys

Every key can be set on the command line, such as `--config.base_lr=0.01` or `--config.pp.crop=64`, and is checked before
anything is compiled. The keys of a model, `config.model`, are in [configs/models.py](../configs/models.py), the
options of a task, `config.task_options`, in [configs/task_options.py](../configs/task_options.py).

A run resumes with the same config, except for keys with a mark:

- `free`: any value
- `measured`: any value until the run is finished; a finished run of a study keeps it
- `movable`: another path of the same data
- `length`: steps or epochs, if the number of steps is the same
- `swept`: set by `vit_jax sweep` for each run, so it cannot be among the values of a sweep

This page is generated from [configs/common.py](../configs/common.py) by [config_table.py](config_table.py)."""
_HEADER = '| key | type | default | marks | description |\n|---|---|---|---|---|'
_SECTION = re.compile(r'# --- ([^:]*?)(:.*)? ---')


def keys(group: type):
  """Yields (section, key, default as code, comment) for the keys of a dataclass."""
  source = inspect.getsource(group)
  lines, defaults = source.splitlines(), dict(schema.defaults(group))
  nodes = [n for n in ast.parse(source).body[0].body if isinstance(n, ast.AnnAssign)]
  section, start = '', 0
  for node in nodes:
    found = [line.strip() for line in lines[start : node.lineno - 1]]
    comment = []
    for line in found:
      title = _SECTION.fullmatch(line)
      if title:
        section, comment = title[1], []
      elif line.startswith('#'):
        comment.append(line.lstrip('# '))
    is_call = isinstance(node.value, ast.Call)
    default = repr(defaults[node.target.id]) if is_call else ast.unparse(node.value)
    yield section, node.target.id, default, ' '.join(comment)
    start = node.end_lineno


def _cell(text: str) -> str:
  for mark in '|<*':
    text = text.replace(mark, f'\\{mark}')
  return text


def rows(group: type, marks: Mapping[str, Set[schema.Mark]], prefix: str = ''):
  """Yields (section, row of the table), nested groups of keys last."""
  kinds, inner = schema.fields(group), []
  for section, key, default, comment in keys(group):
    inside = schema.group_of(kinds[key])
    if inside:
      inner.append(
        (f'{inside.__doc__.splitlines()[0].rstrip(".")}', inside, f'{prefix}{key}.')
      )
      continue
    cells = [
      f'`{prefix}{key}`',
      _cell(schema.describe(kinds[key])),
      f'`{default}`',
      ', '.join(sorted(mark.value for mark in marks[f'{prefix}{key}'])),
      _cell(comment),
    ]
    yield section, f'| {" | ".join(cells)} |'
  for title, inside, longer in inner:
    for _, row in rows(inside, marks, longer):
      yield title, row


def page() -> str:
  """Returns the content of docs/config.md."""
  parts, before = [_INTRO], None
  for section, row in rows(common.Config, schema.marks(common.Config)):
    if section != before:
      parts.append(f'\n## {section or "The run"}\n\n{_HEADER}')
    parts.append(row)
    before = section
  return '\n'.join(parts) + '\n'


if __name__ == '__main__':
  PAGE.write_text(page())
