"""What visitors of the page of `vit_jax demo` may ask its server for.

Gradio's server does more than the page needs: it fetches addresses and opens
files that a request names. The middleware here answers the page's own requests
and refuses the rest, always in the same words, so that nobody learns from them
which files exist.
"""

from collections.abc import Sequence
import ipaddress
import json
import os
import re
import socket

from vit_jax import console

_WHAT = 'demo', 'the page of vit_jax demo'
requests = console.needed('starlette.requests', *_WHAT)
responses = console.needed('starlette.responses', *_WHAT)
middleware_lib = console.needed('starlette.middleware', *_WHAT)
trustedhost = console.needed('starlette.middleware.trustedhost', *_WHAT)

_FILE = '/gradio_api/file='
_EVENTS = '/gradio_api/queue/join', '/gradio_api/run/predict'
_ROUTES = re.compile(
  r'/|/(assets|static)/.+|/(config|theme\.css|favicon\.ico|robots\.txt)|'
  r'/gradio_api/(file=.+|heartbeat/\w+|queue/(join|data)|run/predict|cancel|reset|'
  r'upload|upload_progress|startup-events|app_id)'
)


def middleware(folder: str, host: str) -> Sequence:
  """Returns the middleware of a page, as FastAPI takes it.

  Args:
    folder: where the page keeps files; an absolute path without links.
    host: address on which the server listens. If only this machine can reach it,
      other names of the server are refused: another site's page could reach it
      under a name of its own, which then counts as that site's server.
  """
  found = [middleware_lib.Middleware(_Guard, folder=folder)]
  if is_loopback(host):
    names = ['localhost', '127.0.0.1', '[::1]', host]
    hosts = middleware_lib.Middleware(
      trustedhost.TrustedHostMiddleware, allowed_hosts=names, www_redirect=False
    )
    found.insert(0, hosts)
  return found


def is_loopback(host: str) -> bool:
  """Returns whether only this machine can reach a server on an address."""
  return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


def is_inside(path, folder: str) -> bool:
  """Returns whether a value that a visitor sent is the path of a file in a folder.

  The path is compared as text first, so that nothing outside is touched.
  """
  return (
    isinstance(path, str)
    and path.startswith(folder + os.sep)
    and os.path.normpath(path) == path
    and os.path.isfile(path)
    and os.path.realpath(path) == path
  )


class _Guard:
  """Refuses what the page does not ask for."""

  def __init__(self, app, folder):
    self.app, self.folder = app, folder

  async def __call__(self, scope, receive, send):
    if scope['type'] == 'http':
      request, body = requests.Request(scope, receive), b''
      if scope['path'] in _EVENTS:
        try:
          body = await request.body()
        except requests.ClientDisconnect:
          return
        receive = _again(body, receive)
      if not self._allows(scope['path'], request.headers, body):
        text = 'The page does not send such requests'
        refusal = responses.PlainTextResponse(text, status_code=403)
        await refusal(scope, receive, send)
        return
    await self.app(scope, receive, send)

  def _allows(self, path, headers, body) -> bool:
    origin, host = headers.get('origin'), headers.get('host', '')
    if origin not in (None, f'http://{host}', f'https://{host}'):
      return False
    if path.startswith(_FILE):
      return is_inside(path.removeprefix(_FILE), self.folder)
    try:
      json.loads(body or b'null', object_hook=self._check)
    except (ValueError, RecursionError):
      return False
    return _ROUTES.fullmatch(path) is not None

  def _check(self, value: dict):
    """Gradio takes each object with a `path` for a file, and fetches addresses."""
    if 'path' in value and not is_inside(value['path'], self.folder):
      raise ValueError(value)


def _again(body, receive):
  """Returns a function like `receive` that starts with a body that was read."""
  messages = iter([{'type': 'http.request', 'body': body}])

  async def read():
    return next(messages, None) or await receive()

  return read
