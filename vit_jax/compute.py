"""Counts the compute of pre-training, its time and its price; draws figure 5.

`vit_jax compute` (vit_jax/commands/compute.py) is the command.
"""

import functools
import json
import pathlib

from vit_jax import cli
from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.configs import rules
from vit_jax.planning import costs
from vit_jax.planning import flops
from vit_jax.planning import points
from vit_jax.planning import topology

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


def _check(args):
  """Raises ValueError if a flag is wrong, or flags do not fit together."""
  known = {
    'dataset': rules.one_of(*costs.DATASETS),
    'chip': rules.one_of(*topology.CHIPS),
    'published': rules.one_of(*_MEASURES, 'none'),
    'epochs': rules.positive,
    'num_examples': rules.number(1),
    'num_classes': rules.whole(1),
    'image_size': rules.optional(rules.pair_of_sizes),
    'mfu': rules.share,
    'price': rules.number(0),
  }
  for name, rule in known.items():
    value = getattr(args, name)
    wrong = value is not None and rule(value)
    if wrong:
      raise ValueError(f'{name}={value!r} {wrong} (--{name})')
  for name in (
    'epochs',
    'dataset',
    'num_examples',
    'num_classes',
    'image_size',
  ):
    needed = args.model or (args.results and name != 'epochs')
    if getattr(args, name) is not None and not needed:
      raise ValueError(
        f'--{name}={getattr(args, name)} needs a model: give --model=NAME; tables 6 '
        'and 2 have their own data'
      )
  if args.model and args.epochs is None:
    raise ValueError('--model needs a length: give --epochs=NUMBER')


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


def run(args) -> None:
  """Accounts for the models that the flags of `vit_jax compute` name.

  Args:
    args: namespace of vit_jax.commands.compute.parse.
  """
  _check(args)
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
  cli.run('compute')
