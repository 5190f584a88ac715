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
_SIZES = ('dataset', 'num_examples', 'num_classes', 'image_size')  # Flags.


@functools.cache
def _forward(name, num_classes, image_size):
  model = models.get_model(name, num_classes=num_classes)
  return flops.forward_flops(model, image_size, whole=True)


def account(name: str, epochs: float, setting: costs.Setting) -> dict:
  """Accounts for the pre-training of a model, see costs.account.

  Raises ValueError if the name is unknown, or the model does not fit the images.
  """
  name = model_configs.get_config(name).model_name
  if None in setting[:2]:
    raise ValueError(
      f"model='{name}' needs the size of the data: give --dataset=NAME, or "
      '--num_examples and --num_classes'
    )
  count = _forward(name, setting.num_classes, setting.image_size)
  return costs.account(name, epochs, count, setting)


def table_6(setting: costs.Setting | None = None) -> list[dict]:
  """Accounts for the 18 pre-trainings of table 6, by default in its setting."""
  setting = setting or costs.Setting(*costs.DATASETS[_TABLE_6])
  tried = cli.bar(iterable=list(costs.TABLE_6), desc='Counting')
  return [account(name, epochs, setting) for name, epochs in tried]


def _of_data(setting, name) -> costs.Setting:
  """Returns a setting with the paper's images of a data set."""
  sizes = zip(('num_examples', 'num_classes'), costs.DATASETS[name])
  return setting._replace(**dict(sizes), image_size=costs.PAPER_SIZE)


def table_2(setting: costs.Setting) -> list[dict]:
  """Accounts for the pre-trainings of the paper's table 2.

  Returns rows as of `account`, with `dataset`, and the share of the devices' peak
  that the published core-days imply, `published_mfu`. Of `setting` only the
  devices count.
  """
  rows = []
  for (name, dataset, epochs), (days, _) in costs.TABLE_2.items():
    paper = _of_data(setting, dataset)._replace(chip='v3')
    row = account(name, epochs, paper)
    row['dataset'] = dataset
    row['published_mfu'] = row['mfu'] * row['core_days'] / days
    rows.append(row)
  return rows


# --- Command line ---


def _check(args):
  """Raises ValueError if a flag is wrong, or flags do not fit together."""
  known = {
    'dataset': rules.one_of(*costs.DATASETS),
    'chip': rules.one_of(*topology.CHIPS),
    'published': rules.one_of(*costs.MEASURES, 'none'),
    'epochs': rules.positive,
    'num_examples': rules.number(1),
    'num_classes': rules.whole(1),
    'image_size': rules.pair_of_sizes,
    'mfu': rules.share,
    'price': rules.number(0),
  }
  for name, rule in known.items():
    value = getattr(args, name)
    if value is not None and (wrong := rule(value)):
      raise ValueError(f'{name}={value!r} {wrong} (--{name})')
  for name in ('epochs', *(() if args.results else _SIZES)):
    if getattr(args, name) is not None and not args.model:
      raise ValueError(
        f'--{name}={getattr(args, name)} needs a model: give --model=NAME; tables 6 '
        'and 2 have their own data'
      )
  if args.model and args.epochs is None:
    raise ValueError('--model needs a length: give --epochs=NUMBER')


def _setting(args) -> costs.Setting:
  """Returns images and devices of the command line."""
  known = costs.DATASETS.get(args.dataset, (None, None))
  return costs.Setting(
    args.num_examples or known[0],
    args.num_classes or known[1],
    args.image_size or costs.PAPER_SIZE,
    args.chip,
    args.mfu,
    args.price,
  )


def _compare(found, args, setting):
  """Prints and draws transfer accuracy by the compute of the pre-training."""
  measure = args.metric
  if args.published != 'none':
    measure = f'accuracy, {args.published}'
    column = costs.MEASURES.index(args.published)
    for row, (_, accuracies) in zip(table_2(setting), costs.TABLE_2.values()):
      found.append(
        points.Point(
          'BiT, published' if 'BiT' in row['model'] else 'ViT, published',
          f'{row["model"]}, {row["dataset"]}',
          row['exaflops'],
          accuracies[column],
        )
      )
  cli.say(f'\nTransfer against pre-training compute: {measure}\n')
  cells = [
    (p.family, p.name, costs.number(p.exaflops), f'{p.accuracy:.2f}')
    for p in found
  ]
  cli.say(cli.table(('family', 'name', 'exaFLOPs', '%'), cells))
  if not args.plot:
    return
  from vit_jax.figures import studies

  places, names = {}, {}
  for family, name, *place in found:
    places.setdefault(family, []).append(place)
    names.setdefault(family, []).append(name)
  studies.scatter(
    {family: tuple(zip(*pairs)) for family, pairs in places.items()},
    'pre-training compute (exaFLOPs)',
    f'{measure} (%)',
    'Transfer against pre-training compute',
    log_x=True,
    names=names,
    path=args.plot,
  )
  cli.say(f'\nPlot written to {args.plot}')


def run(args) -> None:
  """Accounts for the models that the flags of `vit_jax compute` name."""
  _check(args)
  setting = _setting(args)
  found = [
    point
    for path in args.results or ()
    for point in points.read(
      path,
      args.metric,
      lambda name, epochs: account(name, epochs, setting)['exaflops'],
    )
  ]
  if args.model:
    rows = [account(name, args.epochs, setting) for name in args.model]
    cli.say(f'{costs.describe(rows, setting)}\n\n{costs.assumptions(setting)}')
  else:
    paper = _of_data(setting, _TABLE_6)
    rows = table_6(paper)
    cli.say('Table 6: pre-training on JFT-300M at 224 px\n')
    cli.say(
      f'{costs.describe(rows, paper)}\n\n{costs.NOTE_6}\n{costs.assumptions(paper)}'
    )
    cli.say('\nTable 2: pre-training on cores of TPU v3\n')
    cli.say(costs.describe(table_2(paper), paper._replace(chip='v3')))
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + '\n')
    cli.say(f'\nWritten to {args.json}')
  if args.results or args.plot:
    _compare(found, args, setting)


if __name__ == '__main__':
  cli.run('compute')
