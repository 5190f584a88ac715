"""Checks before a command that trains imports JAX and TensorFlow."""

import argparse
from collections.abc import Iterator
import functools
import pathlib

import ml_collections

from vit_jax.configs import schema
from vit_jax.data import folder_layout
from vit_jax.distributed import files
from vit_jax.run import config as run_config
from vit_jax.weights import paths


def check_run(args: argparse.Namespace) -> None:
  """Checks the config of a run, and that its local data and weights exist.

  Raises all errors together, see schema.run_checks. Programs other than `train`
  check their own configs.
  """
  if args.config.get('trainer', 'train') != 'train':
    return
  config = run_config.with_keys(args.config)
  run_config.check_types(config, closed=True)  # The other checks rely on types.
  checks = [functools.partial(run_config.check_values, config)]
  # With several hosts, the others learn of a missing file once all are connected.
  if args.coordinator is None:
    checks.append(functools.partial(_check_data, config))
    checks.append(functools.partial(_check_weights, config, args.workdir))
  schema.run_checks(checks)


def check_plan(args: argparse.Namespace) -> None:
  """Checks the config of a run whose data and weights need not exist."""
  if args.config.get('trainer', 'train') == 'train':
    run_config.check_values(args.config)


def _check_data(config: ml_collections.ConfigDict) -> None:
  for dataset in _datasets(config):
    if isinstance(dataset, str):
      folder_layout.check_local(dataset)


def _datasets(config: ml_collections.ConfigDict) -> Iterator[str | None]:
  """Yields the names or folders of the data of a run."""
  if isinstance(config.dataset, str):
    yield config.dataset
  else:
    for name, _ in config.dataset or ():
      yield name
  yield config.fewshot.dataset
  for entry in config.evals:
    if not isinstance(entry, str) and len(entry) == 3:
      yield entry[2]


def _check_weights(config: ml_collections.ConfigDict, workdir: str | None) -> None:
  """Checks that local weights exist, unless runs that have begun may not need them."""
  if config.model is None or workdir is None or files.is_remote(workdir):
    return
  folder = pathlib.Path(workdir)
  if not any(folder.glob('config.json')) and not any(folder.glob('*/config.json')):
    paths.check_exist(config)
