"""Compares variants of a run over several seeds, with a table and a plot.

  python -m vit_jax.main --config=STUDY.py --workdir=/tmp/study

The config of a study has these keys:

  base         config of a run.
  variants     ((name, {dotted key: value, ...}), ...): what each variant changes
               in `base`, see `changed` in vit_jax/studies/runs.py.
  seeds        seeds of the runs of each variant. A seed also replaces '{seed}'
               in pp.train, for draws of labels.
  metric       metric to compare, such as 'accuracy_test'.

and optionally those of OPTIONS below.
"""

import copy
import re
from typing import Any

import ml_collections

from vit_jax import cli
from vit_jax import models
from vit_jax.augmentation import geometry
from vit_jax.configs import rules
from vit_jax.data import sources
from vit_jax.figures import studies
from vit_jax.planning import costs
from vit_jax.planning import flops
from vit_jax.run import config as run_config
from vit_jax.run import metrics as metrics_lib
from vit_jax.studies import runs as runs_lib
from vit_jax.studies import tables

say = cli.say
_KEYS = ('trainer', 'base', 'variants', 'seeds', 'metric')
OPTIONS = {
  # Title of the plot.
  'title': 'Study',
  # For a plot of curves: (name of the line, x) for each variant. Without, the
  # plot has a bar for each variant. 'exaflops' in place of an x stands for the
  # compute of the variant's runs in exaFLOPs.
  'x': (),
  # Label of the x axis, and whether the axis is logarithmic.
  'x_label': '',
  'x_log': False,
  # (i, n): of n machines that share the workdir, this one, number i from 0 on,
  # trains every n-th run.
  'shard': (0, 1),
  # Checkpoints to keep of a run that is done: 'all', 'newest' or 'none'.
  'checkpoints': 'newest',
}


