"""Tests of what commands print: control characters of strangers' texts."""

import logging as python_logging
import subprocess
import sys

from absl import logging
import pytest

from tests import processes
from vit_jax import __main__ as main, console

# Sets the title of a terminal, clears it, overwrites a line; a file name in Latin-1.
HOSTILE = '\x1b]0;owned\x07\x1b[2Jcat\r\x9b31m\u202egnp.exe\x7f\udcff'
SHOWN = r'\x1b]0;owned\x07\x1b[2Jcat\r\x9b31m\u202egnp.exe\x7f\udcff'


@pytest.mark.parametrize(
  'text, expected',
  [
    (HOSTILE, SHOWN),
    ('two\nlines\tand a tab', 'two\nlines\tand a tab'),
    ('Kätzchen 猫 🐈 \u200d עברית', 'Kätzchen 猫 🐈 \u200d עברית'),
    ('\u061c\u200e\u2066\u2069\x85\x00', r'\u061c\u200e\u2066\u2069\x85\x00'),
    (r'back\slash', r'back\slash'),
  ],
)
def test_control_characters_become_visible(text, expected):
  assert console.printable(text) == expected


def test_all_lines_are_printable(capsys, monkeypatch):
  console.log(HOSTILE)
  console.log_error(HOSTILE)
  with console.status(HOSTILE):
    pass
  stdout, stderr = capsys.readouterr()
  assert stdout == f'{SHOWN}\n{SHOWN} ...\n'
  assert stderr == f'{SHOWN}\n'
  monkeypatch.setattr(console, 'kind_of_output', lambda _: 'terminal')
  with console.bar(sys.stdout, desc=HOSTILE, total=1) as bar:
    bar.update()
  assert SHOWN in capsys.readouterr().out


def test_warnings_are_printable(capsys, monkeypatch):
  handler = logging.get_absl_handler()
  monkeypatch.setattr(handler, 'filters', [])
  before = handler.python_handler.formatter, logging.get_verbosity()
  console.quiet()
  monkeypatch.setattr(handler.python_handler, 'stream', sys.stderr)
  # pytest-xdist cannot send a log with a surrogate, the last character.
  logging.warning('Skipped: %s', HOSTILE[:-1])
  assert capsys.readouterr().err == f'WARNING: Skipped: {SHOWN[:-6]}\n'
  handler.setFormatter(before[0])
  logging.set_verbosity(before[1])
  python_logging.getLogger('asyncio').setLevel(python_logging.NOTSET)


_RETRYING = """
from vit_jax import console
console.quiet()
from huggingface_hub.utils import logging
logging.get_logger('huggingface_hub.utils').warning('Retrying in 1s.')
"""


def test_warnings_of_the_hub_are_printed_once():
  process = subprocess.run(
    [sys.executable, '-c', _RETRYING], capture_output=True, text=True, check=True
  )
  assert process.stderr == 'Retrying in 1s.\n'


def test_the_error_of_a_command_is_printable(capsys):
  with pytest.raises(SystemExit):
    main.main(['index', f'/absent/{HOSTILE[:-1]}'])
  assert f'/absent/{SHOWN[:-6]}' in capsys.readouterr().err


_IN_CALLBACK = """
import gc, os, signal, time
from vit_jax import console
console.quiet()
def interrupt(phase, info):
  gc.callbacks.remove(interrupt)
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(0)
gc.callbacks.append(interrupt)
try:
  gc.collect()
  time.sleep(60)
except KeyboardInterrupt:
  print('interrupted')
"""


def test_ctrl_c_in_a_callback_is_not_lost():
  assert processes.run_code(_IN_CALLBACK) == 'interrupted\n'
