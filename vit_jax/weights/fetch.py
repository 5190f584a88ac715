"""Fetches remote files into a cache and copies files, with a progress bar.

A file at https:// or gs:// is fetched once, into $VIT_JAX_CACHE (by default
~/.cache/vit_jax), where it appears only when it is complete. The environment
variable VIT_JAX_INSECURE=1, which the flag --insecure of the commands sets, also
allows http://. vit_jax/weights/hub.py fetches models from the Hugging Face Hub.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import http.client
import os
import tempfile
from typing import IO, Any
import urllib.error
import urllib.request

from etils import epath

from vit_jax import console
from vit_jax.distributed import files
from vit_jax.weights import hub

INSECURE = 'VIT_JAX_INSECURE'
_LONGEST_NAME = 150  # Characters of a file name; file systems allow 255 bytes.
_BLOCK = 10 * 2**20  # Bytes to read at a time.
_LARGEST = 2**28  # Bytes of a file that `read` returns.


def is_remote(path: str) -> bool:
  """Returns whether `path` is a URL or in a bucket."""
  return str(path).startswith(('http://', 'https://', 'gs://'))


def local(path: str) -> epath.Path:
  """Returns where `fetch` puts a remote file; a local path itself."""
  if not is_remote(path):
    return epath.Path(files.expanded(path))
  without_query = path.split('?')[0]
  name = without_query.rpartition('/')[2].lstrip('.')
  folder = hashlib.sha256(path.encode()).hexdigest()[:16]
  return epath.Path(console.cache_folder() / folder / name[-_LONGEST_NAME:])


def fetch(path: str) -> epath.Path:
  """Returns the local path of a file; fetches a remote file first.

  A path on the hub may name a whole model, see vit_jax.weights.hub.fetch. Files
  in a bucket are tried without credentials first, then with the user's.

  FileNotFoundError or PermissionError if there is no such file, or no access; OSError
  if it cannot be fetched; ValueError if the URL is not encrypted and
  VIT_JAX_INSECURE is not set.
  """
  path = str(path)
  if hub.is_hub_path(path):
    return hub.fetch(path)
  target = local(path)
  if not is_remote(path) or target.exists():
    return target
  try:
    with _named_errors(path), _open(path) as response:
      length = response.headers.get('Content-Length', '')
      _write(response, target, int(length) if length.isdecimal() else None, path)
  except (FileNotFoundError, PermissionError) as e:
    if not path.startswith('gs://'):
      raise
    try:
      copy(path, str(target))
    except Exception:  # Without access, or a library for buckets.
      raise e from None
  return target


def read(url: str) -> bytes:
  """Returns the content of a file at https://, which is not kept in the cache.

  ValueError if it has more than 256 MiB; for other errors see `fetch`.
  """
  with _named_errors(url), _open(url) as response:
    content = response.read(_LARGEST + 1)
  if len(content) > _LARGEST:
    raise ValueError(
      f"'{url}' has more than {_LARGEST:,} bytes: download it and pass the file"
    )
  return content


def _open(path: str) -> http.client.HTTPResponse:
  """Opens a file at a URL or in a bucket that is open to everyone."""
  url = path.replace('gs://', 'https://storage.googleapis.com/', 1)
  _check_encrypted(url)
  request = urllib.request.Request(url, headers={'User-Agent': 'vit_jax'})
  response = urllib.request.build_opener(_Redirects()).open(request, timeout=60)
  if response.headers.get_content_type() == 'text/html':
    response.close()
    raise OSError(
      f"'{path}' cannot be fetched: the server answers with a web page, perhaps to "
      'log in: download the file with a browser and pass its path'
    )
  return response


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
  """Raises errors of the network with the path that cannot be fetched."""
  try:
    yield
  except urllib.error.HTTPError as e:
    kinds = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError}
    raise kinds.get(e.code, OSError)(
      f"'{path}' cannot be fetched: the server answers {e.code} {_one_line(e.reason)}"
      + _hub_hint(path)
    ) from None
  except urllib.error.URLError as e:
    raise OSError(f"'{path}' cannot be fetched: {e.reason}{_hub_hint(path)}") from None
  except (
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    UnicodeError,
  ) as e:
    raise OSError(
      f"'{path}' cannot be fetched: {_one_line(e) or type(e).__name__}; check the URL "
      'or try again'
    ) from e


def _hub_hint(path: str) -> str:
  """Returns a sentence that names another source of published weights, or ''."""
  if is_remote(path) and path.endswith(('.npz', '.csv')):
    return (
      '. The published weights are also on the Hugging Face Hub: pass '
      'hf://OWNER/NAME of a model at https://huggingface.co/google or '
      'https://huggingface.co/timm'
    )
  return ''


def _one_line(reason: object) -> str:
  return ' '.join(str(reason).split())


def _check_encrypted(url: str) -> None:
  is_insecure = os.environ.get(INSECURE, '') not in ('', '0')
  if not url.startswith(('https://', 'http://')):
    raise ValueError(f"'{url}' is not at https://: pass the URL that it stands for")
  if url.startswith('http://') and not is_insecure:
    raise ValueError(
      f"'{url}' is not encrypted, so the download could be tampered with: pass "
      f'its https:// address, or allow it with --insecure ({INSECURE}=1)'
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
  """Follows redirects to https://, and to http:// if that is allowed."""

  def redirect_request(
    self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
  ) -> urllib.request.Request | None:
    _check_encrypted(newurl)
    return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def local_input(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a local path of a file; a remote one is copied for the `with` block."""
  if not files.is_remote(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    local_path = epath.Path(folder) / path.name
    copy(path, local_path)
    yield local_path


def copy(src: str, dst: str, progress: bool = True, block_size: int = _BLOCK) -> None:
  """Copies a file between any two places that etils.epath reaches.

  The copy appears only when it is complete. `block_size` are the bytes that are read
  at a time. FileNotFoundError if there is no such file.
  """
  source = epath.Path(files.expanded(src))
  with source.open('rb') as f:
    label = str(src) if progress else None
    _write(f, epath.Path(files.expanded(dst)), source.stat().length, label, block_size)


def _write(
  source: IO[bytes],
  target: epath.Path,
  length: int | None,
  label: str | None,
  block_size: int = _BLOCK,
) -> None:
  """Copies an open file, of `length` bytes if known; shows a bar if it has a label."""
  target.parent.mkdir(parents=True, exist_ok=True)
  bar = console.bar(
    total=length, unit='B', unit_scale=True, desc=label, disable=label is None
  )
  with bar, files.replacing(target) as f:
    written = 0
    while block := source.read(block_size):
      written += f.write(block)
      bar.update(len(block))
    if length is not None and written != length:
      raise OSError(
        f"'{label or target}' is incomplete: {written:,} of {length:,} bytes "
        'arrived; try again'
      )
