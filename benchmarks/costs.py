r"""Counts the compute of pre-training, its time and its price; run in a checkout:

  python -m benchmarks.costs
  python -m benchmarks.costs --model s16 bit_r50x1 --dataset=imagenet21k --epochs=90
  python -m benchmarks.costs --model b16 --num_examples=5e6 --num_classes=400 \
    --epochs=30 --image_size=384 --chip=v5e --mfu=0.5 --price=1.2

Without flags, counts the pre-training runs of tables 6 and 2 of arXiv 2010.11929, next
to the published exaFLOPs and core-days. No model is compiled or run: it takes seconds.

Table 6 counts 6 FLOPs per multiply-add of a forward pass at 224 px (forward and
backward pass), with a head of 18,291 classes, times 303 million images, times the
epochs. A device (a core of TPU v2 and v3, a chip of later versions) reaches --mfu of
its peak. --price is per hour and chip; chips of v2 and v3 have two cores.
"""

import argparse
from collections.abc import Sequence
import functools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import console, models
from vit_jax.commands import flags
from vit_jax.configs import models as model_configs
from vit_jax.planning import flops, plan, topology

PAPER_SIZE = (224, 224)  # Images of the pre-training.

# Table 6: (model, epochs on JFT-300M) -> exaFLOPs.
TABLE_6 = {
  ('ViT-B_32', 7): 55,
  ('ViT-B_16', 7): 224,
  ('ViT-L_32', 7): 196,
  ('ViT-L_16', 7): 783,
  ('ViT-L_16', 14): 1567,
  ('ViT-H_14', 14): 4262,
  ('BiT-R50x1', 7): 50,
  ('BiT-R50x2', 7): 199,
  ('BiT-R101x1', 7): 96,
  ('BiT-R152x1', 7): 141,
  ('BiT-R152x2', 7): 563,
  ('BiT-R152x2', 14): 1126,
  ('BiT-R200x3', 14): 3306,
  ('R50+ViT-B_32', 7): 106,
  ('R50+ViT-B_16', 7): 274,
  ('R50+ViT-L_32', 7): 246,
  ('R50+ViT-L_16', 7): 859,
  ('R50+ViT-L_16', 14): 1668,
}
# The row of table 6 that its model does not explain.
NOTE_6 = (
  'R50+ViT-L_16, 7 epochs: 859 is probably an error in table 6. Half of its row with '
  '14 epochs is 834, and the other pairs of 7 and 14 epochs agree.'
)
# Noisy Student is an EfficientNet, which this package lacks.
NOISY_STUDENT_CORE_DAYS = 12_300


class Setting(NamedTuple):
  """The data and the devices of a training."""

  num_examples: float | None  # Images per epoch.
  num_classes: int | None
  image_size: tuple[int, int] = PAPER_SIZE
  chip: str = 'v3'  # A key of topology.CHIPS.
  mfu: float = 0.4  # Share of a device's peak that the training reaches.
  price: float | None = None  # Per hour and chip (two cores on v2 and v3).

  @property
  def device(self) -> str:
    """Kind of the device: 'v3 core' or 'v4 chip'."""
    kind = 'core' if topology.CHIPS[self.chip].per_chip > 1 else 'chip'
    return f'{self.chip} {kind}'


@functools.cache
def forward_flops(
  name: str, num_classes: int | None, image_size: tuple[int, int]
) -> int:
  """Counts the FLOPs of a forward pass of a named model on one image.

  A third of the locked image tower of LiT counts: it has a forward pass only, and
  training is counted as three.
  """
  if model_configs.kind_of(model_configs.get_config(name)) != 'lit':
    model = models.get_model(name, num_classes=num_classes)
    return flops.forward_flops(model, image_size, whole=True)
  model = models.get_model(name)
  tower = model.text_tower()
  tokens = jax.ShapeDtypeStruct((1, model.pp['max_len']), jnp.int32)
  text = jax.make_jaxpr(lambda x: tower.init(jax.random.key(0), x))(tokens)
  image = flops.forward_flops(model.image_tower(), image_size, whole=True)
  return round(image / 3) + flops.count_flops(text)