def study(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains each variant with each seed, and compares a metric.

  Each run has its own workdir below `workdir`; after an interruption the same
  command continues.

  Args:
    config: see the docstring of this module.
    workdir: folder for all runs, for study.json, study.csv and study.png.

  Returns:
    `rows`, the content of study.json: `variant`, `mean` and `std` over the
    seeds, the value of each seed, `seed_0`, ..., and for curves `line` and `x`;
    and `missing`, the names of runs that are not done.

  Raises:
    ValueError: if the config is wrong, before anything is trained.
    runs.Failed: after the table, if runs failed.
    train.Interrupted: see train.train_and_evaluate.
  """
  config = _complete(config)
  runs = make_runs(config)
  firsts = runs[:: len(config.seeds)]  # All seeds take the same compute.
  with config.unlocked():
    config.x = tuple(
      (line, exaflops(run.config) if x == 'exaflops' else x)
      for (line, x), run in zip(config.x, firsts)
    )
  say(
    f'{len(config.variants)} variants x {len(config.seeds)} seeds = {len(runs)} '
    f'runs in {workdir}:'
  )
  failed = None
  try:
    results = runs_lib.train_all(
      runs, workdir, tuple(config.shard), config.checkpoints
    )
  except runs_lib.Failed as e:
    failed, results = e, e.results
  rows = _rows(config, results)
  missing = [run.name for run in runs if run.name not in results]
  _show(config, rows, missing)
  tables.write_table(workdir, 'study', rows)
  say(f'  table  {workdir}/study.csv, {workdir}/study.json')
  _draw(config, rows, f'{workdir}/study.png')
  if failed is not None:
    raise failed
  return {'rows': rows, 'missing': missing}


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of a study: all seeds of the first variant, and so on.

  Raises:
    ValueError: if the study's config is wrong; the configs of the runs are not
      checked.
  """
  config = _complete(config)
  found = []
  for name, changes in config.variants:
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
    for seed in config.seeds:
      seeded = copy.deepcopy(run)
      seeded.seed = seed
      seeded.pp.train = run.pp.train.replace('{seed}', str(seed))
      found.append(runs_lib.Run(_folder(name, seed), seeded))
  return found


def exaflops(config: ml_collections.ConfigDict) -> float:
  """Returns the compute of a run that classifies images, in exaFLOPs.

  Args:
    config: config of the run; the size of its data is read from the data.

  Raises:
    ValueError, FileNotFoundError: if the config is wrong, or its data missing.
  """
  config = run_config.complete(config)
  run_config.check(config)
  source = sources.open_split(config, config.pp.train)
  config = run_config.resolve_steps(config, source.num_examples)
  model = models.make_model(config.model, num_classes=len(source.class_names))
  count = flops.forward_flops(
    model, geometry.crop_size(config.pp), config.pp.channels, whole=True
  )
  return costs.exaflops(count, config.batch * config.total_steps)


def _folder(name, seed) -> str:
  """Returns the name of a run's folder: 'learned_1-D_0' for 'learned, 1-D'."""
  return re.sub(r'[^\w.=+-]+', '_', name).strip('._-') + f'_{seed}'


def _complete(config):
  """Returns the config with all keys, checked except for `base`."""
  config = copy.deepcopy(config)
  for key in _KEYS[1:]:
    if key not in config:
      raise ValueError(f'a study needs config.{key}')
  for key in config:
    if key not in (*_KEYS, *OPTIONS):
      rules.raise_unknown(key, (*_KEYS, *OPTIONS), of='the config of a study')
  with config.unlocked():
    for key, default in OPTIONS.items():
      if key not in config:
        config[key] = default
  rules.check('seeds', config.seeds, rules.seeds)
  _check_variants(config.variants)
  if config.x and len(config.x) != len(config.variants):
    raise ValueError(
      f'x has {len(config.x)} entries for {len(config.variants)} variants: give '
      '(name of the line, x) for each variant (config.x)'
    )
  for entry in config.x:
    pair = entry if isinstance(entry, tuple | list) else ()
    if len(pair) != 2 or not (
      rules.is_number(pair[1]) or pair[1] == 'exaflops'
    ):
      raise ValueError(
        f'x has an entry {entry!r}: each must be (name of the line, number), or '
        "(name of the line, 'exaflops') (config.x)"
      )
  return config


def _check_variants(variants):
  """Checks the form of the variants."""
  form = 'must be pairs (name, {key: value, ...}) (config.variants)'
  if not isinstance(variants, tuple | list) or not variants:
    raise ValueError(f'variants={variants!r:.100} {form}')
  for entry in variants:
    fits = isinstance(entry, tuple | list) and len(entry) == 2
    if not (fits and isinstance(entry[0], str) and isinstance(entry[1], dict)):
      raise ValueError(f'variants hold {entry!r:.100}: they {form}')
    if 'seed' in entry[1]:
      raise ValueError(
        f"variant '{entry[0]}' sets the key 'seed': config.seeds does so for all "
        'variants'
      )


def _rows(config, results) -> list[dict]:
  """Returns a row for each variant, with the seeds that are done."""
  rows = []
  for name, _ in config.variants:
    values = {
      seed: results[_folder(name, seed)][config.metric]
      for seed in config.seeds
      if _folder(name, seed) in results
    }
    row = {'variant': name, 'metric': config.metric, 'mean': None, 'std': None}
    if values:
      row['mean'], row['std'] = tables.mean_std(list(values.values()))
    row.update({f'seed_{seed}': values.get(seed) for seed in config.seeds})
    rows.append(row)
  for row, (line, x) in zip(rows, config.x):
    row.update(line=line, x=x)
  return rows


def _values(config, row) -> list[float]:
  """Returns the values of a row's seeds that are done."""
  found = (row[f'seed_{seed}'] for seed in config.seeds)
  return [value for value in found if value is not None]


def _show(config, rows, missing):
  """Prints the table, and what is missing in it."""
  unit = ' (%)' if metrics_lib.is_share(config.metric) else ''
  say(
    f'\n{config.metric}{unit}, mean and standard deviation over '
    f'{len(config.seeds)} seeds:'
  )
  cells = []
  for row in rows:
    values = _values(config, row)
    each = (tables.format_values(config.metric, [value]) for value in values)
    mean = tables.format_values(config.metric, values)
    x = [f'{row["x"]:.4g}'] if config.x else []
    cells.append((row['variant'], *x, mean, ' '.join(each)))
  x = [config.x_label] if config.x else []
  say(cli.table(('variant', *x, config.metric, 'seeds'), cells))
  if missing:
    say(f'Not done, and not in the table: {", ".join(missing)}.')


def _draw(config, rows, path):
  """Draws curves if the config gives places on the x axis, else bars."""
  share = metrics_lib.is_share(config.metric)
  label = f'{config.metric} (%)' if share else config.metric
  values = [
    [value * (100 if share else 1) for value in _values(config, row)]
    for row in rows
  ]
  if not any(values):
    return
  if not config.x:
    named = {row['variant']: found for row, found in zip(rows, values)}
    tables.draw(studies.bars, {'': named}, label, config.title, path=path)
    return
  lines = {}
  for (line, x), found in zip(config.x, values):
    places, heights = lines.setdefault(line, ([], []))
    places.append(x)
    heights.append(found)
  tables.draw(
    studies.curves, lines, config.x_label, label, config.title,
    log_x=config.x_log, path=path,
  )  # fmt: skip
