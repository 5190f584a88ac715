"""Tests of the program `vit_jax` and its commands."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import vit_jax
from vit_jax import __main__ as program, console
from vit_jax.commands import predict, train

ROOT = pathlib.Path(__file__).parents[1]


def run(*args, **environment):
  """Runs Python in a separate process."""
  return subprocess.run(
    [sys.executable, *args],
    capture_output=True,
    text=True,
    check=False,
    cwd='/',
    env={**os.environ, 'PYTHONPATH': str(ROOT), **environment},
  )


def status_of(function, *args):
  with pytest.raises(SystemExit) as error:
    function(*args)
  return error.value.code


def test_help_names_every_command(capsys):
  assert status_of(program.main, ['--help']) == 0
  out = capsys.readouterr().out
  for name, does in program.COMMANDS.items():
    assert f'  {name} ' in out
    assert does in out

  assert status_of(program.main, []) == 1
  assert out.strip() in capsys.readouterr().err


def test_version(capsys):
  assert status_of(program.main, ['--version']) == 0
  assert capsys.readouterr().out == f'vit_jax {vit_jax.__version__}\n'


def test_triton_is_imported_before_tensorflow(tmp_path):
  """Its import crashes after TensorFlow's."""
  (tmp_path / 'triton.py').write_text('')
  (tmp_path / 'tensorflow.py').write_text('import sys; order = [*sys.modules]')
  code = 'from vit_jax import console; console.import_tensorflow()'
  code += "; import tensorflow; assert 'triton' in tensorflow.order"
  process = run('-c', code, PYTHONPATH=f'{tmp_path}:{ROOT}')
  assert process.returncode == 0, process.stderr


def test_misspelt_command(capsys):
  assert status_of(program.main, ['trian', '--config=x']) == 1
  error = capsys.readouterr().err
  assert "there is no command 'trian': did you mean 'train'?" in error


def test_help_imports_nothing_slow():
  """Importing JAX takes a second or more, TensorFlow several."""
  done = run(
    '-c',
    'import sys\n'
    'from vit_jax import __main__ as program\n'
    'for name in program.COMMANDS:\n'
    '  try:\n'
    '    program.main([name, "--help"])\n'
    '  except SystemExit as e:\n'
    '    assert e.code == 0, name\n'
    'for name in ("jax", "numpy", "tensorflow", "flax", "ml_collections"):\n'
    '  assert name not in sys.modules, name\n',
  )
  assert done.returncode == 0, done.stderr
  for name in program.COMMANDS:
    assert f'usage: vit_jax {name} ' in done.stdout


ERRORS = {
  '--config.base_lrr=1': "no key 'base_lrr': did you mean 'base_lr'",
  '--config.batch=0': 'batch=0 must be an integer of at least 1',
  '--config.task_options.mixip=1': "did you mean 'task_options.mixup'",
  '--config.task_options.cutmix=x': "task_options.cutmix='x' must be a finite float32 number",
  '--config.warmup_steps=900': 'warmup_steps=900 must be below total_steps=500',
  '--config.decay_at=(0.3,)': 'a staircase needs the shares',
  '--config.dataset=/no/data': "dataset='/no/data' is not a folder that exists",
  '--config.pretrained=/no/weights.npz': "no weights file '/no/weights.npz'",
}


def test_errors_in_a_config_come_together_before_slow_imports():
  flags = ['--config=vit:b16,x', '--workdir=/no/run', *ERRORS]
  done = run(
    '-c',
    'import sys\n'
    'from vit_jax import __main__ as program\n'
    'try:\n'
    f'  program.main(["train", *{flags!r}])\n'
    'finally:\n'
    '  heavy = {"jax", "tensorflow", "flax", "orbax", "optax", "torch"}\n'
    '  assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n',
  )
  first, *lines = done.stderr.splitlines()
  assert (done.returncode, first) == (1, f'Error: {len(ERRORS)} errors:'), done.stderr
  for message in ERRORS.values():
    assert sum(message in line for line in lines) == 1, (message, lines)


@pytest.mark.parametrize('flag', ERRORS)
def test_one_error_in_a_config_is_one_line(flag, tmp_path, capsys):
  weights = tmp_path / 'ViT-B_16.npz'
  weights.touch()
  flags = [f'--config=vit:b16,{tmp_path}', f'--workdir={tmp_path}/run']
  flags += [f'--config.pretrained={weights}', flag]
  assert status_of(program.main, ['train', *flags]) == 1
  error = capsys.readouterr().err
  assert ERRORS[flag] in error
  assert error.count('\n') == 1


def test_missing_platform():
  code = (
    'import jax\n'
    'from vit_jax import __main__ as program\n'
    'from vit_jax.commands import visualize\n'
    'visualize.main = lambda argv: jax.devices()\n'
    'program.run("visualize")\n'
  )
  done = run('-c', code, JAX_PLATFORMS='rocm')
  assert done.returncode == 1
  line = done.stderr.splitlines()[-1]
  assert line.startswith('Error: JAX_PLATFORMS=rocm: ')
  assert 'unset JAX_PLATFORMS' in line
  assert 'Traceback' not in done.stderr


def test_exit_statuses(monkeypatch, capsys):
  results = iter([0, 7, KeyboardInterrupt(), ValueError('elsewhere')])

  def main(argv):
    result = next(results)
    if isinstance(result, int):
      return result
    raise result

  monkeypatch.setattr(predict, 'main', main)
  monkeypatch.setattr(console, 'exit_at_once', sys.exit)
  assert status_of(program.run, 'predict', []) == 0
  assert status_of(program.run, 'predict', []) == 7
  assert status_of(program.run, 'predict', []) == 130
  assert capsys.readouterr().err == 'Interrupted.\n'
  with pytest.raises(ValueError, match='elsewhere'):  # Not from this package.
    program.run('predict', [])
  monkeypatch.undo()
  assert status_of(program.run, 'predict', ['--top=x', 'a.png']) == 1
  error = capsys.readouterr().err
  assert error.startswith('Error: --top: ')
  assert "'x'" in error
  assert error.count('\n') == 1


