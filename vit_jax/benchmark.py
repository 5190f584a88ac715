"""Times the steps that users wait for: `vit_jax benchmark`."""

import json
import pathlib
import platform

import jax

from vit_jax import cli
from vit_jax.benchmarks import pipeline
from vit_jax.benchmarks import sampling
from vit_jax.benchmarks import start
from vit_jax.benchmarks import steps

# Name of a section -> function from the arguments to rows of the table.
SECTIONS = {
  'import': start.import_rows,
  'start': start.start_rows,
  'train': steps.train_rows,
  'inference': steps.inference_rows,
  'pipeline': pipeline.rows,
  'weights': start.weights_rows,
  'sampling': sampling.rows,
}


def run(args) -> None:
  """Times the sections that the flags of `vit_jax benchmark` name."""
  for section in args.only or ():
    if section not in SECTIONS:
      raise ValueError(
        f"only='{section}' is unknown: use one of {', '.join(SECTIONS)} (--only)"
      )
  steps.check(args)
  device = jax.devices()[0]
  machine = {
    'device': device.device_kind,
    'platform': device.platform,
    'num_devices': jax.device_count(),
    'processor': platform.processor() or platform.machine(),
    'python': platform.python_version(),
    'jax': jax.__version__,
  }
  print(', '.join(f'{key} {value}' for key, value in machine.items()))
  results = {}
  for section in args.only or SECTIONS:
    results[section] = SECTIONS[section](args)
    for line in results[section]:
      print(_text(line), flush=True)
  if args.json:
    found = {'machine': machine, 'results': results}
    pathlib.Path(args.json).write_text(json.dumps(found, indent=1))


def _text(row):
  """Writes a row of the table."""
  words = [
    f'{row["name"]:<45} {row["median"]:>9.2f} {row["unit"]:<8} '
    f'({row["min"]:.2f} to {row["max"]:.2f})'
  ]
  if share := row.get('share_of_peak'):
    words.append(f'{100 * share:.0f} % of peak')
  if seconds := row.get('first_call_seconds'):
    words.append(f'compiled in {cli.duration(seconds)}')
  if peak := row.get('peak_bytes'):
    words.append(f'memory {cli.size(peak)}')
  return '  '.join(words)


if __name__ == '__main__':
  cli.run('benchmark')
