r"""Measures how good the features of a model are: few-shot and linear probes.

  python -m vit_jax.probe --workdir=/tmp/digits
  python -m vit_jax.probe --workdir=/tmp/run --dataset=cifar100 --linear
  python -m vit_jax.probe --weights=ViT-B_16.npz --dataset=/data/pets \
    --shots 1 5 10 --json=/tmp/pets.json
  python -m vit_jax.probe --workdir=/tmp/run --layer=Transformer/encoderblock_5

The model stays as it is; only a linear classifier of its features is trained.
A few-shot probe takes the given number of images per class and solves least
squares in closed form, for each seed (arXiv 2010.11929, section 4.1). --linear
trains on all training images: logistic regression by L-BFGS, whose penalty
images held out of the training images choose; by SGD where features and logits
take more than an eighth of the memory.

The features are the inputs of the head. --layer takes those of another layer,
by its path; tokens are averaged. Images are squeezed to 8/7 of the model's
size, and the centre is cropped (--squeeze=1 keeps all).

Models pre-trained without labels are probed the same way. To probe during
training, set --config.fewshot.shots="(1, 5, 10)" (configs/common.py).

In Python:

  model = predict.load('/tmp/digits')
  probe.probe(model, dataset='digits', shots=(5,), linear=True)
"""

import argparse
from collections.abc import Sequence
import json
import statistics

import jax

from vit_jax import cli
from vit_jax import predict

SHOTS = (1, 5, 10, 25)


def probe(
  model,
  mesh: jax.sharding.Mesh | None = None,
  shots: Sequence[int] = SHOTS,
  linear: bool = False,
  **options,
) -> dict:
  """Probes the features of a model.

  Args:
    model: result of `predict.load` or `predict.load_weights`.
    mesh: mesh of the model's parameters; by default that of their devices.
    shots: images per class of the few-shot probes.
    linear: whether to train a linear probe on all training images.
    **options: further keys of `config.fewshot`, see configs/common.py:
      `dataset`, `train`, `test`, `seeds`, `l2`, `layer`, `squeeze`. Weights
      without a run need a `dataset`.

  Returns:
    A dict for JSON: `dataset`, `train` and `test` (the splits), `num_train`,
    `num_test`, `num_classes`, `layer`, `num_features`; `fewshot`, a list of
    dicts of `shots`, `accuracies` (from 0 to 1, by seed), `mean` and `std`; and
    `linear`, None or a dict of `accuracy`, `method`, `l2` and `held_out`, a
    list of (penalty, accuracy).

  Raises:
    FileNotFoundError, ValueError: if an option, the data or the layer are
      wrong, or a class has fewer images than shots.
  """
  from vit_jax.evaluators import fewshot
  from vit_jax.jobs import evaluate
  from vit_jax.run import config as run_config

  config = model.config
  if not model.workdir and not options.get('dataset'):
    raise ValueError(
      'weights without a run come with no data: name a data set (--dataset)'
    )
  if not shots and not linear:
    raise ValueError('there is nothing to measure: give --shots or --linear')
  mesh = mesh or _mesh_of(model.params)
  config.fewshot.update(shots=tuple(shots), **options)
  run_config.check_values(config)
  evaluate.fit_batches(config, mesh)
  probes = fewshot.FewShot(model.task, mesh)
  dataset, train, test = fewshot.splits(config)
  result = {
    'dataset': dataset or config.dataset,
    'train': train,
    'test': test,
    'num_train': probes.train.num_examples,
    'num_test': probes.test.num_examples,
    'num_classes': len(probes.class_names),
    'layer': config.fewshot.layer,
    'num_features': probes.extractor.width,
    'fewshot': [],
  }
  if shots:
    found = probes.accuracies(model.params, model.extra)
    result['fewshot'] = [_summary(*item) for item in found.items()]
  result['linear'] = _linear(model, mesh, probes) if linear else None
  return result


def _mesh_of(params):
  """Returns the mesh that parameters lie on, or that of one device."""
  from vit_jax.scale import sharding

  where = jax.tree.leaves(params)[0].sharding
  if isinstance(where, jax.NamedSharding):
    return where.mesh
  return sharding.make_mesh({'data': 1}, list(where.device_set))


def _summary(shots, accuracies):
  several = len(accuracies) > 1
  return {
    'shots': shots,
    'accuracies': accuracies,
    'mean': statistics.mean(accuracies),
    'std': statistics.stdev(accuracies) if several else 0.0,
  }


