r"""Measures how good the features of a model are: few-shot and linear probes.

  vit_jax probe --workdir=/tmp/digits
  vit_jax probe --workdir=/tmp/run --dataset=cifar100 --linear
  vit_jax probe --weights=ViT-B_16.npz --dataset=/data/pets \
    --shots 1 5 10 --json=/tmp/pets.json
  vit_jax probe --workdir=/tmp/run --layer=Transformer/encoderblock_5
  vit_jax probe --workdir=/tmp/run --linear --layer=all \
    --json=/tmp/probe.json

The model stays as it is; only a linear classifier of its features is trained.
A few-shot probe takes the given number of images per class and solves least
squares in closed form, for each seed (arXiv 2010.11929, section 4.1). --linear
trains on all training images: logistic regression by L-BFGS, with the penalty that
is best on images held out of the training images.

The features are the inputs of the head. --layer takes those of another layer:
its number from 0, 'last', or the path of a module; tokens are averaged. With
--layer=all, --linear probes each layer, prints a table of the accuracy by
depth, and --json=FILE.json also writes a plot, FILE.png. Images
are squeezed to 8/7 of the model's size, and the centre is cropped (--squeeze=1
keeps all).

Models pre-trained without labels are probed the same way. To probe during
training, set --config.fewshot.shots="(1, 5, 10)" (configs/common.py).
"""

from collections.abc import Sequence

from etils import epath

from vit_jax import console
from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('probe', __doc__)
  flags.add_model_flags(parser)
  parser.add_argument(
    '--dataset', help='TFDS name or folder with classes (that of the run)'
  )
  parser.add_argument('--train', metavar='SPLIT', help="such as 'train[:10%%]'")
  parser.add_argument('--test', metavar='SPLIT', help="such as 'validation'")
  parser.add_argument(
    '--shots',
    type=int,
    nargs='*',
    metavar='N',
    help='training images per class (1 5 10 25); --shots alone: none',
  )
  parser.add_argument(
    '--seeds', type=int, nargs='+', metavar='N', help='few-shot draws (0 1 2)'
  )
  parser.add_argument('--l2', type=float, help='penalty of the few-shot probes (1024)')
  parser.add_argument(
    '--linear', action='store_true', help='adds a probe of all training images'
  )
  parser.add_argument(
    '--layer', help="number or path of a layer, 'last' or 'all' ('features')"
  )
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


def main(argv: Sequence[str]) -> int:
  args = make_parser().parse_args(argv)
  flags.check_output('json', args.json)
  folder = args.tfds_data_dir
  if folder and not epath.Path(folder).is_dir():
    raise ValueError(
      f"tfds_data_dir='{folder}' is no folder: give the folder of prepared TFDS "
      'data sets, or make it (--tfds_data_dir)'
    )
  console.load_tensorflow()
  import jax

  from vit_jax import predict
  from vit_jax.distributed import sharding
  from vit_jax.evaluators import evaluation, probe
  from vit_jax.run import workdir as workdir_lib

  if args.weights:
    mesh = sharding.make_mesh({'data': -1})
    model = predict.of_flags(args)
    model.params = jax.device_put(model.params, sharding.replicated(mesh))
  else:
    mesh = evaluation.run_mesh(args.workdir)
    model = predict.load(args.workdir, args.step, mesh)
  if args.tfds_data_dir:
    model.config.tfds_data_dir = args.tfds_data_dir
  if args.batch is not None:
    model.config.batch = model.config.batch_eval = args.batch
  names = ('dataset', 'train', 'test', 'l2', 'layer', 'squeeze')
  options = {name: getattr(args, name) for name in names}
  options['seeds'] = args.seeds and tuple(args.seeds)
  options = {k: v for k, v in options.items() if v is not None}
  result = probe.probe(model, mesh, args.shots, args.linear, **options)
  step = '' if args.weights else f', step {model.step}'
  console.say(f'{args.weights or args.workdir}{step}\n{probe.table(result)}')
  if args.json:
    path = workdir_lib.absolute(args.json)
    probe.write(path, result)
    console.say(f'Wrote {path}.')
  return 0
