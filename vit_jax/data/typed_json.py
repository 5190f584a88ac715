"""Decodes JSON into types; the errors say what is wrong with the text."""

import codecs
from typing import Any

import msgspec

_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode(content: bytes, kind: Any = Any, strict: bool = True) -> Any:
  """Returns the value of a JSON text; see msgspec.json.decode for the arguments.

  Raises ValueError with the reason, to which the caller adds the name of the file.
  """
  if content.startswith(_MARKS):
    raise ValueError('it begins with a byte order mark: save it as UTF-8 without one')
  try:
    return msgspec.json.decode(content, type=kind, strict=strict)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  except msgspec.DecodeError as e:
    raise ValueError(str(e)) from e