def pre_training(name: str, epochs: float, setting: Setting) -> dict[str, Any]:
  """Accounts for the pre-training of a named model.

  Returns:
    `model`, `epochs`, `exaflops`; `core_days` on devices of kind `chip` at the share
    `mfu` of their peak; `price`; and the paper's numbers for this pre-training,
    `published_exaflops` (table 6) and `published_core_days` (table 2, on v3). None
    stands for no price, and for unpublished numbers.

  Raises:
    ValueError: if the name is unknown, the model does not fit the images, or the size
      of the data is missing.
  """
  name = model_configs.get_config(name).model_name
  has_classes = name not in model_configs.LITS
  if setting.num_examples is None or (has_classes and setting.num_classes is None):
    raise ValueError(
      f"model='{name}' needs the size of the data: pass --dataset=NAME, or "
      '--num_examples and --num_classes'
    )
  forward = forward_flops(name, setting.num_classes, setting.image_size)
  exaflops = flops.training_exaflops(forward, setting.num_examples * epochs)
  chip = topology.CHIPS[setting.chip]
  days = exaflops * 1e18 / (setting.mfu * chip.peak) / 86_400
  price = None
  if setting.price is not None:
    price = days * 24 / chip.per_chip * setting.price
  dataset = _dataset_name(setting)
  is_table_6 = dataset == 'jft300m'
  return {
    'model': name,
    'epochs': epochs,
    'exaflops': exaflops,
    'published_exaflops': TABLE_6.get((name, epochs)) if is_table_6 else None,
    'core_days': days,
    'chip': setting.chip,
    'mfu': setting.mfu,
    'published_core_days': plan.PAPER_CORE_DAYS.get((name, dataset, epochs)),
    'price': price,
  }


def _dataset_name(setting: Setting) -> str | None:
  """Returns the name of a data set of the paper, from its size and the images'."""
  if setting.image_size != PAPER_SIZE:
    return None
  for name, size in plan.DATASETS.items():
    if size == (setting.num_examples, setting.num_classes):
      return name
  return None


def table_6(setting: Setting) -> list[dict[str, Any]]:
  """Returns the rows of `pre_training` for the runs of table 6, on JFT-300M."""
  num_examples, num_classes = plan.DATASETS['jft300m']
  setting = setting._replace(num_examples=num_examples, num_classes=num_classes)
  return [pre_training(name, epochs, setting) for name, epochs in TABLE_6]


def table_2(setting: Setting) -> list[dict[str, Any]]:
  """Returns the rows of `pre_training` for the runs of table 2, on cores of TPU v3.

  Each also has its `dataset`, and `published_mfu`, the share of the devices' peak that
  the published core-days imply.
  """
  rows = []
  for (name, dataset, epochs), days in plan.PAPER_CORE_DAYS.items():
    num_examples, num_classes = plan.DATASETS[dataset]
    setting = setting._replace(
      num_examples=num_examples, num_classes=num_classes, chip='v3'
    )
    row = pre_training(name, epochs, setting)
    row['dataset'] = dataset
    row['published_mfu'] = row['mfu'] * row['core_days'] / days
    rows.append(row)
  return rows


# --- Formatting ---


def format_number(value: float) -> str:
  """Formats a number for a table: '0.00123', '56.3', '4,258.6'."""
  return f'{value:,.1f}' if value >= 10 else f'{value:.3g}'


def assumptions(setting: Setting) -> str:
  """Describes the assumptions of times and prices."""
  text = (
    f'Days of one {setting.device} at {100 * setting.mfu:g} % (--mfu) of its peak of '
    f'{topology.CHIPS[setting.chip].peak / 1e12:g} TFLOP/s.'
  )
  if setting.price is not None:
    text += f' Prices at {setting.price:g} per hour and chip (--price).'
  return text


