r"""Decodes text files of users: UTF-8 or, with a byte order mark, UTF-16.

A mark is left out. Lines end with \n or \r\n only: str.splitlines would also split
at characters such as U+2028, which may be inside of a JSON string or a file name.
"""

import codecs
import collections
from collections.abc import Iterator
import csv
import io

from etils import epath

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def as_utf8(content: bytes) -> bytes:
  """Returns a text as UTF-8 without a byte order mark; ValueError for damaged UTF-16."""
  if content.startswith(_UTF16_MARKS):
    return content.decode('utf-16').encode()
  return content.removeprefix(codecs.BOM_UTF8)


def text(content: bytes, path: epath.PathLike) -> str:
  """Returns the text in the content of a file; ValueError if it is not UTF-8."""
  try:
    return as_utf8(content).decode()
  except UnicodeDecodeError as e:
    line = content.count(b'\n', 0, e.start) + 1
    raise ValueError(
      f"'{path}', line {line}, is not UTF-8: save the file as UTF-8"
    ) from e


def lines(content: bytes, path: epath.PathLike) -> list[str]:
  """Returns the lines of a file without their ends; see `text` for errors."""
  split = text(content, path).replace('\r\n', '\n').split('\n')
  return split if split[-1] else split[:-1]


def csv_rows(
  content: bytes, path: epath.PathLike
) -> Iterator[tuple[int, dict[str, str]]]:
  """Yields the number of its last line and the values by column of each row of CSV.

  The first row names the columns. ValueError names a line that is not like it.
  """
  # Quoted values may have line ends, which the reader keeps as they are.
  reader = csv.DictReader(io.StringIO(text(content, path), newline=''), strict=True)
  try:
    names = collections.Counter(reader.fieldnames or ())
    if repeated := [name for name, count in names.items() if count > 1]:
      raise csv.Error(f"several columns are named '{repeated[0]}'")
    for row in reader:
      if None in row or None in row.values():
        raise csv.Error(f'it must have {len(names)} values')
      yield reader.line_num, row
  except csv.Error as e:
    raise ValueError(
      f"'{path}', line {reader.reader.line_num}, is not valid CSV: {e}; separate values by "
      'commas, and quote those with commas'
    ) from e
