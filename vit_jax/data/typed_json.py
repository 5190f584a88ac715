"""Decodes JSON into types; the errors say what is wrong with the text."""

import json
from typing import Any

import msgspec

from vit_jax.distributed import files, text_files


def decode(
  content: bytes | str, kind: Any = Any, strict: bool = True, unique: bool = False
) -> Any:
  """Returns the value of a JSON text.

  Args:
    content: the text.
    kind: type of the value; likewise `strict`, see msgspec.json.decode.
    unique: whether keys that an object repeats are an error, not read as the last one.

  Raises ValueError with the reason, to which the caller adds the name of the file.
  """
  if isinstance(content, bytes):
    content = text_files.as_utf8(content)
  try:
    value = msgspec.json.decode(content, type=kind, strict=strict)
    if unique:
      json.loads(content, object_pairs_hook=files.check_unique)
    return value
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  except msgspec.DecodeError as e:
    raise ValueError(str(e)) from e
