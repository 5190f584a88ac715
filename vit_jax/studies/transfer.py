"""Compares fine-tuning with training from scratch on the same few labels.

python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer
"""

import copy
import json
import statistics

import ml_collections

from vit_jax import cli
from vit_jax import train
from vit_jax.run import config as run_config
from vit_jax.studies import runs
from vit_jax.studies import tables

say = cli.say
_KINDS = ('finetune', 'scratch')
_NAMES = {'finetune': 'fine-tuned', 'scratch': 'from scratch'}


def transfer(config: ml_collections.ConfigDict, workdir: str) -> dict:
  """Pre-trains once, then fine-tunes and trains from scratch for each seed.

  Each run has its own workdir below `workdir`; after an interruption the same
  command continues.

  Args:
    config: `pretrain`, `finetune` and `scratch`, each the config of a run; and
      `seeds`. Each seed also draws the labels: it replaces '{seed}' in the name
      of the training split.
    workdir: folder for all runs.

  Returns:
    The content of workdir/transfer.json: accuracies from 0 to 1 of both ways by
    seed, their means and standard deviations over the seeds, and `margin`, the
    mean difference.

  Raises:
    ValueError: if there are fewer than two seeds; see also train_and_evaluate
      and runs.train_all.
    train.Interrupted: see train_and_evaluate.
  """
  if len(config.seeds) < 2:
    raise ValueError(
      f'seeds={tuple(config.seeds)} must be two at least, for a standard deviation '
      '(--config.seeds)'
    )
  pretrained = f'{workdir}/pretrain'
  for run in (
    config.pretrain,
    *(
      _run_config(config, kind, config.seeds[0], pretrained) for kind in _KINDS
    ),
  ):
    run_config.check(run_config.complete(run))
  say(f'Pre-training on {config.pretrain.dataset}.')
  train.train_and_evaluate(config.pretrain, pretrained)
  say(
    f'\n{config.finetune.dataset}: fine-tuning and training from scratch on the '
    f'same labels, {len(config.seeds)} draws of labels.'
  )
  metrics = runs.train_all(
    [
      runs.Run(f'{kind}_{seed}', _run_config(config, kind, seed, pretrained))
      for seed in config.seeds
      for kind in _KINDS
    ],
    workdir,
  )
  accuracies = {
    kind: [metrics[f'{kind}_{seed}']['accuracy_test'] for seed in config.seeds]
    for kind in _KINDS
  }
  spread = {kind: tables.mean_std(accuracies[kind]) for kind in _KINDS}
  result = {
    'seeds': list(config.seeds),
    'accuracies': accuracies,
    'mean': {kind: mean for kind, (mean, _) in spread.items()},
    'std': {kind: std for kind, (_, std) in spread.items()},
    'margin': statistics.mean(
      a - b for a, b in zip(accuracies['finetune'], accuracies['scratch'])
    ),
  }
  tables.write(workdir, 'transfer.json', json.dumps(result, indent=1))
  _show(result)
  return result


def _run_config(config, kind, seed, pretrained):
  run = copy.deepcopy(config[kind])
  run.seed = seed
  run.pp.train = run.pp.train.format(seed=seed)
  if kind == 'finetune':
    run.pretrained = pretrained
  return run


def _show(result):
  say('\naccuracy on the test images, mean and standard deviation:')
  for kind in _KINDS:
    say(
      f'  {_NAMES[kind]:<13} {100 * result["mean"][kind]:6.2f} '
      f'+- {100 * result["std"][kind]:.2f} %'
    )
  say(f'  difference    {100 * result["margin"]:+6.2f} points')
