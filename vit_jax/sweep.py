r"""Chooses a learning rate, or other values, and tests the best one.

  python -m vit_jax.sweep --config=configs/vit.py:b16,cifar10 \
    --values='config.base_lr=.001,.003,.01,.03' --workdir=/tmp/sweep

The protocol of the paper (table 4, B.1.1): each value is trained on a part of
the training data and compared on the rest, which is held out. The best value is
trained on all of the training data with several seeds, and tested. Prints the
mean and the standard deviation, and writes choice.csv, test.csv (and the same as
.json) and sweep.png to the workdir.

--values can be given several times: all combinations are tried. Without it, the
learning rates are those of the paper for the data sets of its table.

What is held out is the part that config.pp.train leaves: 'train[98%:]' for
'train[:98%]'. Of a folder or any other data hold out a part with
--held_out=10%, or name a split with --held_out=validation.

All runs lie side by side in the workdir, each as if vit_jax.main had trained
it. The same command goes on after an interruption; runs that are done are not
trained again, so that values and seeds can be added later.

Several machines share the work if they share the workdir: start the same command
on each, with --shard=0/4, --shard=1/4 and so on. The test begins when all runs of
the choice are done.
"""

import ast
from collections.abc import Sequence
import re
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from vit_jax import cli

say = cli.say


def define_flags() -> flags.FlagValues:
  """Returns the flags of this command."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config',
    None,
    'Config file of a training, with its argument after a colon.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'workdir', None, 'Folder for all runs; or gs://...', flag_values=values
  )
  flags.DEFINE_multi_string(
    'values',
    None,
    "Values to try: 'config.base_lr=.003,.01'; several times for a grid.",
    flag_values=values,
  )
  flags.DEFINE_string(
    'held_out',
    None,
    "Training data to choose on: '10%' or '200' (examples) of the end of "
    "config.pp.train, or a split, 'validation'. Default: what config.pp.train "
    'leaves of its split.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'metric',
    None,
    "Metric to choose by: 'accuracy', 'loss'. Default: that of "
    'config.best_metric.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'seeds',
    3,
    'Runs of the test, with the seeds config.seed, config.seed + 1, ...',
    flag_values=values,
  )
  flags.DEFINE_string(
    'refit',
    'all',
    "Data that the winner is trained on: 'all' of the training data, as in the "
    "paper, or the same 'part' as for the choice, as in the original's configs.",
    flag_values=values,
  )
  flags.DEFINE_string(
    'shard',
    '0/1',
    'i/n: of n machines this one, number i from 0 on, trains every n-th run.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'checkpoints',
    'newest',
    "Checkpoints to keep of a run that is done: 'all', the 'newest' or 'none'.",
    flag_values=values,
  )
  cli.define_process_flags(values)
  return values


def _shard(text: str) -> tuple[int, int]:
  """Parses '1/4'."""
  match = re.fullmatch(r'(\d+)/(\d+)', text)
  if not match or not int(match[1]) < int(match[2]):
    raise ValueError(
      f"shard='{text}' must be i/n, number i from 0 to n - 1 of n machines: 0/4, "
      '1/4, 2/4, 3/4 (--shard)'
    )
  return int(match[1]), int(match[2])


def parse_values(texts: Sequence[str]) -> dict[str, list]:
  """Parses 'config.base_lr=.001,.01' to {'base_lr': [0.001, 0.01]}.

  Args:
    texts: one for each key. Values are Python's, or words without quotes.

  Raises:
    ValueError: if a text has another form, or a key occurs twice.
  """
  found = {}
  for text in texts:
    key, equals, listed = text.partition('=')
    key = key.strip().lstrip('-').removeprefix('config.')
    if not equals or not key or not listed.strip():
      raise ValueError(
        f"values='{text}' must be KEY=VALUE,VALUE,... as in "
        "'config.base_lr=.003,.01,.03' (--values)"
      )
    if key in found:
      raise ValueError(f"'{key}' is given twice: give all its values at once")
    try:
      found[key] = list(ast.literal_eval(f'[{listed}]'))
    except (ValueError, SyntaxError):
      found[key] = [_literal(word.strip()) for word in listed.split(',')]
  return found


def _literal(word: str):
  try:
    return ast.literal_eval(word)
  except (ValueError, SyntaxError):
    return word


def parse(argv: list[str]) -> flags.FlagValues:
  """Parses and checks the flags; raises ValueError for wrong ones."""
  values = define_flags()
  rest = cli.parse_flags(argv, values)[1:]
  if rest:
    raise ValueError(f'unknown arguments {rest}: flags begin with --')
  for name, example in (('config', 'FILE'), ('workdir', 'FOLDER')):
    if not getattr(values, name):
      raise ValueError(f'--{name}={example} is needed (see --help)')
  _shard(values.shard)
  return values


def _run(values) -> int:
  """Trains the runs of this machine; returns the exit status."""
  cli.load_tensorflow()
  from vit_jax import train
  from vit_jax.jobs import sweep

  tried = parse_values(values.values) if values.values else None
  try:
    found = sweep.sweep(
      values.config,
      values.workdir,
      tried,
      values.held_out,
      values.seeds,
      values.refit,
      values.metric,
      _shard(values.shard),
      values.checkpoints,
    )
  except train.Interrupted as e:
    say(str(e))
    return 128 + e.signal
  if found['missing']:
    say(
      'When the other machines are done, this goes on:\n  '
      + shlex.join(['python', '-m', 'vit_jax.sweep', *sys.argv[1:]])
    )
  return 0


def main() -> int | None:
  """Runs the sweep of the command line; returns the exit status."""
  if {'-h', '--help', '--helpfull'} & set(sys.argv):
    print(__doc__ + '\n' + define_flags().get_help())
    return None
  values = parse(sys.argv)
  cli.quiet()
  cli.avoid_libtpu()
  # Imported late, so that --help and errors in flags are fast.
  from vit_jax.run import config as run_config
  from vit_jax.scale import processes

  run_config.check_values(values.config)
  with processes.connected(**cli.process_flags(values)):
    return _run(values)


if __name__ == '__main__':
  cli.run(main)
