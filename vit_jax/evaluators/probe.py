"""Measures how good the features of a frozen model are: few-shot, linear and kNN probes.

In Python:

  model = predict.load('/tmp/digits')
  probe.probe(model, dataset='digits', shots=(5,), linear=True)
  probe.probe(model, dataset='digits', linear=True, layer='all')['layers']

`vit_jax probe` (vit_jax/commands/probe.py) is the command.
"""

from collections.abc import Sequence
from typing import Any

from etils import epath
import jax

from vit_jax import console
from vit_jax.distributed import sharding
from vit_jax.evaluators import base, evaluation, probes
from vit_jax.inference import predictor
from vit_jax.run import config as run_config, metrics

SHOTS = (1, 5, 10, 25)
KNN = (20,)  # Neighbours; DINO's choice.


def probe(
  model: predictor.Predictor,
  mesh: jax.sharding.Mesh | None = None,
  shots: Sequence[int] | None = None,
  linear: bool = False,
  knn: Sequence[int] = (),
  **options: Any,
) -> dict[str, Any]:
  """Probes the features of a model, whose parameters are not changed.

  Args:
    model: the result of `predict.load` or `load_weights`.
    mesh: has the model's parameters on its devices; None: the mesh of the parameters.
    shots: images per class of the few-shot probes; None: all in SHOTS that every class
      has, or none if all layers are probed.
    linear: whether to add a probe of all training images.
    knn: numbers of nearest training images that vote, such as KNN.
    **options: further keys of `config.fewshot`, see configs/common.py. Weights without a
      run need a `dataset`, and `layer` can also be 'all', 'last', or a number, see
      features.layers.

  Returns:
    A dict for JSON: `dataset`, `train` and `test` (the splits), `num_train`, `num_test`,
    `num_classes`, `layer`, `num_features`; `fewshot`, a list of dicts of `shots`,
    `accuracies` (from 0 to 1, by seed), `mean` and `std`; `linear`, None or a dict of
    `accuracy`, `l2` and `held_out`, a list of (penalty, accuracy); `knn`, a list of dicts
    of `k` and `accuracy`; and `layers`, None or for layer='all' a list of dicts like
    `linear` with `layer`.

  Raises:
    ValueError: if an argument or the data do not suit a probe; before anything is
      computed.
  """
  task = evaluation.with_own_config(model.task)
  config = task.config
  if not model.workdir and not options.get('dataset'):
    raise ValueError(
      'dataset is not set, and weights without a run have none: pass --dataset'
    )
  layer = str(options.pop('layer', config.fewshot.layer))
  has_all_layers = layer == probes.ALL
  drop_shots = shots is None and not has_all_layers
  if shots is None:
    shots = () if has_all_layers else SHOTS
  if has_all_layers and (shots or knn or not linear):
    raise ValueError(
      f"layer='{layer}' needs a linear probe: pass --linear without --shots and --knn"
    )
  if not shots and not linear and not knn:
    raise ValueError('there are no probes: pass --shots, --linear or --knn')
  mesh = mesh or sharding.mesh_of(model.params)
  layers = probes.select(task, layer)
  config.fewshot.update(shots=tuple(shots), knn=tuple(knn), layer=layers[-1], **options)
  run_config.check_values(config)
  evaluation.fit_batches(config, mesh)
  run_config.check_memory(config, jax.process_count())
  few_shot = probes.FewShot(
    base.Evaluation(task, mesh),
    layers=layers,
    drop_shots=drop_shots,
    **config.fewshot,
  )
  few_shot.check_memory(linear, bool(knn))
  dataset, train, test = probes.splits(config, config.fewshot)
  all_images = linear or bool(knn)
  extracted = few_shot.extract(model.params, model.extra, all_images=all_images)
  linear_rows = _linear_rows(few_shot, extracted) if linear else []
  return {
    'dataset': dataset or config.dataset,
    'train': train,
    'test': test,
    'num_train': few_shot.train.num_examples,
    'num_test': few_shot.test.num_examples,
    'num_classes': len(few_shot.class_names),
    'layer': layer,
    'num_features': few_shot.extractor.widths[layers[-1]],
    'fewshot': _few_shot_rows(few_shot, extracted) if few_shot.shots else [],
    'linear': linear_rows[0] if linear and not has_all_layers else None,
    'knn': _knn_rows(few_shot, extracted, knn) if knn else [],
    'layers': linear_rows if has_all_layers else None,
  }


def _few_shot_rows(
  few_shot: probes.FewShot, extracted: probes.Extracted
) -> list[dict[str, Any]]:
  """Returns the accuracies of few-shot probes of a layer."""
  [by_shots] = few_shot.accuracies(extracted).values()
  rows = []
  for shots, accuracies in by_shots.items():
    mean, std = metrics.mean_std(accuracies)
    rows.append({'shots': shots, 'accuracies': accuracies, 'mean': mean, 'std': std})
  return rows


def _knn_rows(
  few_shot: probes.FewShot, extracted: probes.Extracted, knn: Sequence[int]
) -> list[dict[str, Any]]:
  """Returns the accuracy of votes of nearest images of a layer."""
  by_count = few_shot.neighbours(extracted, knn)
  return [{'k': k, 'accuracy': accuracy} for k, accuracy in by_count.items()]


def _linear_rows(
  few_shot: probes.FewShot, extracted: probes.Extracted
) -> list[dict[str, Any]]:
  """Returns the linear probes of layers."""
  rows = []
  for layer, result in few_shot.linear(extracted).items():
    held_out = list(result.held_out.items())
    rows.append({'layer': layer, **result._asdict(), 'held_out': held_out})
  return rows


def table(result: dict[str, Any]) -> str:
  """Formats the result of `probe`."""
  head = (
    f'{result["dataset"]}, {console.pluralize(result["num_classes"], "class")}: trained on '
    f"'{result['train']}' ({console.pluralize(result['num_train'], 'image')}), tested on "
    f"'{result['test']}' ({result['num_test']:,}); "
  )
  if result['layers']:
    return f'{head}linear probes of all layers.\n{probes.table(_by_layer(result))}'
  head += f"{result['num_features']:,} features, '{result['layer']}'."
  lines = [head, probes.header('probe')]
  for row in result['fewshot']:
    note = f' ({console.pluralize(len(row["accuracies"]), "seed")})'
    lines.append(probes.line(f'{row["shots"]:>2}-shot', row['accuracies'], note))
  for row in result['knn']:
    lines.append(probes.line(f'{row["k"]}-NN', [row['accuracy']]))
  if linear := result['linear']:
    l2s = ', '.join(f'{l2:g}' for l2, _ in linear['held_out'])
    note = f' (penalty {linear["l2"]:g} of {l2s})'
    lines.append(probes.line('linear', [linear['accuracy']], note))
  return '\n'.join(lines)


def write(path: epath.Path, result: dict[str, Any]) -> None:
  """Writes the result of `probe` as JSON, and a plot if it has all layers."""
  probes.write(path, result, _by_layer(result))


def _by_layer(result: dict[str, Any]) -> dict[str, list[float]]:
  """Returns the accuracy of each layer, for a table or a plot."""
  return {row['layer']: [row['accuracy']] for row in result['layers'] or ()}
