r"""Counts the compute of pre-training, its time and its price; draws figure 5.

  python -m vit_jax.compute

counts the 18 pre-trainings of the paper's table 6 from the models themselves,
beside the published exaFLOPs, and those of table 2 beside the core-days that
the paper spent. No model is compiled or run: it takes seconds on any machine.

Any other pre-training, on a known data set or on data of any size:

  python -m vit_jax.compute --model s16 bit_r50x1 --dataset=imagenet21k --epochs=90
  python -m vit_jax.compute --model b16 --num_examples=5e6 --num_classes=400 \
    --epochs=30 --image_size=384 --chip=v5e --mfu=0.5 --price=1.2

A device (a core of TPU v2 and v3, a chip of later versions) reaches --mfu of its
peak: 61.5 TFLOP/s a core of v3, by Google Cloud's documentation. --price is that
of an hour of one chip, which on v2 and v3 has two cores.

Counted are matrix products and convolutions: 2 FLOPs for each multiply-add of a
forward pass, times 3 for forward and backward pass. Products with the zeros
around an image do not count, and all tokens of the last layer do. The paper
counts like this too: table 6 follows within 2.5 % in all rows but one.

The axes of figure 5, pre-training compute and transfer accuracy, with your own
results beside those of table 2 (needs matplotlib: pip install -e '.[plots]'):

  python -m vit_jax.compute --results mine.csv --metric=accuracy --plot=/tmp/5.png

A file of results is a CSV file with a header, or a JSON list of objects. Each
row has the accuracy (--metric, in percent, or all of them as shares of 1) and
either `exaflops`, or a `model` with `epochs`, which is counted with the other
flags. `family` and `name`, if given, say what it is. The study.json of
configs/compute_transfer.py is such a file, with --metric=mean.
"""

import argparse
import functools
import json
import pathlib

from vit_jax import cli
from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.configs import rules
from vit_jax.scale import costs
from vit_jax.scale import flops
from vit_jax.scale import points
from vit_jax.scale import topology

_TABLE_6 = 'jft300m'  # The data set of table 6.
# Published accuracies that a plot can show.
_MEASURES = tuple(costs.TABLE_2[0].accuracy)


@functools.cache
def _forward(name, num_classes, image_size):
  model = models.get_model(name, num_classes=num_classes)
  return flops.forward_flops(model, image_size, whole=True)


def account(name: str, epochs: float, setting: costs.Setting) -> dict:
  """Accounts for the pre-training of a model, see costs.account.

  Args:
    name: name of the model, see models.get_model.
    epochs: number of epochs.
    setting: images and devices.

  Raises:
    ValueError: if the name is unknown, or the model does not fit the images.
  """
  name = model_configs.get_config(name).model_name
  count = _forward(name, setting.num_classes, setting.image_size)
  return costs.account(name, epochs, count, setting)


def table_6(setting: costs.Setting | None = None) -> list[dict]:
  """Accounts for the 18 pre-trainings of the paper's table 6.

  Args:
    setting: images and devices, by default the paper's.
  """
  setting = setting or costs.Setting(*costs.DATASETS[_TABLE_6])
  with cli.bar(total=len(costs.TABLE_6), desc='Counting') as bar:
    rows = []
    for name, epochs in costs.TABLE_6:
      rows.append(account(name, epochs, setting))
      bar.update()
  return rows


def _data(name) -> dict[str, int]:
  """Returns the fields of costs.Setting for a data set of known size."""
  num_examples, num_classes = costs.DATASETS[name]
  return {'num_examples': num_examples, 'num_classes': num_classes}


def table_2(setting: costs.Setting) -> list[dict]:
  """Accounts for the pre-trainings of the paper's table 2.

  Args:
    setting: devices.

  Returns:
    Rows as of `account`, with `dataset`, and the share of the devices' peak
    that the published core-days imply, `published_mfu`.
  """
  rows = []
  for column in costs.TABLE_2:
    paper = setting._replace(
      **_data(column.dataset), image_size=costs.PAPER_SIZE, chip='v3'
    )
    row = account(column.model, column.epochs, paper)
    row['dataset'] = column.dataset
    row['published_mfu'] = row['mfu'] * row['core_days'] / column.core_days
    rows.append(row)
  return rows


