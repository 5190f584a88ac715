"""Measures how good the features of a frozen model are: few-shot, linear and kNN probes.

In Python:

  model = predict.load('/tmp/digits')
  probe.probe(model, dataset='digits', shots=(5,), linear=True)
  probe.probe(model, dataset='digits', linear=True, layer='all')['layers']

`vit_jax probe` (vit_jax/commands/probe.py) is the command.
"""

from collections.abc import Sequence

import jax

from vit_jax import console
from vit_jax.distributed import sharding
from vit_jax.evaluators import base, evaluation, probes
from vit_jax.run import config as run_config, metrics

SHOTS = (1, 5, 10, 25)
KNN = (20,)  # Neighbours; DINO's choice.


def probe(
  model,
  mesh: jax.sharding.Mesh | None = None,
  shots: Sequence[int] | None = None,
  linear: bool = False,
  knn: Sequence[int] = (),
  **options,
) -> dict:
  """Probes the features of a model, the result of `predict.load` or `load_weights`.

  Its parameters, on the devices of `mesh`, are not changed. `shots` are the images per
  class of the few-shot probes, by default those of SHOTS that every class has, or none
  if all layers are probed;
  `linear` adds a probe of all training images, and `knn` votes of so many nearest ones,
  such as KNN. `options` are further keys of `config.fewshot`, see configs/common.py:
  weights without a run need a `dataset`, and `layer` can also be 'all', 'last', or a
  number, see features.layers.

  Returns a dict for JSON: `dataset`, `train` and `test` (the splits), `num_train`,
  `num_test`, `num_classes`, `layer`, `num_features`; `fewshot`, a list of dicts of
  `shots`, `accuracies` (from 0 to 1, by seed), `mean` and `std`; `linear`, None or a
  dict of `accuracy`, `l2` and `held_out`, a list of (penalty, accuracy); `knn`, a list
  of dicts of `k` and `accuracy`; and `layers`,
  None or for layer='all' a list of such dicts with `layer`.
  """
  config = model.config
  if not model.workdir and not options.get('dataset'):
    raise ValueError(
      'dataset is not set, and weights without a run have none: pass --dataset'
    )
  layer = str(options.pop('layer', config.fewshot.layer))
  every = layer == probes.ALL
  is_default = shots is None
  if is_default:
    shots = () if every else SHOTS
  if every and (shots or knn or not linear):
    raise ValueError(
      f"layer='{layer}' needs a linear probe: pass --linear without --shots and --knn"
    )
  if not shots and not linear and not knn:
    raise ValueError('there are no probes: pass --shots, --linear or --knn')
  mesh = mesh or sharding.mesh_of(model.params)
  layers = probes.select(model.task, layer)
  config.fewshot.update(shots=tuple(shots), knn=tuple(knn), layer=layers[-1], **options)
  run_config.check_values(config)
  evaluation.fit_batches(config, mesh)
  run_config.check_memory(config, jax.process_count())
  made = probes.FewShot(
    base.Evaluation(model.task, mesh),
    layers=layers,
    drop_shots=is_default and not every,
    **config.fewshot,
  )
  made.check_memory(linear, bool(knn))
  dataset, train, test = probes.splits(config, config.fewshot)
  all_images = linear or bool(knn)
  extracted = made.extract(model.params, model.extra, all_images=all_images)
  few, near, rows = {}, {}, []
  if made.shots:
    [few] = made.accuracies(extracted).values()
  if knn:
    near = made.neighbours(extracted, knn)
  if linear:
    for name, x in made.linear(extracted).items():
      rows.append({'layer': name, **x._asdict(), 'held_out': [*x.held_out.items()]})
  names = 'mean', 'std'
  return {
    'dataset': dataset or config.dataset,
    'train': train,
    'test': test,
    'num_train': made.train.num_examples,
    'num_test': made.test.num_examples,
    'num_classes': len(made.class_names),
    'layer': layer,
    'num_features': made.extractor.widths[layers[-1]],
    'fewshot': [
      {'shots': n, 'accuracies': x, **dict(zip(names, metrics.mean_std(x)))}
      for n, x in few.items()
    ],
    'linear': rows[0] if rows and not every else None,
    'knn': [{'k': k, 'accuracy': accuracy} for k, accuracy in near.items()],
    'layers': rows if every else None,
  }


def table(result: dict) -> str:
  """Formats the result of `probe`."""
  head = (
    f'{result["dataset"]}, {console.counted(result["num_classes"], "class")}: trained on '
    f"'{result['train']}' ({console.counted(result['num_train'], 'image')}), tested on "
    f"'{result['test']}' ({result['num_test']:,}); "
  )
  if result['layers']:
    return f'{head}linear probes of all layers.\n{probes.table(_by_layer(result))}'
  head += f"{result['num_features']:,} features, '{result['layer']}'."
  lines = [head, probes.header('probe')]
  for row in result['fewshot']:
    note = f' ({console.counted(len(row["accuracies"]), "seed")})'
    lines.append(probes.line(f'{row["shots"]:>2}-shot', row['accuracies'], note))
  for row in result['knn']:
    lines.append(probes.line(f'{row["k"]}-NN', [row['accuracy']]))
  if linear := result['linear']:
    l2s = ', '.join(f'{l2:g}' for l2, _ in linear['held_out'])
    note = f' (penalty {linear["l2"]:g} of {l2s})'
    lines.append(probes.line('linear', [linear['accuracy']], note))
  return '\n'.join(lines)


def write(path, result: dict):
  """Writes the result of `probe` as JSON, and a plot if it has all layers."""
  probes.write(path, result, _by_layer(result))


def _by_layer(result):
  return {row['layer']: [row['accuracy']] for row in result['layers'] or ()}
