"""Pre-training in FLOPs, core-days and money, and what the paper reports.

Sources: arXiv 2010.11929, tables 2 and 6. Table 6 counts 6 FLOPs for
each multiply-add of a forward pass at 224 px (forward and backward pass), with
a head of 18,291 classes, times 303 million images, times the epochs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax import console
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
# The row of table 6 that its model does not explain, and why.
NOTE_6 = (
  'R50+ViT-L_16, 7 epochs: 859 is taken for an error of table 6. Half of its row '
  'of 14 epochs is 834, and the other pairs of 7 and 14 epochs agree.'
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
# Noisy Student is an EfficientNet, which is no model of this package.
NOISY_STUDENT_CORE_DAYS = 12_300


class Setting(NamedTuple):
  """What models are trained on, and by what."""

  num_examples: int  # Images of an epoch.
  num_classes: int
  image_size: tuple[int, int] = PAPER_SIZE
  chip: str = 'v3'  # A key of topology.CHIPS.
  mfu: float = 0.4  # Share of a device's peak that the training reaches.
  price: float | None = None  # Of an hour of a chip, on v2 and v3 of two cores.

  @property
  def device(self) -> str:
    """The device that computes: 'v3 core' or 'v4 chip'."""
    kind = 'core' if topology.CHIPS[self.chip].per_chip > 1 else 'chip'
    return f'{self.chip} {kind}'


def exaflops(forward: int, images: float) -> float:
  """Returns the compute of a training on so many images in exaFLOPs.

  `forward` are FLOPs of a forward pass on one image, see flops.forward_flops.
  """
  return flops.training_flops(forward) * images / 1e18


def account(
  model: str, epochs: float, forward: int, setting: Setting
) -> dict[str, Any]:
  """Accounts for a pre-training; `forward` is that of `exaflops`.

  Returns `model`, `epochs`, `exaflops`; `core_days` of devices of kind `chip`
  at the share `mfu` of their peak; `price`; and what the paper reports of this
  pre-training, `published_exaflops` (table 6) and `published_core_days` (table
  2, of v3). None stands for no price, and for what was not published.
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


# --- Tables ---


def number(value) -> str:
  """Formats a number for a table: '0.00123', '56.3', '4,258.6'."""
  return f'{value:,.1f}' if value >= 10 else f'{value:.3g}'


def assumptions(setting: Setting) -> str:
  """Says what times and prices rest on."""
  text = (
    f'Days are those of one {setting.device} at {100 * setting.mfu:g} % (--mfu) of '
    f'its peak of {topology.CHIPS[setting.chip].peak / 1e12:g} TFLOP/s.'
  )
  if setting.price is not None:
    text += f' Prices: {setting.price:g} an hour of a chip (--price).'
  return text


def describe(rows: Sequence[dict], setting: Setting) -> str:
  """Formats rows of `account`, or of compute's table 2, as a table."""
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