def _linear(model, mesh, probes):
  """Returns the result of the linear probe, for JSON."""
  from vit_jax.evaluators import linear_probe

  extractor, train = probes.extractor, probes.train
  sizes = train.num_examples, extractor.width, len(probes.class_names)
  state = model.params, model.extra
  if linear_probe.fits(*sizes):
    found = linear_probe.probe(
      extractor.run(train, *state), extractor.run(probes.test, *state)
    )
  else:
    found = linear_probe.probe_sgd(
      model.task, mesh, extractor, train, probes.test, *state
    )
  return {**found._asdict(), 'held_out': list(found.held_out.items())}


def table(result: dict) -> str:
  """Returns the result of `probe` as text."""
  lines = [
    f'{result["dataset"]}, {result["num_classes"]} classes: trained on '
    f"'{result['train']}' ({result['num_train']:,} images), tested on "
    f"'{result['test']}' ({result['num_test']:,}); {result['num_features']:,} "
    f"features, '{result['layer']}'.",
    f'{"probe":<10} {"accuracy":>9}',
  ]
  for row in result['fewshot']:
    seeds = len(row['accuracies'])
    lines.append(
      f'{row["shots"]:>2}-shot    {100 * row["mean"]:7.2f} % '
      f'+- {100 * row["std"]:.2f} ({seeds} seed{"s" * (seeds > 1)})'
    )
  linear = result['linear']
  if linear:
    how = linear['method']
    if linear['held_out']:
      how += f', penalty {linear["l2"]:g} of ' + ', '.join(
        f'{l2:g}' for l2, _ in linear['held_out']
      )
    lines.append(f'linear     {100 * linear["accuracy"]:7.2f} % ({how})')
  return '\n'.join(lines)


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of this command."""
  parser = cli.parser('vit_jax.probe', __doc__)
  cli.add_model_flags(parser)
  parser.add_argument(
    '--dataset', help='TFDS name or folder with classes (that of the run)'
  )
  parser.add_argument('--train', metavar='SPLIT', help="such as 'train[:10%%]'")
  parser.add_argument('--test', metavar='SPLIT', help="such as 'validation'")
  parser.add_argument(
    '--shots',
    type=int,
    nargs='*',
    default=SHOTS,
    metavar='N',
    help='training images per class (1 5 10 25); --shots alone: none',
  )
  parser.add_argument(
    '--seeds', type=int, nargs='+', metavar='N', help='few-shot draws (0 1 2)'
  )
  parser.add_argument(
    '--l2', type=float, help='penalty of the few-shot probes (1024)'
  )
  parser.add_argument(
    '--linear', action='store_true', help='adds a probe of all training images'
  )
  parser.add_argument('--layer', help="path of a layer ('features')")
  parser.add_argument(
    '--squeeze', type=float, help='size of the image before the crop (8/7)'
  )
  parser.add_argument(
    '--batch', type=int, help='images at a time (that of the run; 32)'
  )
  parser.add_argument(
    '--tfds_data_dir', help='folder of TFDS data sets (that of the run)'
  )
  parser.add_argument('--json', metavar='FILE', help='writes the result to it')
  return parser


def main() -> None:
  """Probes the model of the command line, and prints a table."""
  args = make_parser().parse_args()
  cli.check_model_flags(args)
  cli.check_output('json', args.json)
  cli.quiet()
  cli.avoid_libtpu()
  cli.load_tensorflow()
  from vit_jax.jobs import evaluate
  from vit_jax.run import workdir as workdir_lib
  from vit_jax.scale import sharding

  if args.weights:
    mesh = sharding.make_mesh({'data': -1})
    model = predict.load_weights(args.weights)
    whole = jax.NamedSharding(mesh, jax.P())
    model.params = jax.device_put(model.params, whole)
  else:
    mesh = evaluate.run_mesh(args.workdir)
    model = predict.load(args.workdir, args.step, mesh)
  if args.tfds_data_dir:
    model.config.tfds_data_dir = args.tfds_data_dir
  if args.batch is not None:
    model.config.batch = model.config.batch_eval = args.batch
  names = ('dataset', 'train', 'test', 'l2', 'layer', 'squeeze')
  options = {name: getattr(args, name) for name in names}
  options['seeds'] = args.seeds and tuple(args.seeds)
  options = {k: v for k, v in options.items() if v is not None}
  result = probe(model, mesh, args.shots, args.linear, **options)
  step = '' if args.weights else f', step {model.step}'
  cli.say(f'{args.weights or args.workdir}{step}\n{table(result)}')
  if args.json:
    out = workdir_lib.absolute(args.json)
    workdir_lib.write_atomically(out, json.dumps(result, indent=1))
    cli.say(f'Written to {out}.')


if __name__ == '__main__':
  cli.run(main)