def format_rows(rows: Sequence[dict[str, Any]], setting: Setting) -> str:
  """Formats rows of `pre_training` as a table."""
  header = ['model', 'epochs', 'exaFLOPs', f'{setting.device}-days']
  is_published = any(row['published_exaflops'] for row in rows)
  if is_published:
    header[3:3] = ['published', 'difference']
  if setting.price is not None:
    header.append('price')
  lines = []
  for row in rows:
    cells = {
      'model': row['model'],
      'epochs': f'{row["epochs"]:g}',
      'exaFLOPs': format_number(row['exaflops']),
      f'{setting.device}-days': format_number(row['core_days']),
    }
    published = row['published_exaflops']
    if published:
      cells['published'] = f'{published:,}'
      cells['difference'] = f'{100 * (row["exaflops"] / published - 1):+.1f} %'
    if setting.price is not None:
      cells['price'] = f'{row["price"]:,.2f}'
    lines.append([cells.get(name, '') for name in header])
  return console.table(header, lines)


def format_table_2(rows: Sequence[dict[str, Any]]) -> str:
  """Formats rows of `table_2` as a table, with the paper's Noisy Student."""
  header = ['model', 'data', 'epochs', 'exaFLOPs', 'v3 core-days', 'published']
  lines = [
    [
      row['model'],
      row['dataset'],
      f'{row["epochs"]:g}',
      format_number(row['exaflops']),
      format_number(row['core_days']),
      f'{row["published_core_days"]:,}',
      f'{100 * row["published_mfu"]:.0f} %',
    ]
    for row in rows
  ]
  days = f'{NOISY_STUDENT_CORE_DAYS:,}'
  lines.append(['Noisy Student', 'jft300m', '', '', '', days, ''])
  return console.table([*header, 'share of peak'], lines)


# --- The command ---


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.costs'
  add = parser.add_argument
  add('--model', nargs='+', help='models to count (the ones of tables 6 and 2)')
  add('--epochs', type=_positive, help='epochs of the models')
  add('--dataset', choices=plan.DATASETS, help='data set of known size')
  add('--num_examples', type=_positive, help='images per epoch of any other data')
  add(
    '--num_classes',
    type=flags.count,
    help='width of the head (classes of the data set)',
  )
  add(
    '--image_size',
    type=flags.height_width,
    default=PAPER_SIZE,
    help='SIZE or HEIGHT,WIDTH in pixels (224)',
  )
  add('--chip', choices=topology.CHIPS, default='v3', help='TPU version (v3)')
  add(
    '--mfu',
    type=_positive,
    default=0.4,
    help="share of the devices' peak that the training reaches (0.4)",
  )
  add('--price', type=_positive, help='price per hour and chip, in any currency')
  add('--json', help='file for the table: a JSON list with one object per row')
  return parser


def _positive(text: str) -> float:
  """Parses a number above 0."""
  value = float(text)
  if not value > 0:
    raise argparse.ArgumentTypeError(f'{text} must be above 0')
  return value


def main(argv: Sequence[str]) -> None:
  """Prints the tables, and writes the rows to --json."""
  args = make_parser().parse_args(argv)
  flags.check_output('json', args.json)
  if bool(args.model) != bool(args.epochs):
    raise ValueError('--model=NAME and --epochs=NUMBER must be given together')
  num_examples, num_classes = plan.DATASETS.get(args.dataset, (None, None))
  setting = Setting(
    args.num_examples or num_examples,
    args.num_classes or num_classes,
    args.image_size,
    args.chip,
    args.mfu,
    args.price,
  )
  if args.model:
    rows = [pre_training(name, args.epochs, setting) for name in args.model]
    console.log(f'{format_rows(rows, setting)}\n\n{assumptions(setting)}')
  else:
    rows = table_6(setting)
    console.log(
      'Table 6: pre-training on JFT-300M at 224 px\n\n'
      f'{format_rows(rows, setting)}\n\n{NOTE_6}\n{assumptions(setting)}\n\n'
      'Table 2: pre-training on cores of TPU v3\n\n'
      f'{format_table_2(table_2(setting))}'
    )
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + '\n')
    console.log(f'\nWrote {args.json}')


if __name__ == '__main__':
  main(sys.argv[1:])
