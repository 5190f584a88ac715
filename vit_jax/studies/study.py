"""Compares variants of a run over several seeds, with a table and a plot.

  python -m vit_jax.main --config=STUDY.py --workdir=/tmp/study

The config of a study has these keys:

  base         config of a run.
  variants     ((name, {dotted key: value, ...}), ...): what each variant changes
               in `base`, see `changed` in vit_jax/studies/runs.py.
  seeds        seeds of the runs of each variant. A seed also replaces '{seed}'
               in pp.train and pp.test, for draws of labels.
  metric       metric to compare, such as 'accuracy_test'.

and optionally those of _OPTIONS below. To share the runs between machines that see
the workdir, start the same command on each.
"""

import copy
import itertools
import re
from typing import Annotated, Literal

import ml_collections

from vit_jax import console, models
from vit_jax.configs import schema
from vit_jax.data import sources
from vit_jax.data.augmentation import geometry
from vit_jax.planning import costs, flops
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib, summaries

_KEYS = {
  'base': ml_collections.ConfigDict,
  'variants': Annotated[
    tuple[tuple[str, dict], ...],
    schema.Fits('one or more pairs (name, {key: value, ...})', bool),
  ],
  'seeds': schema.Seeds,
  'metric': schema.Text,
}
# Key -> (default, type).
_OPTIONS = {
  # Title of the plot.
  'title': ('Study', schema.Text),
  # For a plot of curves: (name of the line, x) for each variant. Without, the
  # plot has a bar for each variant. 'exaflops' as x stands for the compute of the
  # variant's runs in exaFLOPs.
  'x': ((), tuple[tuple[str, float | Literal['exaflops']], ...]),
  # Label of the x axis, and whether the axis is logarithmic.
  'x_label': ('', str),
  'x_log': (False, bool),
  # Checkpoints to keep of a finished run: 'all', 'newest' or 'none'.
  'checkpoints': ('newest', Literal[tuple(runs_lib.CHECKPOINTS)]),
}


def study(config: ml_collections.ConfigDict, workdir: str) -> list[dict]:
  """Trains each variant with each seed, and compares a metric.

  The workdir holds all runs, study.json and study.png. Returns the rows of
  study.json, see summaries.report.

  Raises:
    ValueError: if the config is wrong, before anything is trained.
    runs.Failed: after the table, if runs failed.
  """
  config = _complete(config)
  variants = _variants(config)
  # All seeds take the same compute.
  places = [
    (line, exaflops(found[0].config) if x == 'exaflops' else x)
    for (line, x), found in zip(config.x, variants.values())
  ]
  runs = [*itertools.chain(*variants.values())]
  console.say(
    f'{len(variants)} variants x {len(config.seeds)} seeds = {len(runs)} runs in '
    f'{workdir}:'
  )
  outcome = runs_lib.train_all(runs, workdir, config.checkpoints)
  rows = summaries.report(
    workdir,
    'study',
    config.metric,
    {name: outcome.by_seed(found, config.metric) for name, found in variants.items()},
    config.title,
    places=places,
    x_label=config.x_label,
    log_x=config.x_log,
  )
  outcome.finish()
  return rows


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of a study: all seeds of the first variant, and so on.

  Checks the study's config, but not those of the runs.
  """
  return [*itertools.chain(*_variants(_complete(config)).values())]


def _variants(config) -> dict[str, list[runs_lib.Run]]:
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
    except ValueError as e:
      raise ValueError(f"variant '{name}': {e} (config.variants)") from e
    known = run_config.metrics_of(run)
    if config.metric not in known:
      raise ValueError(
        f"metric='{config.metric}' is not among the metrics of variant '{name}': "
        f'use one of {known} (config.metric)'
      )
    # 'learned_1-D_0' for 'learned, 1-D'.
    folder = re.sub(r'[^\w.=+-]+', '_', name).strip('._-')
    variants[name] = runs_lib.over_seeds(folder, run, config.seeds)
  return variants


def exaflops(config: ml_collections.ConfigDict) -> float:
  """Returns the compute of a run that classifies images; reads their number."""
  config = run_config.complete(config)
  run_config.check(config)
  source = sources.open_split(config, config.pp.train)
  config = run_config.resolve_steps(config, source.num_examples)
  model = models.make_model(config.model, num_classes=len(source.class_names))
  count = flops.forward_flops(
    model, geometry.crop_size(config.pp), config.pp.channels, whole=True
  )
  return costs.exaflops(count, config.batch * config.total_steps)


def _complete(config):
  """Returns the config with all keys, checked except for `base`."""
  config = copy.deepcopy(config)
  with config.unlocked():
    for key, (default, _) in _OPTIONS.items():
      if key not in config:
        config[key] = default
  options = {key: kind for key, (_, kind) in _OPTIONS.items()}
  runs_lib.check_keys(config, _KEYS | options, 'a study')
  if config.x and len(config.x) != len(config.variants):
    raise ValueError(
      f'x has {len(config.x)} entries for {len(config.variants)} variants: give '
      '(name of the line, x) for each variant (config.x)'
    )
  return config
