"""Decodes JSON into types; the errors say what is wrong with the text."""

from typing import Any

import msgspec

from vit_jax.distributed import text_files


def decode(content: bytes | str, kind: Any = Any, strict: bool = True) -> Any:
  """Returns the value of a JSON text; see msgspec.json.decode for the arguments.

  Raises ValueError with the reason, to which the caller adds the name of the file.
  """
  if isinstance(content, bytes):
    content = text_files.as_utf8(content)
  try:
    return msgspec.json.decode(content, type=kind, strict=strict)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None
  except msgspec.DecodeError as e:
    raise ValueError(str(e)) from e
