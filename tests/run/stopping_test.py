"""Tests of what is reported between a signal and the end of a run."""

from tests import processes

# The main thread is in a C function, as during a compilation, until the user has
# been told, or a minute has passed. Signals do not end pthread_mutex_lock.
WAITS = """
import ctypes, os, signal, threading, time
from vit_jax import console
from vit_jax.run import stopping
c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
said = []
def say(text):
  said.append(text)
  c.pthread_mutex_unlock(mutex)
console.say = say
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
  told = list(said)
  clock.cancel()
  assert stop.after(1)
  assert stop.signal == signal.SIGTERM
  os.kill(os.getpid(), signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) == before
assert signal.set_wakeup_fd(-1) == -1
with stopping.StopRequest() as stop:  # Another run of the same process.
  assert not stop.after(1)
print(told, said == told)
"""


def test_a_signal_during_a_compilation_is_answered_at_once():
  said = processes.run_code(WAITS).strip()
  assert said.startswith("['SIGTERM: stopping")
  assert said.endswith("'] True")  # Said once, before the compilation ended.
