"""Pre-training in FLOPs, core-days and money, and what the paper reports.

Sources: arXiv 2010.11929, tables 2 and 6. Table 6 counts 6 FLOPs per multiply-add of
a forward pass at 224 px (forward and backward pass), with a head of 18,291 classes,
times 303 million images, times the epochs. `vit_jax compute`
(vit_jax/commands/compute.py) is the command.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import console, models
from vit_jax.configs import models as model_configs, schema
from vit_jax.planning import flops, topology

# Data set -> (training examples, classes).
DATASETS = {
  'imagenet2012': (1_268_356, 1_000),  # train[:99%]
  'imagenet21k': (14_094_797, 21_843),  # full[102400:]
  'jft300m': (303_000_000, 18_291),
  'cifar10': (49_000, 10),
  'cifar100': (49_000, 100),
  'oxford_iiit_pet': (3_312, 37),
  'oxford_flowers102': (918, 102),
  'digits': (1_437, 10),
  'coco/2017': (118_287, 80),
}

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


# Table 2: (model, data set, epochs) -> TPU v3 core-days of the pre-training.
# The epochs are those of table 3: of its 30 and 90 epochs on ImageNet-21k, 30
# would leave 13 % of the peak. BiT-L is R152x4, trained for 40 epochs (arXiv
# 1912.11370).
TABLE_2 = {
  ('ViT-H_14', 'jft300m', 14): 2_500,
  ('ViT-L_16', 'jft300m', 14): 680,
  ('ViT-L_16', 'imagenet21k', 90): 230,
  ('BiT-R152x4', 'jft300m', 40): 9_900,
}
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


def exaflops(forward: int, images: float) -> float:
  """Returns the compute of a training on a number of images in exaFLOPs.

  `forward` are the FLOPs of a forward pass on one image, see flops.forward_flops; a
  forward and backward pass count three times as much.
  """
  return 3 * forward * images / 1e18


@functools.cache
def forward_flops(name: str, num_classes: int | None, image_size) -> int:
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


def account_for(name: str, epochs: float, setting: Setting) -> dict[str, Any]:
  """Accounts for the pre-training of a named model, see `account`.

  Raises ValueError if the name is unknown, the model does not fit the images, or
  the size of the data is missing.
  """
  name = model_configs.get_config(name).model_name
  # LiT has no classes.
  needed = setting[:1] if name in model_configs.LITS else setting[:2]
  if None in needed:
    raise ValueError(
      f"model='{name}' needs the size of the data: pass --dataset=NAME, or "
      '--num_examples and --num_classes'
    )
  count = forward_flops(name, setting.num_classes, setting.image_size)
  return account(name, epochs, count, setting)


def account(
  model: str, epochs: float, forward: int, setting: Setting
) -> dict[str, Any]:
  """Accounts for a pre-training with a `forward` pass as in `exaflops`.

  Returns `model`, `epochs`, `exaflops`; `core_days` on devices of kind `chip` at the
  share `mfu` of their peak; `price`; and the paper's numbers for this pre-training,
  `published_exaflops` (table 6) and `published_core_days` (table 2, on v3). None
  stands for no price, and for unpublished numbers.
  """
  chip = topology.CHIPS[setting.chip]
  known = {(*sizes, PAPER_SIZE): name for name, sizes in DATASETS.items()}
  dataset = known.get(setting[:3])
  table_6 = TABLE_6 if dataset == 'jft300m' else {}
  work = exaflops(forward, setting.num_examples * epochs)
  days = work * 1e18 / (setting.mfu * chip.peak) / 86_400
  price = None
  if setting.price is not None:
    price = days * 24 / chip.per_chip * setting.price
  return {
    'model': model,
    'epochs': epochs,
    'exaflops': work,
    'published_exaflops': table_6.get((model, epochs)),
    'core_days': days,
    'chip': setting.chip,
    'mfu': setting.mfu,
    'published_core_days': TABLE_2.get((model, dataset, epochs)),
    'price': price,
  }


def table_2(setting: Setting) -> list[dict]:
  """Accounts for the pre-trainings of the paper's table 2.

  Returns rows as from `account`, with `dataset` and `published_mfu`, the share of the
  devices' peak that the published core-days imply.
  """
  rows = []
  for (name, dataset, epochs), days in TABLE_2.items():
    examples, classes = DATASETS[dataset]
    data = setting._replace(num_examples=examples, num_classes=classes)
    row = account_for(name, epochs, data)
    mfu = row['mfu'] * row['core_days'] / days
    rows.append({**row, 'dataset': dataset, 'published_mfu': mfu})
  return rows


# --- Tables ---


def number(value) -> str:
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


def describe(rows: Sequence[dict], setting: Setting) -> str:
  """Formats rows of `account` or `table_2` as a table."""
  lines = []
  for row in rows:
    known, share = row['published_exaflops'], row.get('published_mfu')
    line = {
      'model': row['model'],
      'data': row.get('dataset'),
      'epochs': f'{row["epochs"]:g}',
      'exaFLOPs': number(row['exaflops']),
    }
    if known and not share:
      line['published'] = f'{known:,}'
      line['difference'] = f'{100 * (row["exaflops"] / known - 1):+.1f} %'
    line[f'{setting.device}-days'] = number(row['core_days'])
    if share:
      line['published'] = f'{row["published_core_days"]:,}'
      line['share of peak'] = f'{100 * share:.0f} %'
    elif setting.price is not None:
      line['price'] = f'{row["price"]:,.2f}'
    lines.append(line)
  if any('share of peak' in line for line in lines):
    student = f'{NOISY_STUDENT_CORE_DAYS:,}'
    lines.append({'model': 'Noisy Student', 'data': 'jft300m', 'published': student})
  # Columns without a value are left out.
  longest = max(lines, key=len)
  header = [name for name in longest if any(x.get(name) for x in lines)]
  cells = [[line.get(name) or '' for name in header] for line in lines]
  return console.table(header, cells)


# --- The command ---

_TYPES = {
  'dataset': Literal[tuple(DATASETS)],
  'chip': Literal[tuple(topology.CHIPS)],
  'epochs': schema.Positive,
  'num_examples': Annotated[float, schema.Range(ge=1)],
  'num_classes': schema.Count,
  'image_size': schema.HeightWidth,
  'mfu': schema.Share,
  'price': schema.NonNegative,
}
# Flags about the models of --model.
_OF_MODEL = ('epochs', 'dataset', 'num_examples', 'num_classes', 'image_size')


def _check(args):
  """Raises ValueError if a flag is wrong, or flags do not fit together."""
  for name, kind in _TYPES.items():
    value = getattr(args, name)
    if value is not None:
      schema.check(name, value, kind, '--')
  for name in _OF_MODEL:
    if getattr(args, name) is not None and not args.model:
      raise ValueError(
        f'--{name}={getattr(args, name)} needs --model=NAME: tables 6 and 2 have their '
        'own data'
      )
  if args.model and args.epochs is None:
    raise ValueError('--model needs --epochs=NUMBER')


def run(args) -> None:
  """Runs `vit_jax compute` with parsed flags."""
  _check(args)
  known = DATASETS.get(args.dataset, (None, None))
  setting = Setting(
    args.num_examples or known[0],
    args.num_classes or known[1],
    args.image_size or PAPER_SIZE,
    args.chip,
    args.mfu,
    args.price,
  )
  if args.model:
    rows = [account_for(name, args.epochs, setting) for name in args.model]
    console.say(f'{describe(rows, setting)}\n\n{assumptions(setting)}')
  else:
    setting = Setting(*DATASETS['jft300m'], *setting[2:])
    tried = console.bar(iterable=list(TABLE_6), desc='Counting')
    rows = [account_for(name, epochs, setting) for name, epochs in tried]
    paper = setting._replace(chip='v3')
    console.say(
      'Table 6: pre-training on JFT-300M at 224 px\n\n'
      f'{describe(rows, setting)}\n\n{NOTE_6}\n{assumptions(setting)}\n\n'
      'Table 2: pre-training on cores of TPU v3\n\n'
      f'{describe(table_2(paper), paper)}'
    )
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + '\n')
    console.say(f'\nWrote {args.json}')
