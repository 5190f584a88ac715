"""Compares fine-tuning with training from scratch on the same few labels.

python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer
"""

import dataclasses

import ml_collections

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib, study


@dataclasses.dataclass(kw_only=True)
class Transfer:
  """The config of a transfer."""

  trainer: str = 'transfer'
  # Seeds of the runs. A seed also draws the labels: it replaces '{seed}' in pp.train
  # and pp.test.
  seeds: schema.Seeds
  # Configs of runs.
  pretrain: ml_collections.ConfigDict
  finetune: ml_collections.ConfigDict
  scratch: ml_collections.ConfigDict


def transfer(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Pre-trains once, then fine-tunes and trains from scratch with each seed.

  The workdir holds all runs, transfer.json and transfer.png. Returns the rows of
  transfer.json, see summaries.report: test accuracies of the variants 'fine-tuned'
  and 'from scratch', and their margin. Raises as study.study does.
  """
  config = runs_lib.complete(config, Transfer, 'a transfer')
  pretraining = runs_lib.Run('pretrain', config.pretrain)
  config.finetune.pretrained = f'{workdir}/{pretraining.name}'
  tuned = runs_lib.over_seeds('finetune', config.finetune, config.seeds)
  scratch = runs_lib.over_seeds('scratch', config.scratch, config.seeds)
  for run in (pretraining, tuned[0], scratch[0]):
    run_config.check(run_config.complete(run.config))
  console.say(f'Pre-training on {config.pretrain.dataset}:')
  runs_lib.train_all([pretraining], workdir, 'all').finish()
  console.say(
    f'\n{config.finetune.dataset}: fine-tuning and training from scratch on the '
    f'same labels, {len(config.seeds)} draws of labels:'
  )
  return study.compare(
    {'fine-tuned': tuned, 'from scratch': scratch},
    workdir, 'transfer', 'accuracy_test', 'Transfer', baseline='from scratch',
  )  # fmt: skip
