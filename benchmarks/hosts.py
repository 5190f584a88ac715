"""Times what many processes agree on before a run, and what it costs the service.

The processes are threads of a few operating-system processes, each with its own client
of one coordination service on this machine: the calls are real, the hosts are not.
"""

import argparse
import itertools
import multiprocessing
from multiprocessing.connection import Connection
import os
import resource
import socket
import threading
import time

from benchmarks import timing

CLIENTS = (32, 128, 512, 1024)
GROUPS = 4  # Operating-system processes that hold the clients.
GATHERS = 5


class _PerThread:
  """The client, number and calls of a process, for its thread."""

  def __init__(self):
    self.of = threading.local()

  def __next__(self) -> int:
    return next(self.of.calls)


def _serve(address: str, clients: int, pipe: Connection) -> None:
  """Runs the service; sends its CPU seconds when asked."""
  from jax._src.lib import _jax

  service = _jax.get_distributed_runtime_service(address, clients)
  pipe.send('ready')
  while pipe.recv() == 'cpu':
    used = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send(used.ru_utime + used.ru_stime)
  del service
  os._exit(0)


def _play(members: range, clients: int, address: str, pipe: Connection) -> None:
  """Plays some processes of a run: each gathers 32 characters, several times."""
  import jax
  from jax._src.lib import _jax

  from vit_jax.distributed import heartbeats, processes

  threads = _PerThread()
  processes._numbers = threads  # pylint: disable=protected-access
  heartbeats.client = lambda: threads.of.client
  jax.process_index = lambda: threads.of.number
  jax.process_count = lambda: clients
  connected = threading.Barrier(len(members) + 1)
  begin = threading.Event()
  seconds, open_clients = [], []  # A client that is deleted waits for the others.

  def run(number: int) -> None:
    threads.of.number = number
    threads.of.calls = itertools.count()
    threads.of.client = _jax.get_distributed_runtime_client(
      address, number, init_timeout=300, use_compression=True
    )
    threads.of.client.connect()
    open_clients.append(threads.of.client)
    processes.gather('beginning', 0)
    connected.wait()
    begin.wait()
    for i in range(GATHERS):
      start = time.monotonic()
      gathered = processes.gather(f'comparing {i}', f'{number:032d}')
      if not number:
        seconds.append(time.monotonic() - start)
      assert gathered == [f'{i:032d}' for i in range(clients)]
    connected.wait()

  for number in members:
    threading.Thread(target=run, args=[number], daemon=True).start()
  connected.wait()
  pipe.send('connected')
  pipe.recv()
  begin.set()
  connected.wait()
  pipe.send(seconds)
  pipe.recv()
  os._exit(0)


def measure(clients: int) -> tuple[list[float], float]:
  """Returns the seconds of each gather, and the service's CPU seconds of one."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    address = f'127.0.0.1:{free.getsockname()[1]}'
  start = multiprocessing.get_context('spawn')
  pipes = []
  targets = [(_serve, (address, clients))]
  for i in range(GROUPS):
    members = range(i, clients, GROUPS)
    targets.append((_play, (members, clients, address)))
  for target, args in targets:
    parent_end, child_end = start.Pipe()
    start.Process(target=target, args=(*args, child_end), daemon=True).start()
    pipes.append(parent_end)
  service, *players = pipes
  for pipe in pipes:
    pipe.recv()
  service.send('cpu')
  before = service.recv()
  for pipe in players:
    pipe.send('begin')
  seconds = []
  for pipe in players:
    seconds += pipe.recv()
  service.send('cpu')
  cpu = (service.recv() - before) / GATHERS
  for pipe in pipes:
    pipe.send('end')
  return seconds, cpu


def rows(args: argparse.Namespace) -> list[dict]:
  """Times gathers of several numbers of processes."""
  del args
  table = []
  for clients in CLIENTS:
    seconds, cpu = measure(clients)
    table.append(timing.row(f'gather of {clients} processes', seconds, 's'))
    table.append(timing.row('  CPU of the service', [cpu], 's'))
  return table
