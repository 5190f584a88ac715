"""Fetches models from the Hugging Face Hub, and pushes models to it.

A model there is named hf://OWNER/NAME[@REVISION][/FILE], or by the URL of its
page or of a file. huggingface_hub keeps what it has fetched in its own cache,
finds the user's token (`hf auth login`, or HF_TOKEN), and works offline if
HF_HUB_OFFLINE=1 is set. Files in its cache are named by the hash that the hub
gives, with which their content is compared here.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import glob
import hashlib
import os
import re
from typing import Any

from etils import epath

from vit_jax import console

# Weights files in folders of timm, Hugging Face or open_clip, in order of preference.
# An index lists the files of a large model; a variant such as fp16 is part of a name.
FILES = (
  'model.safetensors',
  'model.safetensors.index.json',
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
  'model.safetensors.index.*.json',
  'model.*.safetensors',
  'pytorch_model.*.bin',
  'open_clip_model.safetensors',
  'open_clip_pytorch_model.bin',
  'adapter_model.safetensors',
  'adapter_model.bin',
)
INDEX = re.compile(r'(.+)\.(safetensors|bin)\.index(\.[\w*]+)?\.json')
_PLACES = ('hf://', 'https://huggingface.co/', 'https://hf.co/')
_FORM = 'hf://OWNER/NAME[@REVISION][/FILE]'
_LOG_IN = 'log in (hf auth login), or set HF_TOKEN'


def is_hub_path(path: epath.PathLike) -> bool:
  """Returns whether a path names a model, or a file of one, on the hub."""
  return str(path).startswith(_PLACES)


def parse(path: epath.PathLike) -> Any:
  """Returns the huggingface_hub.HfUri of a path; ValueError if it is wrong."""
  try:
    uri = _library(f"'{path}'").parse_hf_uri(str(path))
    if uri.type == 'model':
      return uri
    reason = f'but a {uri.type}'
  except ValueError as e:
    reason = str(e).partition("'. ")[2].strip(' .') or str(e)
  raise ValueError(f"'{path}' does not name a model on the hub, {reason}: pass {_FORM}")


def _library(purpose: str) -> Any:
  return console.require('huggingface_hub', 'interop', purpose)


def commit(path: epath.PathLike) -> str:
  """Returns the hash of the commit that a path's revision names now."""
  uri = parse(path)
  return _snapshot(path, uri, uri.revision, ()).name


def fetch(path: epath.PathLike, revision: str | None = None) -> epath.Path:
  """Fetches a file, or the weights of a model, with the JSON files next to it.

  Without a FILE in `path`, the first of FILES that the model has is fetched, and its
  local folder returned. `revision` is a commit that replaces the path's revision.

  FileNotFoundError if there is no such model, revision or file; PermissionError if
  the hub wants a token, or another one; OSError if the hub does not answer, or a file
  has another hash than there; ValueError if the path does not name a model.
  """
  uri = parse(path)
  revision = revision or uri.revision
  name = uri.path_in_repo
  # The next pattern is tried if the model has no file of the first.
  for pattern in [glob.escape(name)] if name else FILES:
    names = [pattern, *_shards(pattern)]
    folder = _snapshot(path, uri, revision, names)
    revision = folder.name  # The branch may move before the next call.
    if any(folder.glob(names[-1])):
      return folder / name
  missing = f"no file '{name}'" if name else f'none of {FILES}'
  raise FileNotFoundError(
    f"'{path}': the model has {missing}: name one of its files, see "
    f'{_page(uri)}/tree/{revision} ({_FORM})'
  )


def _shards(index: str) -> list[str]:
  """Returns a pattern of the files that an index lists; [] for another file."""
  match = INDEX.fullmatch(index)
  if not match:
    return []
  return [f'{match[1]}{match[3] or ""}-*.{match[2]}']


def check_push(path: epath.PathLike) -> None:
  """Raises an error unless a model can be pushed to hf://OWNER/NAME.

  Makes no request. ValueError for a wrong name, PermissionError without a token.
  """
  uri = parse(path)
  if uri.revision or uri.path_in_repo:
    raise ValueError(f"push='{path}' must be hf://OWNER/NAME (--push)")
  hub = _library(f"push='{path}'")
  alternative = 'or pass DST instead of --push'
  if hub.is_offline_mode():
    raise ValueError(
      f"push='{path}' needs the hub: unset HF_HUB_OFFLINE, {alternative}"
    )
  if hub.get_token() is None:
    raise PermissionError(
      f"push='{path}' needs a token with write access: {_LOG_IN}, {alternative}"
    )


