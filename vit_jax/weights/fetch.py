"""Fetches remote files into a cache and copies files, with a progress bar.

A file at https:// or gs:// is fetched once, into $VIT_JAX_CACHE (by default
~/.cache/vit_jax), where it appears only when it is complete.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import hashlib
import os
import tempfile
import urllib.error
import urllib.request

from etils import epath

from vit_jax import cli

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
        '. The same weights are on Hugging Face: '
        f'https://huggingface.co/{repository}/resolve/main/model.safetensors '
        '(config.pretrained)'
      )
  if is_remote(path) and path.endswith(('.npz', '.csv')):
    return (
      '. The published weights are also at https://huggingface.co/google and '
      'https://huggingface.co/timm: give the URL of a model.safetensors '
      '(config.pretrained)'
    )
  return ''


def is_remote(path: str) -> bool:
  """Returns whether `path` is a URL or in a bucket."""
  return str(path).startswith(('http://', 'https://', 'gs://'))


def fetch(path: str) -> epath.Path:
  """Returns the local path of a file; fetches a remote file first.

  Args:
    path: a local path, a URL, or gs://bucket/file. Buckets are tried without
      credentials first, then with those of this machine.

  Raises:
    FileNotFoundError: if there is no such file.
    PermissionError: if access is denied.
    OSError: if the file cannot be fetched.
  """
  path = str(path)
  if not is_remote(path):
    return epath.Path(path)
  name = path.split('?')[0].rpartition('/')[2]
  target = (
    cli.cache_folder() / hashlib.sha256(path.encode()).hexdigest()[:16] / name
  )
  if target.exists():
    return epath.Path(target)
  url = path
  if path.startswith('gs://'):
    url = 'https://storage.googleapis.com/' + path.removeprefix('gs://')
  request = urllib.request.Request(url, headers={'User-Agent': 'vit_jax'})
  try:
    with urllib.request.urlopen(request, timeout=60) as response:
      length = response.headers.get('Content-Length')
      _write(
        iter(lambda: response.read(1 << 20), b''),
        target,
        int(length) if length else None,
        path,
      )
  except urllib.error.HTTPError as e:
    if path.startswith('gs://') and _copy_from_bucket(path, target):
      return epath.Path(target)
    kind = FileNotFoundError if e.code == 404 else PermissionError
    if e.code not in (401, 403, 404):
      kind = OSError
    raise kind(
      f"'{path}' cannot be fetched: the server answers {e.code} {e.reason}"
      + elsewhere(path)
    ) from None
  except urllib.error.URLError as e:
    raise OSError(
      f"'{path}' cannot be fetched: {e.reason}{elsewhere(path)}"
    ) from None
  return epath.Path(target)


def _copy_from_bucket(path, target):
  """Copies with this machine's credentials; returns whether that worked."""
  try:
    copy(path, str(target))
  except Exception:  # pylint: disable=broad-except
    return False  # No access either, or no library for buckets.
  return True


def is_elsewhere(path: epath.Path) -> bool:
  """Returns whether `path` has a scheme of epath, such as gs://."""
  return '://' in str(path)


@contextlib.contextmanager
def local_input(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a local path of a file, for libraries that read local files only.

  A remote file is copied for the duration of the `with` block.
  """
  if not is_elsewhere(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    here = epath.Path(folder) / path.name
    copy(path, here)
    yield here


@contextlib.contextmanager
def local_output(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a local path to write to, for libraries that write local files only.

  The file is copied to `path` afterwards if `path` is remote.
  """
  if not is_elsewhere(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    here = epath.Path(folder) / path.name
    yield here
    copy(here, path)


def copy(
  src: str, dst: str, progress: bool = True, block_size: int = 10 * 1024 * 1024
):
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


def _write(blocks: Iterable[bytes], target, length, label):
  """Writes blocks to a file; shows a bar if there is a label."""
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = target.parent / f'.{target.name}.{os.getpid()}.tmp'
  written = 0
  bar = cli.bar(
    total=length, unit='B', unit_scale=True, desc=label, disable=label is None
  )
  try:
    with bar, temporary.open('wb') as f:
      for block in blocks:
        f.write(block)
        written += len(block)
        bar.update(len(block))
    if length is not None and written != length:
      raise OSError(
        f"'{label or target}' is incomplete: {written:,} of {length:,} bytes "
        'arrived; try again'
      )
    temporary.replace(target)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise
