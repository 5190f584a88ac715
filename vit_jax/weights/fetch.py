"""Fetches remote files into a cache and copies files, with a progress bar.

A file at https:// or gs:// is fetched once, into $VIT_JAX_CACHE (by default
~/.cache/vit_jax), where it appears only when it is complete, and has the hash
that the server gives: x-goog-hash, or an ETag that is a hash. The environment
variable VIT_JAX_INSECURE=1, which the flag --insecure of the commands sets,
also allows http:// and another hash. Models on the Hugging Face Hub are fetched
by vit_jax/weights/hub.py.
"""

import base64
from collections.abc import Iterable, Iterator
import contextlib
import hashlib
import os
import re
import tempfile
import urllib.error
import urllib.request

from etils import epath

from vit_jax import console
from vit_jax.distributed import files
from vit_jax.weights import hub

INSECURE = 'VIT_JAX_INSECURE'
# Model in a published file's name -> a repository that holds the same weights.
_REPOSITORIES = {
  'ViT-B_16': 'google/vit-base-patch16-224-in21k',
  'ViT-B_32': 'google/vit-base-patch32-224-in21k',
  'ViT-L_16': 'google/vit-large-patch16-224-in21k',
  'ViT-L_32': 'google/vit-large-patch32-224-in21k',
  'ViT-H_14': 'google/vit-huge-patch14-224-in21k',
  'R26_S_32': 'timm/vit_small_r26_s32_224.augreg_in21k',
  'R50_L_32': 'timm/vit_large_r50_s32_224.augreg_in21k',
  'R_Ti_16': 'timm/vit_tiny_r_s16_p8_224.augreg_in21k',
  'Ti_16': 'timm/vit_tiny_patch16_224.augreg_in21k',
  'S_16': 'timm/vit_small_patch16_224.augreg_in21k',
  'S_32': 'timm/vit_small_patch32_224.augreg_in21k',
  'B_8': 'timm/vit_base_patch8_224.augreg_in21k',
  'B_16': 'timm/vit_base_patch16_224.augreg_in21k',
  'B_32': 'timm/vit_base_patch32_224.augreg_in21k',
  'L_16': 'timm/vit_large_patch16_224.augreg_in21k',
}


def elsewhere(path: str) -> str:
  """Returns a sentence with another source of the weights at `path`, or ''."""
  for name, repository in _REPOSITORIES.items():
    if name in path.rpartition('/')[2]:
      return (
        f'. The same weights are on Hugging Face: hf://{repository} (config.pretrained)'
      )
  if is_remote(path) and path.endswith(('.npz', '.csv')):
    return (
      '. The published weights are also at https://huggingface.co/google and '
      'https://huggingface.co/timm: give the name of a model there, hf://OWNER/NAME '
      '(config.pretrained)'
    )
  return ''


def is_remote(path: str) -> bool:
  """Returns whether `path` is a URL or in a bucket."""
  return str(path).startswith(('http://', 'https://', 'gs://'))


def local(path: str) -> epath.Path:
  """Returns where `fetch` puts a remote file; a path that is not remote itself."""
  if not is_remote(path):
    return epath.Path(path)
  name = path.split('?')[0].rpartition('/')[2]
  folder = hashlib.sha256(path.encode()).hexdigest()[:16]
  return epath.Path(console.cache_folder() / folder / name)


def fetch(path: str) -> epath.Path:
  """Returns the local path of a file; fetches a remote file first.

  Of a model on the hub it may be a folder, see vit_jax.weights.hub.fetch. A file
  in a bucket is tried without credentials first, then with those of this machine.
  FileNotFoundError or PermissionError if there is none or no access,
  OSError if it cannot be fetched or has another hash than the server gives,
  ValueError if the URL is not encrypted and VIT_JAX_INSECURE is not set.
  """
  path = str(path)
  if hub.is_at(path):
    return hub.fetch(path)
  if not is_remote(path):
    return epath.Path(path)
  target = local(path)
  if target.exists():
    return target
  url = path
  if path.startswith('gs://'):
    url = 'https://storage.googleapis.com/' + path.removeprefix('gs://')
  _check_encrypted(url)
  request = urllib.request.Request(url, headers={'User-Agent': 'vit_jax'})
  try:
    opener = urllib.request.build_opener(_Redirects())
    with opener.open(request, timeout=60) as response:
      length = response.headers.get('Content-Length')
      _write(
        iter(lambda: response.read(1 << 20), b''),
        target,
        int(length) if length else None,
        path,
        _hash_of(response.headers, moved=response.url != url),
      )
  except urllib.error.HTTPError as e:
    if path.startswith('gs://'):
      # Without access or a library for buckets, the first error counts.
      with contextlib.suppress(Exception):
        copy(path, str(target))
        return target
    kinds = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError}
    raise kinds.get(e.code, OSError)(
      f"'{path}' cannot be fetched: the server answers {e.code} {e.reason}"
      + elsewhere(path)
    ) from None
  except urllib.error.URLError as e:
    raise OSError(f"'{path}' cannot be fetched: {e.reason}{elsewhere(path)}") from None
  return target