_INTERRUPTED = """
import atexit, sys, types
from vit_jax import __main__ as program
atexit.register(print, 'shutdown')
def main(argv):
  print('computing')
  raise KeyboardInterrupt
sys.modules['vit_jax.commands.computing'] = types.SimpleNamespace(main=main)
program.run('computing', [])
"""


def test_ctrl_c_skips_the_shutdown_of_python():
  """It crashes while XLA computes."""
  process = run('-c', _INTERRUPTED)
  assert process.returncode == 130
  assert process.stdout == 'computing\n'
  assert process.stderr == 'Interrupted.\n'


_IMPORTING = """
import os, signal, sys
from vit_jax import __main__ as program
class Finder:
  def find_spec(self, name, *args):
    if name == 'vit_jax.commands.slow':
      try:
        os.kill(os.getpid(), signal.SIGINT)
        print('imported')
      except KeyboardInterrupt:
        print('swallowed')
sys.meta_path.insert(0, Finder())
program.run('slow', [])
"""


def test_ctrl_c_during_imports_ends_the_process():
  process = run('-c', _IMPORTING)
  assert process.returncode == -signal.SIGINT
  assert (process.stdout, process.stderr) == ('', '')


_TERMINATED = """
import os, signal, sys
from vit_jax import __main__ as program
from vit_jax.commands import flags
from vit_jax.distributed import files
from vit_jax.weights import convert
def write(*args, **options):
  with files.new_folder('model') as folder:
    (folder / 'weights').write_text('0')
    os.kill(os.getpid(), int(sys.argv[1]))
convert.convert = flags.load_model = write
program.run(sys.argv[2], sys.argv[3:])
"""


@pytest.mark.parametrize(
  'number, argv',
  [
    (signal.SIGTERM, ['convert', 'a.npz', 'model']),
    (signal.SIGHUP, ['export', '--workdir=a', '--to=onnx', '--out=model']),
  ],
)
def test_signals_leave_no_temporary_files(number, argv, tmp_path):
  process = subprocess.run(
    [sys.executable, '-c', _TERMINATED, str(int(number)), *argv],
    capture_output=True, text=True, check=False, cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  assert (process.returncode, process.stderr) == (130, 'Interrupted.\n')
  assert not list(tmp_path.iterdir())


def test_evaluate_has_two_names(monkeypatch):
  from vit_jax.commands import evaluate

  seen = []
  monkeypatch.setattr(evaluate.hosts, 'run', lambda args, _: seen.append(args))
  evaluate.main(['--workdir=/w', '--split=test', '--real=r.json'])
  train.main(['--workdir=/w', '--evaluate=test', '--real=r.json'])
  for args in seen:
    assert (args.workdir, args.evaluate, args.real) == ('/w', 'test', 'r.json')
  assert len(seen) == 2
  with pytest.raises(ValueError, match='--split=SPLIT'):
    evaluate.main(['--workdir=/w'])
  with pytest.raises(ValueError, match='--report= is for evaluation: .*--evaluate'):
    train.main(['--workdir=/w', '--config=configs/digits.py', '--report'])
  with pytest.raises(ValueError, match='--dataset=x .*--evaluate'):
    train.main(['--workdir=/w', '--config=configs/digits.py', '--dataset=x'])
  with pytest.raises(ValueError, match='--print, --run and --folds'):
    train.main(['--workdir=/w', '--evaluate=test', '--print'])


_LINES = """
import sys, types
from vit_jax import __main__ as program
module = types.ModuleType('vit_jax.commands.lines')
module.main = lambda argv: print('line\\n' * 100_000) or 0
sys.modules['vit_jax.commands.lines'] = module
program.run('lines', [])
"""


_NAMES = """
import sys, types
from vit_jax import __main__ as program, console
def main(argv):
  with console.hidden_stderr():
    console.log('日本 ' + str(len(sys.stdin.read())))
  return 3
module = types.ModuleType('vit_jax.commands.names')
module.main = main
sys.modules['vit_jax.commands.names'] = module
program.run('names', [])
"""


@pytest.mark.parametrize(
  ('closed', 'stdout'),
  [
    ('<&-', '日本 0\n'),
    ('>&-', ''),
    ('2>&-', '日本 0\n'),
    ('<&- >&- 2>&-', ''),
  ],
)
def test_closed_streams_do_not_end_a_command(closed, stdout):
  """As in a job that cron or a daemon starts."""
  command = ['sh', '-c', f'exec "$@" {closed}', 'sh', sys.executable, '-c', _NAMES]
  process = subprocess.run(
    command, stdin=subprocess.DEVNULL, capture_output=True, check=False
  )
  assert process.returncode == 3
  assert process.stderr == b''
  assert process.stdout.decode() == stdout


def test_names_that_the_terminal_cannot_encode_are_escaped():
  process = run('-c', _NAMES, PYTHONIOENCODING='ascii')
  assert process.returncode == 3
  assert process.stdout == '\\u65e5\\u672c 0\n'


def test_closed_pipe_ends_a_command_silently():
  """As in `vit_jax predict ... | head -1`."""
  with subprocess.Popen(
    [sys.executable, '-c', _LINES], stdout=subprocess.PIPE, stderr=subprocess.PIPE
  ) as process:
    assert process.stdout.readline() == b'line\n'
    process.stdout.close()
    errors = process.stderr.read()
  assert process.returncode == 141
  assert errors == b''
