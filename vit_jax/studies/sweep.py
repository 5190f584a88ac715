"""Chooses values of config keys on held-out data, and tests the best ones.

The protocol of arXiv 2010.11929, B.1.1: part of the training data is held out. Each
combination of values is trained once on the rest, and the one that is best on the
held-out part is trained with several seeds and tested. The command is `vit_jax sweep`.
"""

from collections.abc import Mapping, Sequence
import copy
import itertools
import re
from typing import Annotated, Any, Literal, NamedTuple

from etils import epath
import ml_collections

from vit_jax import console, train
from vit_jax.configs import common, schema
from vit_jax.data import sources
from vit_jax.distributed import files
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  metrics as metrics_lib,
)
from vit_jax.studies import held_out as held_out_lib, runs as runs_lib, summaries

# Data to train the winner on: all of the training data, as in the paper, or the part
# that the choice was trained on, as in the original's configs.
Refit = Literal['all', 'part']
HELD_OUT = 'held_out'  # Name of the evaluation of the choice.
_LOG_RANGE = 8  # Ratio of largest to smallest value for a logarithmic axis.


class Sweep(NamedTuple):
  """A sweep whose arguments are checked, see `sweep`."""

  config: ml_collections.ConfigDict  # Complete.
  values: Mapping[str, Sequence[Any]]
  parts: held_out_lib.Parts
  metric: str  # Without the name of an evaluation.
  refit: Refit
  seeds: Sequence[int]

  @property
  def chosen_by(self) -> str:
    """Name of the metric that chooses, with the name of its evaluation."""
    return f'{self.metric}_{HELD_OUT}'

  @property
  def kind(self) -> metrics_lib.Metric:
    """Unit and direction of the metric that chooses."""
    return _measures(self.config)[self.metric]

  def combinations(self) -> list[dict[str, Any]]:
    """Returns all combinations of the values."""
    grid = itertools.product(*self.values.values())
    return [dict(zip(self.values, values)) for values in grid]

  def choice_runs(self) -> list[runs_lib.Run]:
    """Returns a run per combination; none of them sees the test split."""
    runs = []
    for values in self.combinations():
      config = runs_lib.changed(self.config, values)
      config.pp.train = self.parts.train
      config.evals = ((HELD_OUT, self.parts.held_out),)
      config.real_labels = None  # They are of the test split.
      config.fewshot.update(shots=(), knn=())
      config.evaluators = _evaluators_of_all(config)
      config.best_metric = self.chosen_by
      runs.append(runs_lib.Run(_name(values), config))
    return runs

  def test_runs(self, values: Mapping[str, Any]) -> list[runs_lib.Run]:
    """Returns the runs that test a combination, one per seed."""
    config = runs_lib.changed(self.config, values)
    config.pp.train = self.parts.all if self.refit == 'all' else self.parts.train
    return runs_lib.over_seeds(f'{_name(values)},test', config, self.seeds)


def sweep(
  config: ml_collections.ConfigDict,
  workdir: str,
  values: Mapping[str, Sequence[Any]] | None = None,
  *,
  checkpoints: schema.Kept = 'newest',
  only: str | None = None,
  **options: Any,
) -> dict[str, Any]:
  """Chooses the best of several values, and tests it with several seeds.

  Finished runs in the workdir are not trained again, so values and seeds can be added
  later. For `values` and further `options` see `make`; for `checkpoints` and errors,
  runs.train_all. `only` is the name of a single run to train, without comparing anything.

  Returns `choice`, the rows of choice.json; `best`, the values that won; and `test`,
  the rows of test.json. Diverged combinations just lose; if other runs failed,
  runs.Failed is raised after a table.
  """
  plan = make(config, values, **options)
  workdir = files.expanded(workdir)
  runs = plan.choice_runs()
  if only is not None:
    for combination in plan.combinations():
      runs += plan.test_runs(combination)
    runs = runs_lib.select(runs, only)
  runs_lib.check(runs, workdir, checkpoints)
  if options.get('held_out') and not runs_lib.collect(runs, workdir).done:
    # A missing split is an error before anything is trained.
    task = run_config.get_task(plan.config.task)
    config = copy.deepcopy(plan.config)
    config.broken_images = 'trust'  # The runs check the images.
    sources.open_split(config, plan.parts.held_out, task.record_features(config))
  if only is not None:
    runs_lib.train_all(runs, workdir, checkpoints).finish()
    return {'choice': [], 'best': None, 'test': []}
  console.log(
    f'Choice: {console.pluralize(len(runs), "combination")} of '
    f'{", ".join(plan.values)}, trained on '
    f"'{plan.parts.train}', compared by {plan.metric} on '{plan.parts.held_out}':"
  )
  outcome = runs_lib.train_all(runs, workdir, checkpoints)
  choice = _choice(plan, outcome)
  _show_choice(plan, choice, workdir)
  outcome.finish(allow_diverged=True)
  best = _best(plan, choice)
  runs = plan.test_runs(best)
  noun = 'seed' if len(runs) == 1 else 'seeds'
  seeds = ', '.join(map(str, plan.seeds))
  console.log(
    f"\nTest: {_name(best)}, trained on '{runs[0].config.pp.train}', {noun} {seeds}:"
  )
  outcome = runs_lib.train_all(runs, workdir, checkpoints)
  test = _show_test(plan, best, runs, outcome, workdir)
  outcome.finish()
  return {'choice': choice, 'best': best, 'test': test}