def _is_insecure() -> bool:
  """Returns whether the user allows sources that cannot be trusted."""
  return os.environ.get(INSECURE, '') not in ('', '0')


def _check_encrypted(url):
  if url.startswith('http://') and not _is_insecure():
    raise ValueError(
      f"'{url}' is not encrypted, so that others can change what arrives: give "
      f'its https:// address, or allow it by --insecure ({INSECURE}=1)'
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
  """Follows redirections, but not from https:// to http://."""

  def redirect_request(self, req, fp, code, msg, headers, newurl):
    _check_encrypted(newurl)
    return super().redirect_request(req, fp, code, msg, headers, newurl)


def _hash_of(headers, moved: bool) -> tuple[str, str] | None:
  """Returns (algorithm, hexadecimal hash) of a file, if its server gives it.

  `headers` are those of the response, an email.message.Message; `moved` tells
  whether another server sent them, whose ETag may be anything.
  """
  if _is_insecure() or headers.get('Content-Encoding', 'identity') != 'identity':
    return None
  for part in ','.join(headers.get_all('x-goog-hash', [])).split(','):
    name, _, value = part.strip().partition('=')
    if name == 'md5':
      return 'md5', base64.b64decode(value).hex()
  # Amazon S3's ETag of a file that is encrypted there is no hash of the file.
  if headers.get('x-amz-server-side-encryption', 'AES256') != 'AES256':
    return None
  etag = '' if moved else headers.get('ETag', '')
  found = re.fullmatch('"([0-9a-f]{32}|[0-9a-f]{64})"', etag)
  if not found:
    return None
  return {32: 'md5', 64: 'sha256'}[len(found[1])], found[1]


@contextlib.contextmanager
def local_input(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a local path of a file; a remote file is copied for as long.

  ValueError for a pipe or a device, which may have no end.
  """
  if not files.is_remote(path):
    if not os.path.isfile(path):
      raise ValueError('it is a folder, a pipe or a device')
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    here = epath.Path(folder) / path.name
    copy(path, here)
    yield here


def copy(src: str, dst: str, progress: bool = True, block_size: int = 10 * 1024 * 1024):
  """Copies a file between any two places that etils.epath reaches.

  Args:
    src: the file to copy.
    dst: the copy; it appears only when it is complete.
    progress: whether to show a bar.
    block_size: bytes to read at a time.

  Raises:
    FileNotFoundError: if there is no such file.
  """
  source = epath.Path(src)
  if not source.is_file():
    raise FileNotFoundError(f"src='{src}' is no file: give the path of one")
  with source.open('rb') as f:
    _write(
      iter(lambda: f.read(block_size), b''),
      epath.Path(dst),
      source.stat().length,
      str(src) if progress else None,
    )


def _write(blocks: Iterable[bytes], target, length, label, expected=None):
  """Writes bytes, `length` if known, to a file; shows a bar if it has a label.

  The file appears only when it is complete. `expected` is (algorithm,
  hexadecimal hash) of the content, if it is known.
  """
  name, want = expected or ('md5', None)
  digest = hashlib.new(name, usedforsecurity=False)
  target.parent.mkdir(parents=True, exist_ok=True)
  written = 0
  bar = console.bar(
    total=length, unit='B', unit_scale=True, desc=label, disable=label is None
  )
  with bar, files.replacing(target) as f:
    for block in blocks:
      f.write(block)
      if want:
        digest.update(block)
      written += len(block)
      bar.update(len(block))
    if length is not None and written != length:
      raise OSError(
        f"'{label or target}' is incomplete: {written:,} of {length:,} bytes "
        'arrived; try again'
      )
    if want and digest.hexdigest() != want:
      raise OSError(
        f"'{label}' is not what the server has: its {name} is "
        f'{digest.hexdigest()}, and the server says {want}; try again. If the '
        f"server's word is no hash of the file, use --insecure ({INSECURE}=1)"
      )