# --- Command line ---


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of this command."""
  parser = cli.parser('vit_jax.compute', __doc__)
  parser.add_argument(
    '--model', nargs='+', help='models to count (those of tables 6 and 2)'
  )
  parser.add_argument('--epochs', type=float, help='epochs of the models')
  parser.add_argument(
    '--dataset', choices=costs.DATASETS, help='data set of known size'
  )
  parser.add_argument(
    '--num_examples', type=float, help='images of an epoch, of any other data'
  )
  parser.add_argument(
    '--num_classes', type=int, help='width of the head (that of the data set)'
  )
  parser.add_argument(
    '--image_size',
    type=cli.height_width,
    help='SIZE or HEIGHT,WIDTH in pixels (224)',
  )
  parser.add_argument(
    '--chip', choices=topology.CHIPS, default='v3', help='TPU version (v3)'
  )
  parser.add_argument(
    '--mfu',
    type=float,
    default=0.4,
    help="share of the devices' peak that the training reaches (0.4)",
  )
  parser.add_argument(
    '--price', type=float, help='price of an hour of one chip, in any currency'
  )
  parser.add_argument(
    '--json', help='file for the table: a JSON list with an object per row'
  )
  parser.add_argument(
    '--results', nargs='+', metavar='FILE', help='CSV or JSON files of results'
  )
  parser.add_argument(
    '--metric', default='accuracy', help='column with the accuracy (accuracy)'
  )
  parser.add_argument(
    '--published',
    choices=(*_MEASURES, 'none'),
    default='ImageNet',
    help='accuracies of table 2 to show beside the results (ImageNet)',
  )
  parser.add_argument('--plot', help='PNG for the plot of figure 5')
  return parser


def _check(args):
  """Raises ValueError if a flag is wrong, or flags do not fit together."""
  numbers = {
    'epochs': rules.positive,
    'num_examples': rules.number(1),
    'num_classes': rules.whole(1),
    'image_size': rules.optional(rules.pair_of_sizes),
    'mfu': rules.share,
    'price': rules.number(0),
  }
  for name, rule in numbers.items():
    value = getattr(args, name)
    wrong = value is not None and rule(value)
    if wrong:
      raise ValueError(f'{name}={value} {wrong} (--{name})')
  for name in ('epochs', 'dataset', *list(numbers)[1:4]):
    needed = args.model or (args.results and name != 'epochs')
    if getattr(args, name) is not None and not needed:
      raise ValueError(
        f'--{name}={getattr(args, name)} needs a model: give --model=NAME; tables 6 '
        'and 2 have their own data'
      )
  if args.model and args.epochs is None:
    raise ValueError('--model needs a length: give --epochs=NUMBER')
  for name in ('json', 'plot'):
    cli.check_output(name, getattr(args, name))


def _setting(args) -> costs.Setting:
  """Returns images and devices of the command line.

  Raises:
    ValueError: if models are given, but no data.
  """
  known = costs.DATASETS.get(args.dataset, (None, None))
  if not (args.model or args.results):
    known = costs.DATASETS[_TABLE_6]
  num_examples = args.num_examples or known[0]
  num_classes = args.num_classes or known[1]
  if args.model and None in (num_examples, num_classes):
    raise ValueError(
      '--model needs the size of the data: give --dataset=NAME, or --num_examples '
      'and --num_classes'
    )
  return costs.Setting(
    num_examples,
    num_classes,
    args.image_size or costs.PAPER_SIZE,
    args.chip,
    args.mfu,
    args.price,
  )


def _results(args, setting) -> list[points.Point]:
  """Reads the files of results of the command line."""

  def count(name, epochs):
    if None in (setting.num_examples, setting.num_classes):
      raise ValueError(
        f"model '{name}' has no exaflops in its row: give --dataset=NAME, or "
        '--num_examples and --num_classes, to count them'
      )
    return account(name, epochs, setting)['exaflops']

  return [
    point
    for path in args.results or ()
    for point in points.read(path, args.metric, count)
  ]


def _published(measure, setting) -> list[points.Point]:
  """Returns the points of table 2."""
  return [
    points.Point(
      'BiT, published' if row['model'].startswith('BiT') else 'ViT, published',
      f'{row["model"]}, {row["dataset"]}',
      row['exaflops'],
      column.accuracy[measure],
    )
    for row, column in zip(table_2(setting), costs.TABLE_2)
  ]


def _compare(found, args, setting):
  """Prints and draws transfer accuracy by the compute of the pre-training."""
  measure = args.metric
  if args.published != 'none':
    measure = f'accuracy, {args.published}'
    found = found + _published(args.published, setting)
  cli.say(f'\nTransfer against pre-training compute: {measure}\n')
  cells = [
    (p.family, p.name, costs.number(p.exaflops), f'{p.accuracy:.2f}')
    for p in found
  ]
  cli.say(cli.table(('family', 'name', 'exaFLOPs', '%'), cells))
  if not args.plot:
    return
  from vit_jax.figures import studies

  families = {}
  for point in found:
    families.setdefault(point.family, []).append(point)
  studies.scatter(
    {
      family: ([p.exaflops for p in members], [p.accuracy for p in members])
      for family, members in families.items()
    },
    'pre-training compute (exaFLOPs)',
    f'{measure} (%)',
    'Transfer against pre-training compute',
    log_x=True,
    names={
      family: [p.name for p in members] for family, members in families.items()
    },
    path=args.plot,
  )
  cli.say(f'\nPlot written to {args.plot}')


def main() -> None:
  """Accounts for the models of the command line; prints, writes and draws."""
  args = make_parser().parse_args()
  _check(args)
  cli.quiet()
  cli.avoid_libtpu()
  setting = _setting(args)
  compares = args.results or args.plot
  found = _results(args, setting)
  if args.model:
    rows = [account(name, args.epochs, setting) for name in args.model]
    cli.say(f'{costs.describe(rows, setting)}\n\n{costs.assumptions(setting)}')
  else:
    paper = setting._replace(**_data(_TABLE_6), image_size=costs.PAPER_SIZE)
    rows = table_6(paper)
    cli.say('Table 6: pre-training on JFT-300M at 224 px\n')
    cli.say(
      f'{costs.describe(rows, paper)}\n\n{costs.NOTE_6}\n{costs.assumptions(paper)}'
    )
    cli.say('\nTable 2: pre-training on cores of TPU v3\n')
    cli.say(costs.describe_table_2(table_2(paper), paper))
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + '\n')
    cli.say(f'\nWritten to {args.json}')
  if compares:
    _compare(found, args, setting)


if __name__ == '__main__':
  cli.run(main)
