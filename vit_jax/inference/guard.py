"""Middleware that restricts the server of `vit_jax demo` to the page's requests.

Gradio's server fetches URLs and opens files named in a request. Everything that the
page does not need is rejected with the same response, which does not reveal which
files exist.
"""

from collections.abc import Callable, Sequence
import ipaddress
import json
import os
import re
import socket

from vit_jax import console

_WHAT = 'demo', 'vit_jax demo'
requests = console.needed('starlette.requests', *_WHAT)
responses = console.needed('starlette.responses', *_WHAT)
middleware_lib = console.needed('starlette.middleware', *_WHAT)
trustedhost = console.needed('starlette.middleware.trustedhost', *_WHAT)

_FORM = 2**16  # Bytes of an upload around the content of the file.
_FILE, _UPLOAD = '/gradio_api/file=', '/gradio_api/upload'
_EVENTS = '/gradio_api/queue/join', '/gradio_api/run/predict'
_ROUTES = re.compile(
  r'/|/(assets|static)/.+|/(config|theme\.css|favicon\.ico|robots\.txt)|'
  r'/gradio_api/(file=.+|heartbeat/\w+|queue/(join|data)|run/predict|cancel|reset|'
  r'upload|upload_progress|startup-events|app_id)'
)


def middleware(page, folder: str, host: str, largest: int) -> Sequence:
  """Returns the middleware of a page with files in a folder, a path without links.

  Only the page's events are accepted, and bodies of at most `largest` bytes. Gradio
  limits each file of an upload, but neither their sum nor the other fields. On loopback, other host names are rejected, as protection
  against DNS rebinding.
  """
  args = set(page.fns), folder, largest
  found = [middleware_lib.Middleware(_Guard, *args)]
  if is_loopback(host):
    names = ['localhost', '127.0.0.1', '[::1]', host]
    hosts = middleware_lib.Middleware(
      trustedhost.TrustedHostMiddleware, allowed_hosts=names, www_redirect=False
    )
    found.insert(0, hosts)
  return found


def is_loopback(host: str) -> bool:
  """Returns whether an address can be reached from this machine only."""
  return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def is_inside(path, folder: str) -> bool:
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

  def __init__(self, app, events, folder, largest):
    self.app, self.events, self.folder, self.largest = app, events, folder, largest

  async def __call__(self, scope, receive, send):
    if scope['type'] == 'http':
      request, body, status = requests.Request(scope, receive), bytearray(), None
      if scope['path'] != _UPLOAD:
        try:
          async for chunk in request.stream():
            body += chunk
            if len(body) > self.largest:
              status, text = 413, f'The body has more than {self.largest} bytes'
              break
        except requests.ClientDisconnect:
          return
        receive = _again(body, receive)
      else:
        receive = _limited(receive, self.largest + _FORM)
      if not status and not self._allows(scope['path'], request.headers, body):
        status, text = 403, 'The page does not send such requests'
      if status:
        refusal = responses.PlainTextResponse(text, status_code=status)
        await refusal(scope, receive, send)
        return
    try:
      await self.app(scope, receive, send)
    except _TooLarge as e:
      refusal = responses.PlainTextResponse(str(e), status_code=413)
      await refusal(scope, receive, send)

  def _allows(self, path, headers, body) -> bool:
    origin, host = headers.get('origin'), headers.get('host', '')
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


class _TooLarge(Exception):
  """The body of an upload is too large."""


def _limited(receive: Callable, largest: int) -> Callable:
  """Returns a function like `receive` that raises _TooLarge after some bytes."""
  size = 0

  async def read():
    nonlocal size
    message = await receive()
    size += len(message.get('body', b''))
    if size > largest:
      raise _TooLarge(f'The upload has more than {largest} bytes')
    return message

  return read


def _again(body, receive):
  """Returns a function like `receive` that first returns a body already read."""
  messages = iter([{'type': 'http.request', 'body': bytes(body)}])

  async def read():
    return next(messages, None) or await receive()

  return read
