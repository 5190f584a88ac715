r"""Measure the features of a model by few-shot, linear and kNN probes.

  vit_jax probe --workdir=/tmp/digits
  vit_jax probe --workdir=/tmp/run --dataset=cifar100 --linear
  vit_jax probe --workdir=/tmp/run --shots --knn 10 20
  vit_jax probe --workdir=/tmp/run --linear --layer=all --json=/tmp/probe.json

The model is not changed; only a linear classifier of its features is trained.
Few-shot probes solve least squares in closed form, on N images per class and for each
seed (arXiv 2010.11929, section 4.1). --linear is logistic regression on all training
images, with the penalty chosen on held-out ones. --knn lets the nearest training images
vote (arXiv 2104.14294). See docs/measure.md.
"""

from collections.abc import Sequence

from etils import epath

from vit_jax import console
from vit_jax.commands import flags

_FLAGS = {
  '--dataset': dict(
    help="TFDS name, folder or hf://OWNER/NAME with classes (the run's)"
  ),
  '--train': dict(metavar='SPLIT', help="training split, such as 'train[:10%%]'"),
  '--test': dict(metavar='SPLIT', help="test split, such as 'validation'"),
  '--shots': dict(
    type=int,
    nargs='*',
    metavar='N',
    help='training images per class; without a number: no few-shot probe (of 1 5 10 25 '
    'those that every class has)',
  ),
  '--seeds': dict(type=int, nargs='+', metavar='N', help='few-shot draws (0 1 2)'),
  '--l2': dict(type=float, help='penalty of the few-shot probes (1024)'),
  '--linear': dict(action='store_true', help='add a probe of all training images'),
  '--knn': dict(
    type=int,
    nargs='*',
    metavar='K',
    help='add votes of the K nearest training images; without a number: 20',
  ),
  '--layer': dict(
    help="number (from 0) or path of a layer, whose tokens are averaged, 'last', or "
    "'all' with --linear ('features': the inputs of the head)"
  ),
  '--squeeze': dict(
    type=float,
    help='resize to this multiple of the image size before the crop (8/7, or as published weights say)',
  ),
  '--batch': dict(type=int, help="images per batch (the run's; 32)"),
  '--tfds_data_dir': dict(help="folder of TFDS data sets (the run's)"),
  '--json': dict(
    metavar='FILE', help='write the results; with --layer=all also a plot'
  ),
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('probe', __doc__)
  flags.add_model_flags(parser)
  parser.add(_FLAGS)
  return parser


def main(argv: Sequence[str]) -> int:
  """Prints the accuracies of probes; returns the exit status."""
  args = make_parser().parse_args(argv)
  flags.check_output('json', args.json)
  folder = args.tfds_data_dir
  if folder and not epath.Path(folder).is_dir():
    raise ValueError(
      f"tfds_data_dir='{folder}' is not a folder: pass the folder of prepared TFDS "
      'data sets (--tfds_data_dir)'
    )
  import jax

  from vit_jax import predict
  from vit_jax.distributed import sharding
  from vit_jax.evaluators import evaluation, probe
  from vit_jax.run import workdir as workdir_lib

  if args.weights:
    mesh = sharding.make_mesh({'data': -1})
    model = flags.load_model(args)
    model.params = jax.device_put(model.params, sharding.replicated(mesh))
  else:
    mesh = evaluation.run_mesh(args.workdir)
    dtype = args.compute_dtype
    model = predict.load(args.workdir, args.step, mesh, compute_dtype=dtype)
  if args.tfds_data_dir:
    model.config.tfds_data_dir = args.tfds_data_dir
  if args.batch is not None:
    model.config.batch = model.config.batch_eval = args.batch
  names = ('dataset', 'train', 'test', 'l2', 'layer', 'squeeze')
  options = {name: getattr(args, name) for name in names}
  options['seeds'] = args.seeds and tuple(args.seeds)
  options = {k: v for k, v in options.items() if v is not None}
  knn = args.knn or ()
  if args.knn == []:  # --knn without numbers.
    knn = probe.KNN
  result = probe.probe(model, mesh, args.shots, args.linear, knn, **options)
  step = '' if args.weights else f', step {model.step}'
  console.log(f'{args.weights or args.workdir}{step}\n{probe.table(result)}')
  if args.json:
    path = workdir_lib.absolute(args.json)
    probe.write(path, result)
    console.log(f'Wrote {path}.')
  return 0
