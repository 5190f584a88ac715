"""Compares variants of a run over several seeds, with a table and a plot.

  python -m vit_jax.main --config=STUDY.py --workdir=/tmp/study
  python -m vit_jax.main --config=configs/digits_transfer.py --workdir=/tmp/transfer

`Study` and `Transfer` have the keys of the configs.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import re
from typing import Annotated, Any, Literal

import ml_collections

from vit_jax import console, models
from vit_jax.configs import common, schema
from vit_jax.data import sources
from vit_jax.data.augmentation import geometry
from vit_jax.distributed import files
from vit_jax.planning import flops
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.studies import runs as runs_lib, summaries

_Variants = Annotated[
  tuple[tuple[str, dict], ...],
  schema.Fits('one or more pairs (name, {key: value, ...})', bool),
]


@dataclasses.dataclass(kw_only=True)
class Study(common.Seeded):
  """The config of a study."""

  trainer: str = 'study'
  # Config of a run.
  base: ml_collections.ConfigDict
  # Changes of each variant to `base`, by dotted key, see runs.changed.
  variants: _Variants
  # Metric to compare, such as 'accuracy_test'.
  metric: schema.Text
  # Title of the plot.
  title: schema.Text = 'Study'
  # For a plot of curves: (name of the line, x) for each variant. Without, the plot has
  # a bar for each variant. 'exaflops' as x stands for the compute of the variant's
  # runs in exaFLOPs.
  x: tuple[tuple[str, float | Literal['exaflops']], ...] = ()
  # Label of the x axis, and whether the axis is logarithmic.
  x_label: str = ''
  x_log: bool = False
  # Checkpoints to keep of a finished run.
  checkpoints: schema.Kept = 'newest'


@dataclasses.dataclass(kw_only=True)
class Transfer(common.Seeded):
  """The config of a comparison of fine-tuning with training from scratch."""

  trainer: str = 'transfer'
  # Configs of runs.
  pretrain: ml_collections.ConfigDict
  finetune: ml_collections.ConfigDict
  scratch: ml_collections.ConfigDict


def study(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Trains each variant with each seed, and compares a metric.

  The workdir holds all runs, study.json and study.png. Returns the rows of
  study.json, see summaries.report. Raises ValueError if the config is wrong, before
  anything is trained, and runs.Failed after the table if runs failed.
  """
  config = _complete(config)
  workdir = files.expanded(workdir)
  variants = _variants(config)
  # All seeds take the same compute.
  places = []
  for (line, x), runs in zip(config.x, variants.values()):
    place = exaflops(runs[0].config) if x == 'exaflops' else x
    places.append((line, place))
  num_variants = console.pluralize(len(variants), 'variant')
  unit = _unit(config.base)
  num_seeds = console.pluralize(len(config.seeds), unit)
  num_runs = console.pluralize(len(variants) * len(config.seeds), 'run')
  console.log(f'{num_variants} x {num_seeds} = {num_runs} in {workdir}:')
  return compare(
    variants,
    workdir,
    'study',
    config.metric,
    config.title,
    config.checkpoints,
    places=places,
    x_label=config.x_label,
    log_x=config.x_log,
    unit=unit,
  )


def cross_validation(
  config: ml_collections.ConfigDict, num_folds: int
) -> ml_collections.ConfigDict:
  """Returns the config of a study with a run per fold of the training data.

  Run i has seed i, is tested on fold i (vit_jax/data/folds.py), and trains on the others.
  `config` is that of a run. ValueError if it does not train on a whole split, or there
  are fewer than two folds.
  """
  split = run_config.with_keys(config).pp.train
  if '+' in split or '[' in split:
    raise ValueError(
      f"pp.train='{split}' must be a whole split to divide into folds, such as 'train' "
      '(--config.pp.train, --folds)'
    )
  if config.get('evals'):
    raise ValueError(
      f'evals={config.evals}, but --folds={num_folds} tests each run on its fold: leave '
      'out --config.evals'
    )
  if num_folds < 2:
    raise ValueError(f'folds={num_folds} must be at least 2 (--folds)')
  base = run_config.with_keys(config)
  base.pp.train = f'{split}[fold!={{seed}}/{num_folds}]'
  base.pp.test = f'{split}[fold={{seed}}/{num_folds}]'
  return ml_collections.ConfigDict(
    {
      'trainer': 'study',
      'base': base,
      'variants': (('fold', {}),),
      'seeds': tuple(range(num_folds)),
      'metric': run_config.complete(config).best_metric,
      'title': f'{num_folds} folds',
    }
  )


