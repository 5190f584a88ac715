"""Compares fine-tuning with training from scratch on the same few labels.

python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer
"""

import ml_collections

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib, summaries

say = console.say
# Key of a run's config -> its name in the table.
_NAMES = {'finetune': 'fine-tuned', 'scratch': 'from scratch'}
_METRIC = 'accuracy_test'
_TYPES = {
  'seeds': schema.Seeds,
  **dict.fromkeys(('pretrain', 'finetune', 'scratch'), ml_collections.ConfigDict),
}


def transfer(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Pre-trains once, then fine-tunes and trains from scratch for each seed.

  Args:
    config: `pretrain`, `finetune` and `scratch`, each the config of a run; and
      `seeds`. Each seed also draws the labels: it replaces '{seed}' in the names
      of the splits.
    workdir: folder for all runs, transfer.json, transfer.csv and transfer.png.

  Returns:
    The rows of transfer.json, of fine-tuning, of training from scratch and of
    their difference: `model`, `mean` and `std` over the seeds of the accuracy
    from 0 to 1, and the value of each seed, `seed_0`, ...

  Raises:
    ValueError, runs.Failed: see study.study.
  """
  runs_lib.check_keys(config, _TYPES, 'a transfer')
  pretraining = runs_lib.Run('pretrain', config.pretrain)
  variants = {kind: [] for kind in _NAMES}
  for kind, found in variants.items():
    for seed in config.seeds:
      run = runs_lib.seeded(config[kind], seed)
      if kind == 'finetune':
        run.pretrained = f'{workdir}/{pretraining.name}'
      found.append(runs_lib.Run(f'{kind}_{seed}', run))
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
  tuned, scratch = (outcome.by_seed(found, _METRIC) for found in variants.values())
  difference = {
    seed: None if None in (value, scratch[seed]) else value - scratch[seed]
    for seed, value in tuned.items()
  }
  found = zip((*_NAMES.values(), 'difference'), (tuned, scratch, difference))
  rows = [summaries.row({'model': name}, by_seed) for name, by_seed in found]
  summaries.publish(
    workdir, 'transfer', rows,
    'accuracy (%) on the test images, mean and standard deviation:',
    ('model', _METRIC, 'seeds'),
    [(row['model'], *summaries.cells(_METRIC, row)) for row in rows],
  )  # fmt: skip
  points = [(row['model'], None, summaries.values(row)) for row in rows[:2]]
  summaries.plot(_METRIC, 'Transfer', points, f'{workdir}/transfer.png')
  outcome.finish()
  return rows
