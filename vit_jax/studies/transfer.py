"""Compares fine-tuning with training from scratch on the same few labels.

python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer
"""

import ml_collections

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib, summaries

_METRIC = 'accuracy_test'
_TYPES = {
  'seeds': schema.Seeds,
  **dict.fromkeys(('pretrain', 'finetune', 'scratch'), ml_collections.ConfigDict),
}


def transfer(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Pre-trains once, then fine-tunes and trains from scratch with each seed.

  The config has `pretrain`, `finetune` and `scratch`, each the config of a run,
  and `seeds`. A seed also draws the labels: it replaces '{seed}' in pp.train and
  pp.test. The workdir holds all runs, transfer.json and transfer.png.

  Returns the rows of transfer.json, see summaries.report: test accuracies of the
  variants 'fine-tuned' and 'from scratch', and their margin. Raises as
  study.study does.
  """
  runs_lib.check_keys(config, _TYPES, 'a transfer')
  pretraining = runs_lib.Run('pretrain', config.pretrain)
  tuned = runs_lib.over_seeds('finetune', config.finetune, config.seeds)
  for run in tuned:
    run.config.pretrained = f'{workdir}/{pretraining.name}'
  scratch = runs_lib.over_seeds('scratch', config.scratch, config.seeds)
  for run in (pretraining, tuned[0], scratch[0]):
    run_config.check(run_config.complete(run.config))
  console.say(f'Pre-training on {config.pretrain.dataset}:')
  runs_lib.train_all([pretraining], workdir, 'all').finish()
  console.say(
    f'\n{config.finetune.dataset}: fine-tuning and training from scratch on the '
    f'same labels, {len(config.seeds)} draws of labels:'
  )
  outcome = runs_lib.train_all([*tuned, *scratch], workdir)
  found = {
    'fine-tuned': outcome.by_seed(tuned, _METRIC),
    'from scratch': outcome.by_seed(scratch, _METRIC),
  }
  rows = summaries.report(
    workdir, 'transfer', _METRIC, found, 'Transfer', baseline='from scratch'
  )
  outcome.finish()
  return rows
