"""Middleware that restricts the server of `vit_jax demo` to the page's requests.

Gradio's server fetches URLs and opens files named in a request. Everything that the
page does not need is rejected with the same response, which does not reveal which
files exist.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import contextlib
import ipaddress
import json
import os
import re
import socket
from typing import Any

from vit_jax import console

_EXTRA, _PURPOSE = 'demo', 'vit_jax demo'
requests = console.require('starlette.requests', _EXTRA, _PURPOSE)
responses = console.require('starlette.responses', _EXTRA, _PURPOSE)
middleware_lib = console.require('starlette.middleware', _EXTRA, _PURPOSE)
trustedhost = console.require('starlette.middleware.trustedhost', _EXTRA, _PURPOSE)

_FORM = 2**16  # Bytes of an upload around the content of the file.
_EVENT = 2**20  # Bytes of any other body, which is held in memory.
_STORED = 64  # Uploads are refused while this many of the largest are stored.
_FILE, _UPLOAD = '/gradio_api/file=', '/gradio_api/upload'
_EVENTS = '/gradio_api/queue/join', '/gradio_api/run/predict'
_ROUTES = re.compile(
  r'/|/(assets|static)/.+|/(config|theme\.css|favicon\.ico|robots\.txt)|'
  r'/gradio_api/(file=.+|heartbeat/\w+|queue/(join|data)|run/predict|cancel|reset|'
  r'upload|upload_progress|startup-events|app_id)'
)


def middleware(page: Any, folder: str, host: str, max_bytes: int) -> Sequence:
  """Returns the middleware of a page.

  Args:
    page: a gradio.Blocks, of which only its own events are accepted.
    folder: its files, a path without links.
    host: address of the server. On loopback, other host names are rejected, as
      protection against DNS rebinding.
    max_bytes: largest upload. Gradio limits each file of an upload, but neither
      their sum nor the other fields.
  """
  guard = middleware_lib.Middleware(_Guard, set(page.fns), folder, max_bytes)
  if not is_loopback(host):
    return [guard]
  hosts = middleware_lib.Middleware(
    trustedhost.TrustedHostMiddleware,
    allowed_hosts=['localhost', '127.0.0.1', '[::1]', host],
    www_redirect=False,
  )
  return [hosts, guard]


def is_loopback(host: str) -> bool:
  """Returns whether an address can be reached from this machine only."""
  return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def is_inside(path: Any, folder: str) -> bool:
  """Returns whether a value is the path of a file in a folder; reads nothing else."""
  return (
    isinstance(path, str)
    and path.startswith(folder + os.sep)
    and os.path.normpath(path) == path
    and os.path.isfile(path)
    and os.path.realpath(path) == path
  )


class _Guard:
  """Rejects requests that the page does not send."""

  def __init__(self, app: Any, events: Set[int], folder: str, max_bytes: int) -> None:
    self.app = app
    self.events = events
    self.folder = folder
    self.max_bytes = max_bytes

  async def __call__(
    self, scope: Mapping[str, Any], receive: Callable, send: Callable
  ) -> None:
    try:
      if scope['type'] == 'http':
        receive_body = await self._check_request(scope, receive)
        if receive_body is None:
          return
        receive = receive_body
      await self.app(scope, receive, send)
    except _Rejected as e:
      rejection = responses.PlainTextResponse(str(e), status_code=e.status)
      await rejection(scope, receive, send)

  async def _check_request(
    self, scope: Mapping[str, Any], receive: Callable
  ) -> Callable | None:
    """Returns a function to receive the body; None if the client has disconnected.

    Raises _Rejected for a request that the page does not send.
    """
    request = requests.Request(scope, receive)
    body = bytearray()
    if scope['path'] == _UPLOAD:
      if _size(self.folder) > _STORED * self.max_bytes:
        raise _Rejected(503, 'Too many uploads are stored: try again in ten minutes')
      receive = _limited(receive, self.max_bytes + _FORM)
    else:
      try:
        async for chunk in request.stream():
          body += chunk
          if len(body) > _EVENT:
            raise _Rejected(413, f'The body has more than {_EVENT} bytes')
      except requests.ClientDisconnect:
        return None
      receive = _again(body, receive)
    if not self._allows(scope['path'], request.headers, body):
      raise _Rejected(403, 'The page does not send such requests')
    return receive

  def _allows(
    self, path: str, headers: Mapping[str, str], body: bytes | bytearray
  ) -> bool:
    origin = headers.get('origin')
    host = headers.get('host', '')
    if origin not in (None, f'http://{host}', f'https://{host}'):
      return False
    if path.startswith(_FILE):
      return is_inside(path.removeprefix(_FILE), self.folder)
    try:
      content = json.loads(body or b'null', object_hook=self._check)
      if path in _EVENTS and content['fn_index'] not in self.events:
        return False
    except (ValueError, TypeError, KeyError, RecursionError):
      return False
    return _ROUTES.fullmatch(path) is not None

  def _check(self, value: dict) -> dict:
    """Raises for an object with a `path`, which Gradio would open or fetch."""
    if 'path' in value and not is_inside(value['path'], self.folder):
      raise ValueError(value)
    return value


def _size(folder: str) -> int:
  """Returns the number of bytes of the files below a folder."""
  size = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      with contextlib.suppress(FileNotFoundError):  # Deleted in the meantime.
        size += os.lstat(os.path.join(parent, name)).st_size
  return size


class _Rejected(Exception):
  """A request is answered with an HTTP status."""

  def __init__(self, status: int, text: str) -> None:
    super().__init__(text)
    self.status = status


def _limited(receive: Callable, max_bytes: int) -> Callable:
  """Returns a function like `receive` that raises _Rejected after some bytes."""
  size = 0

  async def read() -> Mapping[str, Any]:
    nonlocal size
    message = await receive()
    size += len(message.get('body', b''))
    if size > max_bytes:
      raise _Rejected(413, f'The upload has more than {max_bytes} bytes')
    return message

  return read


def _again(body: bytes | bytearray, receive: Callable) -> Callable:
  """Returns a function like `receive` that first returns a body already read."""
  messages = iter([{'type': 'http.request', 'body': bytes(body)}])

  async def read() -> Mapping[str, Any]:
    return next(messages, None) or await receive()

  return read