def next_runs(plan: Sweep, workdir: epath.PathLike) -> list[runs_lib.Run]:
  """Returns the runs of the choice, or once it is made the test runs."""
  runs = plan.choice_runs()
  runs_lib.check(runs, workdir)
  outcome = runs_lib.collect(runs, workdir)
  if len(outcome.done) < len(runs):
    return runs
  with console.muted():
    return plan.test_runs(_best(plan, _choice(plan, outcome)))


# --- What to train ---


def make(
  config: ml_collections.ConfigDict,
  values: Mapping[str, Sequence[Any]] | None = None,
  held_out: str | None = None,
  seeds: int = 3,
  refit: Refit = 'all',
  metric: str | None = None,
) -> Sweep:
  """Returns the plan of a sweep of the config of a run; checks both phases.

  `values` to try are by dotted key, and several keys make a grid; by default the
  learning rates of the paper, for the data sets of common.FINE_TUNING. See held_out.cut
  for `held_out`, and Refit for `refit`. Test runs have the seeds config.seed,
  config.seed + 1, ... The metric that chooses is config.best_metric by default.
  """
  if config.get('trainer', 'train') != 'train':
    raise ValueError(
      f"trainer='{config.trainer}': a sweep needs the config of a single run "
      '(config.trainer)'
    )
  config = run_config.complete(config)
  run_evaluators.check(config)
  metrics = _measures(config)
  if metric is None:
    metric = config.best_metric  # Without the name of the evaluation.
    for evaluation in run_config.evaluations(config):
      metric = metric.removesuffix(f'_{evaluation.name}')
  schema.check('refit', refit, Refit, '--')
  schema.check('seeds', seeds, Annotated[int, schema.Range(ge=1, le=1_000)], '--')
  schema.check('metric', metric, Literal[tuple(metrics)], '--')
  test = sources.existing_split(config, config.dataset, config.pp.test)
  splits = held_out_lib.cut(config.pp.train, test, held_out)
  if values is None:
    dataset = config.dataset if isinstance(config.dataset, str) else ''
    if dataset not in common.FINE_TUNING:
      raise ValueError(
        f'the paper has no learning rates for dataset={config.dataset!r}: pass '
        "values to try, as in --values='config.base_lr=.003,.01,.03'"
      )
    values = {'base_lr': common.FINE_TUNING[dataset][1]}
  swept_keys = run_config.marked_keys(config, schema.SWEPT)
  for key, tried in values.items():
    if key in swept_keys:
      raise ValueError(
        f"'{key}' cannot be among the values: the sweep sets this key (--values)"
      )
    if not tried or any(tried.count(value) > 1 for value in tried):
      raise ValueError(
        f"'{key}' needs one or more distinct values, not {tried} (--values)"
      )
  test_seeds = range(config.seed, config.seed + seeds)
  plan = Sweep(config, dict(values), splits, metric, refit, test_seeds)
  for combination in plan.combinations():
    train.check(plan.test_runs(combination)[0].config)
  return plan


