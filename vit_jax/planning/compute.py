"""Counts the compute of pre-training, its time and its price.

`vit_jax compute` (vit_jax/commands/compute.py) is the command.
"""

import functools
import json
import pathlib
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from vit_jax import console, models
from vit_jax.configs import models as model_configs, schema
from vit_jax.planning import costs, flops, topology

_TYPES = {
  'dataset': Literal[tuple(costs.DATASETS)],
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


@functools.cache
def _forward(name, num_classes, image_size):
  if model_configs.kind_of(model_configs.get_config(name)) == 'lit':
    return _locked_forward(models.get_model(name), image_size)
  model = models.get_model(name, num_classes=num_classes)
  return flops.forward_flops(model, image_size, whole=True)


def _locked_forward(model, image_size):
  """Counts a third of a locked image tower, and the text tower (LiT).

  The image tower has a forward pass only, and training is counted as three.
  """
  tower = model.text_tower()
  tokens = jax.ShapeDtypeStruct((1, model.pp['max_len']), jnp.int32)
  text = jax.make_jaxpr(lambda x: tower.init(jax.random.key(0), x))(tokens)
  image = flops.forward_flops(model.image_tower(), image_size, whole=True)
  return round(image / 3) + flops.count_flops(text)


def account(name: str, epochs: float, setting: costs.Setting) -> dict:
  """Accounts for the pre-training of a model, see costs.account.

  Raises ValueError if the name is unknown, or the model does not fit the images.
  """
  name = model_configs.get_config(name).model_name
  # LiT has no classes.
  needed = setting[:1] if name in model_configs.LITS else setting[:2]
  if None in needed:
    raise ValueError(
      f"model='{name}' needs the size of the data: give --dataset=NAME, or "
      '--num_examples and --num_classes'
    )
  count = _forward(name, setting.num_classes, setting.image_size)
  return costs.account(name, epochs, count, setting)


def _table_2(setting: costs.Setting) -> list[dict]:
  """Accounts for the pre-trainings of the paper's table 2.

  Returns rows as of `account`, with `dataset`, and the share of the devices' peak
  that the published core-days imply, `published_mfu`.
  """
  rows = []
  for (name, dataset, epochs), days in costs.TABLE_2.items():
    examples, classes = costs.DATASETS[dataset]
    row = account(
      name, epochs, setting._replace(num_examples=examples, num_classes=classes)
    )
    mfu = row['mfu'] * row['core_days'] / days
    rows.append({**row, 'dataset': dataset, 'published_mfu': mfu})
  return rows


def _check(args):
  """Raises ValueError if a flag is wrong, or flags do not fit together."""
  for name, kind in _TYPES.items():
    value = getattr(args, name)
    if value is not None:
      schema.check(name, value, kind, '--')
  for name in _OF_MODEL:
    if getattr(args, name) is not None and not args.model:
      raise ValueError(
        f'--{name}={getattr(args, name)} needs a model: give --model=NAME; tables 6 '
        'and 2 have their own data'
      )
  if args.model and args.epochs is None:
    raise ValueError('--model needs a length: give --epochs=NUMBER')


def run(args) -> None:
  """Accounts for the models that the flags of `vit_jax compute` name."""
  _check(args)
  known = costs.DATASETS.get(args.dataset, (None, None))
  setting = costs.Setting(
    args.num_examples or known[0],
    args.num_classes or known[1],
    args.image_size or costs.PAPER_SIZE,
    args.chip,
    args.mfu,
    args.price,
  )
  if args.model:
    rows = [account(name, args.epochs, setting) for name in args.model]
    console.say(f'{costs.describe(rows, setting)}\n\n{costs.assumptions(setting)}')
  else:
    setting = costs.Setting(*costs.DATASETS['jft300m'], *setting[2:])
    tried = console.bar(iterable=list(costs.TABLE_6), desc='Counting')
    rows = [account(name, epochs, setting) for name, epochs in tried]
    paper = setting._replace(chip='v3')
    console.say(
      'Table 6: pre-training on JFT-300M at 224 px\n\n'
      f'{costs.describe(rows, setting)}\n\n{costs.NOTE_6}\n'
      f'{costs.assumptions(setting)}\n\n'
      'Table 2: pre-training on cores of TPU v3\n\n'
      f'{costs.describe(_table_2(paper), paper)}'
    )
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + '\n')
    console.say(f'\nWritten to {args.json}')
