r"""Times five small jobs and compares them with the last time, in a checkout:

  python -m benchmarks.track /tmp/track.jsonl

Run it before and after a change, on the same idle machine; each run appends a line of
JSON to the file. Jobs (choose with --only):

  start     seconds from the start of the process to the first step, on the digits
  digits    images a second of training, 200 steps of configs/digits.py
  fashion   images a second of one epoch of configs/fashion_mnist.py, and its test loss
            (prepared by `python -m benchmarks.mnist`)
  predict   images a second of `vit_jax predict`, 500 photographs, with the digits' run
  pipeline  images a second of 224 px crops, from JPEGs of 500x375

A large matrix product is timed too, since the speed of shared machines varies: each
job's speed relative to the last run is printed as it is, and divided by the product's.
The losses show whether the jobs still compute the same.
"""

from collections.abc import Callable, Sequence
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types

from benchmarks import pipeline, start, timing
from vit_jax import console
from vit_jax.commands import flags
from vit_jax.run import metrics, workdir as workdir_lib

_PHOTOS = 500


def _vit_jax(*args: str) -> float:
  """Runs a command of vit_jax; returns its seconds."""
  begin = time.perf_counter()
  done = subprocess.run(
    [sys.executable, '-m', 'vit_jax', *args], capture_output=True, text=True
  )
  if done.returncode:
    raise RuntimeError(f'vit_jax {" ".join(args)} failed:\n{done.stdout}{done.stderr}')
  return time.perf_counter() - begin


def _trained(config: str, workdir: pathlib.Path, *args: str) -> dict:
  """Trains; returns the median speed, in images a second, and the last losses."""
  _vit_jax('train', f'--config={config}', f'--workdir={workdir}', *args)
  speeds = []
  losses = {}
  for line in metrics.read(workdir):
    if 'img_sec_core_train' in line:
      speeds.append(line['img_sec_core_train'])
    for key in ('train_loss', 'loss_test'):
      if key in line:
        losses[key] = line[key]
  return {'value': statistics.median(speeds), 'unit': 'img/s', **losses}


def _start(folder: pathlib.Path) -> dict:
  [row] = start.start_rows(types.SimpleNamespace(repeats=2))
  return {'value': row['median'], 'unit': 's'}


def _digits(folder: pathlib.Path) -> dict:
  return _trained(
    'configs/digits.py',
    folder / 'digits',
    '--config.total_epochs=None',
    '--config.warmup_epochs=None',
    '--config.total_steps=200',
    '--config.warmup_steps=50',
    '--config.progress_every=20',
    '--config.log_images=0',
  )


def _fashion(folder: pathlib.Path) -> dict:
  return _trained(
    'configs/fashion_mnist.py',
    folder / 'fashion',
    '--config.total_epochs=1',
    '--config.warmup_epochs=0.1',
    '--config.progress_every=50',
    '--config.log_images=0',
  )


def _predict(folder: pathlib.Path) -> dict:
  if not (folder / 'digits').exists():
    _digits(folder)
  photos = folder / 'photos'
  pipeline.photographs(photos, count=_PHOTOS // 2)  # Two splits.
  seconds = _vit_jax(
    'predict',
    f'--workdir={folder / "digits"}',
    f'--out={folder / "table.csv"}',
    str(photos),
  )
  return {'value': _PHOTOS / seconds, 'unit': 'img/s'}


def _pipeline(folder: pathlib.Path) -> dict:
  throughput, _ = pipeline.speeds(['ours'], (500, 375), repeats=2)['ours']
  return {'value': statistics.median(throughput), 'unit': 'img/s'}


JOBS: dict[str, Callable[[pathlib.Path], dict]] = {
  'start': _start,
  'digits': _digits,
  'fashion': _fashion,
  'predict': _predict,
  'pipeline': _pipeline,
}


def _read(path: pathlib.Path) -> list[dict]:
  """Returns the results of earlier runs; [] without a file."""
  results = []
  lines = path.read_text().splitlines() if path.exists() else []
  for number, line in enumerate(lines, 1):
    try:
      result = json.loads(line)
      results.append({'product': result['product'], 'jobs': result['jobs']})
    except (ValueError, TypeError, KeyError):
      console.log(f'{path}: line {number} is not a result; it is ignored.')
  if lines and not results:
    raise ValueError(
      f"'{path}' is not a file of this program: use another (the argument FILE)"
    )
  return results


def _commit() -> str:
  process = subprocess.run(
    ['git', 'describe', '--always', '--dirty'], capture_output=True, text=True
  )
  return process.stdout.strip()


def compare(name: str, result: dict, before: dict | None, product: float) -> str:
  """Describes a job's result, compared with the last run.

  Args:
    name: of the job.
    result: its 'value' and 'unit' (img/s: more is better; s: less), and losses.
    before: the job's result in the last run; None if it has none.
    product: speed of the matrix product, relative to the last run.
  """
  text = f'{name:<9} {result["value"]:9.2f} {result["unit"]:<6}'
  if not before:
    return text
  ratio = result['value'] / before['value']
  speed = 1 / ratio if result['unit'] == 's' else ratio
  text += f' {speed:5.2f} x as fast ({speed / product:.2f} x relative to the product)'
  for key in ('train_loss', 'loss_test'):
    if result.get(key) != before.get(key):
      text += f'; {key} {before.get(key)} -> {result.get(key)}'
  return text


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the jobs, prints how they compare and appends their results to the file."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.track'
  parser.add_argument('file', metavar='FILE', type=pathlib.Path, help='lines of JSON')
  parser.add_argument('--only', nargs='+', choices=JOBS, help='jobs to time (all)')
  args = parser.parse_args(argv)
  flags.check_output('FILE', args.file)
  earlier = _read(args.file)
  with args.file.open('a+') as file:  # Fails before jobs run.
    file.seek(0)
    if not f'\n{file.read()}'.endswith('\n'):
      file.write('\n')  # The last line was cut.
  last = earlier[-1] if earlier else {'jobs': {}}
  size = timing.PRODUCT_SIZE
  product = 2e-9 * size**3 / timing.matrix_product('float32', size)()
  relative = product / last.get('product', product)
  line = {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'commit': _commit(),
    'machine': platform.processor() or platform.machine(),
    'versions': workdir_lib.versions(),
    'product': product,
    'jobs': {},
  }
  ratio = f' {relative:.2f} x as fast' if earlier else ''
  console.log(f'product   {product:9.2f} GFLOP/s{ratio}')
  with tempfile.TemporaryDirectory() as folder:
    for name in args.only or JOBS:
      result = line['jobs'][name] = JOBS[name](pathlib.Path(folder))
      console.log(compare(name, result, last['jobs'].get(name), relative))
  with args.file.open('a') as file:
    file.write(json.dumps(line) + '\n')


if __name__ == '__main__':
  console.quiet()
  try:
    main()
  except (RuntimeError, ValueError, OSError) as e:
    sys.exit(f'Error: {e}')
