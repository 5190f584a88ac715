"""Compares fine-tuning with training from scratch on the same few labels.

python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer
"""

import json

import ml_collections

from vit_jax import cli
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib
from vit_jax.studies import tables

say = cli.say
_NAMES = {'finetune': 'fine-tuned', 'scratch': 'from scratch'}
_METRIC = 'accuracy_test'


def transfer(config: ml_collections.ConfigDict, workdir: str) -> dict:
  """Pre-trains once, then fine-tunes and trains from scratch for each seed.

  Each run has its own workdir below `workdir`; after an interruption the same
  command continues.

  Args:
    config: `pretrain`, `finetune` and `scratch`, each the config of a run; and
      `seeds`. Each seed also draws the labels: it replaces '{seed}' in the names
      of the splits.
    workdir: folder for all runs.

  Returns:
    The content of workdir/transfer.json: accuracies from 0 to 1 of both ways by
    seed, their means and standard deviations over the seeds, and `margin`, the
    mean difference.

  Raises:
    ValueError: if there are fewer than two seeds; see also runs.train_all.
    runs.Failed: if runs failed; after the table if the pre-training has not.
    train.Interrupted: see train.train_and_evaluate.
  """
  if len(config.seeds) < 2:
    raise ValueError(
      f'seeds={tuple(config.seeds)} must be two at least, for a standard deviation '
      '(--config.seeds)'
    )
  pretraining = runs_lib.Run('pretrain', config.pretrain)
  variants = {
    kind: [
      runs_lib.Run(
        f'{kind}_{seed}',
        _run_config(config, kind, seed, f'{workdir}/{pretraining.name}'),
      )
      for seed in config.seeds
    ]
    for kind in _NAMES
  }
  for run in (pretraining, *(found[0] for found in variants.values())):
    run_config.check(run_config.complete(run.config))
  say(f'Pre-training on {config.pretrain.dataset}:')
  runs_lib.train_all([pretraining], workdir, 'all').finish()
  say(
    f'\n{config.finetune.dataset}: fine-tuning and training from scratch on the '
    f'same labels, {len(config.seeds)} draws of labels:'
  )
  pairs = zip(*variants.values())
  outcome = runs_lib.train_all([run for pair in pairs for run in pair], workdir)
  found = {
    kind: outcome.by_seed(runs, _METRIC) for kind, runs in variants.items()
  }
  found['difference'] = {
    seed: tuned - found['scratch'][seed]
    for seed, tuned in found['finetune'].items()
    if None not in (tuned, found['scratch'][seed])
  }
  rows = {kind: tables.row({}, by_seed) for kind, by_seed in found.items()}
  lines = [
    (_NAMES.get(kind, kind), *tables.cells(_METRIC, row))
    for kind, row in rows.items()
  ]
  say('\naccuracy (%) on the test images, mean and standard deviation:')
  say(cli.table(('', _METRIC, 'seeds'), lines))
  outcome.finish()
  result = {
    'seeds': list(config.seeds),
    'accuracies': {kind: list(found[kind].values()) for kind in _NAMES},
    'mean': {kind: rows[kind]['mean'] for kind in _NAMES},
    'std': {kind: rows[kind]['std'] for kind in _NAMES},
    'margin': rows['difference']['mean'],
  }
  tables.write(workdir, 'transfer.json', json.dumps(result, indent=1))
  return result


def _run_config(config, kind, seed, pretrained):
  run = runs_lib.seeded(config[kind], seed)
  if kind == 'finetune':
    run.pretrained = pretrained
  return run
