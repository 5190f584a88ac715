"""Reads README.md and docs/*.md: blocks, inline code, links, commands, tables."""

import pathlib
import re
import shlex

from tests import commands as pages_commands

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')))
_FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_START = re.compile(r'python3? -m |(^|\s)vit_jax \w')
_ENDS = ('&&', '||', '|', ';')  # Ends of a shell command.


def blocks(page, language: str) -> list[str]:
  """Returns the fenced blocks in a language."""
  found = _FENCE.findall(page.read_text())
  return [text for name, text in found if name == language]


def prose(page) -> str:
  """Returns a page without its fenced blocks."""
  return _FENCE.sub('', page.read_text())


def inline(page) -> list[str]:
  """Returns the text in single backticks, with line breaks as spaces."""
  return [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', prose(page))]


def rows(page, heading: str) -> list[list[str]]:
  """Returns the rows of the tables whose heading starts with a text."""
  found, inside = [], False
  for line in prose(page).splitlines():
    if not line.startswith('|'):
      inside = False
    elif line.startswith(f'| {heading}'):
      inside = True
    elif inside and not line.startswith('|---'):
      found.append([cell.strip() for cell in line.strip('|').split(' |')])
  return found


def links(page) -> list[str]:
  """Returns the targets of links and pictures."""
  text = re.sub(r'`[^`]*`', 'code', prose(page))
  return re.findall(r'\[[^\]]*\]\(([^)\s]+)\)', text)


def anchors(page) -> set[str]:
  """Returns the anchors that GitHub gives to the headings."""
  titles = re.findall(r'^#+ (.*)$', prose(page), re.MULTILINE)
  return {
    re.sub(r'[^\w\- ]', '', title.lower()).strip().replace(' ', '-') for title in titles
  }


def shell_lines(page) -> list[str]:
  """Returns the lines of bash blocks, and inline code that is a command."""
  text = '\n'.join(blocks(page, 'bash')).replace('\\\n', ' ')
  return text.splitlines() + [c for c in inline(page) if _START.search(c)]


def calls(line: str) -> list[tuple[str, list[str]]]:
  """Returns the commands of this package in a line, with their arguments.

  `vit_jax train ...` and `python -m vit_jax.main ...` are both 'train'.
  """
  line = line.replace('$SLURM_ARRAY_TASK_ID', '0')
  words = shlex.split(line, comments=True)
  found = []
  for i, word in enumerate(words):
    rest = words[i + 1 :]
    ends = [j for j, other in enumerate(rest) if other in _ENDS]
    rest = rest[: ends[0]] if ends else rest
    if ' ' in word and _START.search(word):  # Such as --command="...".
      found += calls(word)
    elif i and words[i - 1] == '-m' and word.startswith('vit_jax.'):
      found.append((pages_commands.MODULES.get(word, word), rest))
    elif word == 'benchmarks' and i and words[i - 1] == '-m':
      found.append((word, rest))
    elif word == 'vit_jax' and rest and '/' not in rest[0]:
      found.append((rest[0], rest[1:]))
  return found


def commands() -> list[tuple[str, str, list[str]]]:
  """Returns (page, command, arguments) of every command of this package."""
  return [
    (page.name, command, args)
    for page in PAGES
    for line in shell_lines(page)
    for command, args in calls(line)
  ]


def write_modules(page, folder, data: str) -> None:
  """Writes the Python blocks that start with their file name.

  Args:
    page: the page.
    folder: folder to write them to.
    data: a path in the blocks, to replace with one in the folder.
  """
  for code in blocks(page, 'python'):
    name = re.match(r'# (\w+\.py)\n', code)
    if name:
      code = code.replace(data, str(folder / pathlib.Path(data).name))
      (folder / name[1]).write_text(code)