def transfer(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Pre-trains once, then fine-tunes and trains from scratch on the same few labels.

  The workdir holds all runs, transfer.json and transfer.png. Returns the rows of
  transfer.json, see summaries.report: test accuracies of 'fine-tuned' and 'from
  scratch', and their margin. Raises as `study` does.
  """
  config = runs_lib.complete(config, Transfer, 'a transfer')
  workdir = files.expanded(workdir)
  pretraining = runs_lib.Run('pretrain', config.pretrain)
  config.finetune.pretrained = f'{workdir}/{pretraining.name}'
  tuned = runs_lib.over_seeds('finetune', config.finetune, config.seeds)
  scratch = runs_lib.over_seeds('scratch', config.scratch, config.seeds)
  for run in (pretraining, tuned[0], scratch[0]):
    run_evaluators.check(run_config.complete(run.config))
  console.log(f'Pre-training on {config.pretrain.dataset}:')
  runs_lib.train_all([pretraining], workdir, 'all').finish()
  console.log(
    f'\n{config.finetune.dataset}: fine-tuning and training from scratch on the '
    f'same labels, {console.pluralize(len(config.seeds), "draw")} of labels:'
  )
  return compare(
    {'fine-tuned': tuned, 'from scratch': scratch},
    workdir,
    'transfer',
    'accuracy_test',
    'Transfer',
    baseline='from scratch',
  )


def _unit(base: ml_collections.ConfigDict) -> str:
  """Returns what the seeds of a study stand for."""
  return 'fold' if '[fold={seed}/' in base.get('pp', {}).get('test', '') else 'seed'


def compare(
  variants: Mapping[str, Sequence[runs_lib.Run]],
  workdir: str,
  name: str,
  metric: str,
  title: str,
  checkpoints: schema.Kept = 'newest',
  **options: Any,
) -> list[dict]:
  """Trains the runs of variants, and reports a metric; see summaries.report."""
  runs = list(itertools.chain.from_iterable(variants.values()))
  outcome = runs_lib.train_all(runs, workdir, checkpoints)
  values = {}
  for variant, variant_runs in variants.items():
    values[variant] = outcome.by_seed(variant_runs, metric)
  kind = run_evaluators.metrics_of(run_config.complete(runs[0].config))[metric]
  rows = summaries.report(workdir, name, metric, kind, values, title, **options)
  outcome.finish()
  return rows


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of a study: all seeds of the first variant, and so on.

  Checks the study's config, but not the configs of its runs.
  """
  variants = _variants(_complete(config))
  return list(itertools.chain.from_iterable(variants.values()))


def _complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns the config with all keys, checked except for the values of the runs."""
  config = runs_lib.complete(config, Study, 'a study')
  if config.x and len(config.x) != len(config.variants):
    raise ValueError(
      f'x has {len(config.x)} entries for {len(config.variants)} variants: pass '
      '(name of the line, x) for each variant (config.x)'
    )
  return config


def _variants(config: ml_collections.ConfigDict) -> dict[str, list[runs_lib.Run]]:
  """Returns the runs of each variant by its name."""
  variants = {}
  for name, changes in config.variants:
    if 'seed' in changes:
      raise ValueError(
        f"variant '{name}' sets the key 'seed', which config.seeds sets for all variants"
      )
    if name in variants:
      raise ValueError(f"variant '{name}' occurs twice: names must differ")
    try:
      run = runs_lib.changed(config.base, changes)
      first = runs_lib.seeded(run, config.seeds[0])
      metrics = run_evaluators.metrics_of(run_config.complete(first))
    except ValueError as e:
      raise ValueError(f"variant '{name}': {e} (config.variants)") from e
    runs_lib.check_metric(config.metric, metrics, f"variant '{name}'")
    # 'learned_1-D_0' for 'learned, 1-D'.
    folder = re.sub(r'[^\w.=+-]+', '_', name).strip('._-')
    variants[name] = runs_lib.over_seeds(folder, run, config.seeds)
  return variants


def exaflops(config: ml_collections.ConfigDict) -> float:
  """Returns the compute of a run that classifies images; reads their number."""
  config = run_config.complete(config)
  run_evaluators.check(config)
  source = sources.open_split(config, config.pp.train)
  config = run_config.resolve_steps(config, source.num_examples)
  model = models.make_model(config.model, num_classes=len(source.class_names))
  count = flops.forward_flops(
    model, geometry.crop_size(config.pp), config.pp.channels, whole=True
  )
  return flops.training_exaflops(count, config.batch * config.total_steps)