def push(folder: epath.PathLike, path: epath.PathLike) -> str:
  """Uploads a local folder as a model and returns its URL.

  A model that does not exist is created. For the errors see `fetch`.
  """
  uri = parse(path)
  with _explaining(path, uri):
    api = _library(f"push='{path}'").HfApi()
    api.create_repo(uri.id, exist_ok=True)
    api.upload_folder(
      repo_id=uri.id, folder_path=folder, commit_message='Upload by vit_jax'
    )
  return _page(uri)


def _page(uri: Any) -> str:
  """Returns the URL of a model."""
  return dataclasses.replace(uri, revision=None, path_in_repo='').to_url()


def _snapshot(
  path: epath.PathLike, uri: Any, revision: str | None, names: Iterable[str]
) -> epath.Path:
  """Fetches files, and JSON next to them, to the commit's folder in the cache."""
  parent = uri.path_in_repo.rpartition('/')[0]
  parent = f'{glob.escape(parent)}/' if parent else ''
  patterns = [f'{parent}*.json', f'{parent}spiece.model', *names]
  with _explaining(path, uri):
    folder = epath.Path(
      _library(f"'{path}'").snapshot_download(
        uri.id,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=[f'{parent}*/*'],
        tqdm_class=console.bar,
      )
    )
  files: set[epath.Path] = set()
  for pattern in patterns:
    files.update(folder.glob(pattern))
  for file in files:
    _check_hash(path, os.path.realpath(file))
  return folder


def _check_hash(path: epath.PathLike, file: str) -> None:
  """Raises OSError unless a file of the cache has the hash that is its name."""
  expected = os.path.basename(file)
  if not re.fullmatch('[0-9a-f]{40}|[0-9a-f]{64}', expected):
    return  # On a system without links, the cache has the file's own name.
  digest = hashlib.sha256()
  if len(expected) == 40:  # Git's hash, of a small file.
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(b'blob %d\0' % os.path.getsize(file))
  with open(file, 'rb') as f:
    hashlib.file_digest(f, lambda: digest)
  if digest.hexdigest() != expected:
    raise OSError(
      f"'{path}' differs from the file on the hub: the {digest.name} of '{file}' is "
      f'{digest.hexdigest()}; delete that file and try again'
    )


@contextlib.contextmanager
def _explaining(path: epath.PathLike, uri: Any) -> Iterator[None]:
  """Turns the errors of huggingface_hub into one line each, with the remedy."""
  try:
    yield
  except Exception as e:  # The type of HTTP errors depends on the version.
    kind, reason = _explanation(e, uri)
    raise kind(f"'{path}' cannot be used: {reason}") from e


def _explanation(error: Exception, uri: Any) -> tuple[type[OSError], str]:
  """Returns the type of an error to raise, and the reason with the remedy."""
  from huggingface_hub import constants, errors

  if isinstance(error, errors.GatedRepoError):
    return PermissionError, (
      f'it is gated: accept the conditions at {_page(uri)}, then {_LOG_IN}'
    )
  if isinstance(error, errors.RepositoryNotFoundError):
    return FileNotFoundError, (
      f'the hub has no model {uri.id}, or it is private: check the name at '
      f'{constants.ENDPOINT}; for a private model {_LOG_IN}'
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return FileNotFoundError, (
      f"the model has no revision '{uri.revision}': choose a branch, a tag or a "
      f'commit of {_page(uri)}'
    )
  if isinstance(error, errors.LocalEntryNotFoundError):
    if constants.is_offline_mode():
      return OSError, (
        'HF_HUB_OFFLINE=1 is set, and it is not in the cache '
        f'{constants.HF_HUB_CACHE}: fetch it once with HF_HUB_OFFLINE=0'
      )
    cause = _short(error.__cause__ or error)
    return OSError, f'the hub does not answer ({cause}); try again'
  status = getattr(getattr(error, 'response', None), 'status_code', None)
  if status in (401, 403):
    return PermissionError, (
      f'the hub says: {_short(error)}; check the token: {_LOG_IN}'
    )
  return OSError, f'the hub says: {_short(error)}; try again'


def _short(error: BaseException) -> str:
  """Returns an error's message in one line."""
  return ' '.join(str(error).split())[:300] or type(error).__name__