def _evaluators_of_all(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns the entries of `config.evaluators` that measure any evaluation."""
  entries = {k: entry for k, entry in config.evaluators.items() if 'evals' not in entry}
  return ml_collections.ConfigDict(entries)


def _measures(config: ml_collections.ConfigDict) -> run_evaluators.Metrics:
  """Returns the metrics that can choose, by name without the name of an evaluation."""
  entries = run_evaluators.task_entries(config)
  for entry in run_evaluators.config_entries(config):
    if entry.evals is None:
      entries.append(entry)
  return run_evaluators.measures(entries, config)


def _name(values: Mapping[str, Any]) -> str:
  """Returns the name of a run's folder: 'base_lr=0.01,classifier=gap'."""
  last_names = [key.rpartition('.')[2] for key in values]
  settings = []
  for (key, value), last_name in zip(values.items(), last_names):
    is_unique = last_names.count(last_name) == 1
    name = last_name if is_unique else key
    settings.append(f'{name}={value}')
  return re.sub(r'[^\w.=+,-]+', '_', ','.join(settings))


# --- The tables ---


def _choice(plan: Sweep, outcome: runs_lib.Outcome) -> list[dict]:
  """Returns a row for each combination whose run is finished."""
  rows = []
  for values in plan.combinations():
    name = _name(values)
    if name in outcome.done:
      metrics = outcome.results.get(name, {plan.chosen_by: None})
      rows.append({**values, **metrics, 'diverged': name in outcome.diverged})
  return rows


def _show_choice(
  plan: Sweep, rows: Sequence[Mapping[str, Any]], workdir: epath.PathLike
) -> None:
  """Prints, writes and draws the metric of all combinations."""
  metric = plan.chosen_by
  # Curves over the first key if its values are numbers, else bars.
  first, *later = plan.values
  tried = plan.values[first]
  curves = all(map(schema.is_number, tried))
  keys_of_name = later if curves else plan.values
  lines, points = [], []
  for row in rows:
    value = 'diverged'
    if not row['diverged']:
      value = summaries.format_values(plan.kind, [row[metric]])
      name = _name({key: row[key] for key in keys_of_name})
      points.append((name, row[first], [row[metric]]))
    lines.append([row[key] for key in plan.values] + [value])
  header = (*plan.values, plan.kind.title(metric))
  summaries.publish(workdir, 'choice', rows, 'Choice:', header, lines)
  title = f"Choice on '{plan.parts.held_out}' of {plan.config.dataset}"
  log = curves and min(tried) > 0 and max(tried) >= _LOG_RANGE * min(tried)
  x_label = first if curves else None
  path = f'{workdir}/sweep.png'
  summaries.plot(metric, plan.kind, title, points, path, x_label, log)


def _best(plan: Sweep, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the values that won; the first ones in a tie."""
  scores = [row[plan.chosen_by] for row in rows if not row['diverged']]
  if not scores:
    raise ValueError('all combinations diverged: try lower learning rates (--values)')
  best_score = min(scores) if plan.kind.low else max(scores)
  best = next(row for row in rows if row[plan.chosen_by] == best_score)
  values = {key: best[key] for key in plan.values}
  equal = scores.count(best_score) - 1
  tied = f' Equally good: {equal} more.' if equal else ''
  console.log(f'Chosen: {_name(values)}.{tied}')
  for key, tried in plan.values.items():
    ordered = all(map(schema.is_number, tried)) and len(tried) > 1
    if ordered and values[key] in (min(tried), max(tried)):
      console.log(
        f'{key}={values[key]} is at the edge of the values tried: one beyond it may '
        'be better.'
      )
  return values


def _show_test(
  plan: Sweep,
  best: Mapping[str, Any],
  runs: Sequence[runs_lib.Run],
  outcome: runs_lib.Outcome,
  workdir: epath.PathLike,
) -> list[dict]:
  """Prints and writes mean and standard deviation of each metric."""
  kinds = run_evaluators.metrics_of(plan.config)
  rows, lines = [], []
  for metric, kind in kinds.items():
    row = summaries.row({**best, 'metric': metric}, outcome.by_seed(runs, metric))
    if summaries.values(row):
      rows.append(row)
      lines.append((kind.title(metric), *summaries.cells(kind, row)))
  heading = f'Mean and standard deviation over {console.pluralize(len(runs), "seed")}:'
  summaries.publish(workdir, 'test', rows, heading, ('metric', 'test', 'seeds'), lines)
  return rows
