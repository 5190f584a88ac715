"""Tests of the message between a signal and the end of a run."""

from tests import processes

# The main thread is in a C function, as during compilation, until the message is
# printed or a minute has passed. Signals do not interrupt pthread_mutex_lock.
WAITS = """
import ctypes, os, signal, threading, time
from vit_jax import console
from vit_jax.run import stopping
c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
messages = []
def log(text):
  messages.append(text)
  c.pthread_mutex_unlock(mutex)
console.log = log
def send():
  time.sleep(0.5)
  os.kill(os.getpid(), signal.SIGTERM)
before = signal.getsignal(signal.SIGTERM)
with stopping.StopRequest() as stop:
  c.pthread_mutex_lock(mutex)
  threading.Thread(target=send).start()
  clock = threading.Timer(60, c.pthread_mutex_unlock, [mutex])
  clock.start()
  c.pthread_mutex_lock(mutex)
  early = list(messages)
  clock.cancel()
  assert stop.after(1)
  assert stop.signal == signal.SIGTERM
  os.kill(os.getpid(), signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) == before
assert signal.set_wakeup_fd(-1) == -1
with stopping.StopRequest() as stop:  # Another run in the same process.
  assert not stop.after(1)
print(early, messages == early)
"""


def test_signal_during_compilation_is_acknowledged_immediately():
  output = processes.run_code(WAITS).strip()
  assert output.startswith("['SIGTERM: stopping")
  assert output.endswith("'] True")  # Printed once, before compilation ended.


# The process has a terminal, which is closed.
HANGUP = """
import os, signal, sys
from vit_jax import console
from vit_jax.run import stopping
output = os.dup(1)
master, slave = os.openpty()
for stream in (1, 2):
  os.dup2(slave, stream)
os.close(slave)
with stopping.StopRequest() as stop:
  os.close(master)
  os.kill(os.getpid(), signal.SIGHUP)
  assert stop.after(1)
  console.log('Stopping: saving step 1 ...')
assert stop.signal == signal.SIGHUP
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.
with stopping.StopRequest() as stop:
  os.kill(os.getpid(), signal.SIGHUP)
  assert not stop.after(1)
os.write(output, b'resumable')
"""


def test_a_closed_terminal_stops_a_run_unless_nohup_started_it():
  assert processes.run_code(HANGUP) == 'resumable'
