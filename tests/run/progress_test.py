"""Tests of the progress display."""

import io
import sys

from vit_jax import console
from vit_jax.run import loop


def advance():
  progress = loop.Progress(0, 4, 8)
  progress.start(0)
  for step in (1, 2):
    progress.update(step)
  progress.show(2, 0.5, 800.0)
  progress.set_postfix(1, 'accuracy_test 75.00 %')
  progress.close()


def test_terminal_shows_a_bar_with_the_last_evaluation(monkeypatch, capsys):
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, 'stderr', terminal)
  assert console.kind_of_output() == 'terminal'
  advance()
  shown = terminal.getvalue().split('\r')[-1]
  assert '2/4' in shown
  assert 'loss 0.5000, 800 img/s, accuracy_test 75.00 %' in shown
  assert not capsys.readouterr().out


def test_log_shows_lines(capsys):
  assert console.kind_of_output() == 'log'
  advance()
  out, err = capsys.readouterr()
  assert out == 'step 2/4  loss 0.5000  800 img/s  0s left\n'
  assert not err


def test_speed_excludes_pauses_and_compilation(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(loop.time, 'perf_counter', lambda: now[0])
  progress = loop.Progress(0, 10, 8)
  with progress.pause(steps=1):  # The first step.
    now[0] += 100
  progress.start(1)
  assert progress.rate(1) is None
  now[0] += 2
  with progress.pause(steps=1):  # Step 3 compiles for another image size.
    now[0] += 50
  with progress.pause():  # An evaluation.
    now[0] += 30
  assert progress.rate(4) == 2 * 8 / 2
  now[0] += 4
  assert progress.rate(5) == 8 / 4
  progress.close()
