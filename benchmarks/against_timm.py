r"""Trains a ViT here and in timm, from the same weights on the same batches:

  python -m benchmarks.against_timm --config=configs/fashion_mnist.py --seeds=0,1,2

timm's model starts with the initial weights of a run of each seed. Both make all
updates of the config, twenty at a time in turn, timm's with PyTorch's AdamW on the CPU.
The losses agree until rounding errors have grown; after that, the accuracies show
whether one of them learns better. Also prints images a second: medians over updates,
without the first ones, which compile, and over batches of the evaluation. Needs
`pip install -e '.[test]'`.
"""

from collections.abc import Iterable, Iterator, Sequence
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from vit_jax import checkpoint, console, input_pipeline, train
from vit_jax.commands import flags
from vit_jax.learning import schedules
from vit_jax.run import metrics as metrics_lib
from vit_jax.studies import summaries
from vit_jax.weights import convert

# Key of a config -> the value that timm's side supports.
_PLAIN = {
  'task': 'classify', 'loss': 'softmax', 'optimizer': 'adam', 'l2_decay': 0.0,
  'ema_decay': 0.0, 'accum_steps': 1, 'lr_multipliers': (), 'weight_decay_on': 'kernels',
  'independent_weight_decay': False, 'task_options.mixup': 0.0,
  'task_options.cutmix': 0.0, 'model.transformer.dropout_rate': 0.0,
  'model.transformer.attention_dropout_rate': 0.0,
  'model.transformer.stochastic_depth': 0.0, 'optim_dtype': 'float32', 'lora.rank': 0,
  'pretrained': None, 'model.dtype': 'float32', 'model.registers': 0,
  'model.representation_size': None,
}  # fmt: skip
_UNTIMED = 3
_TURN = 20  # Batches of one turn, which are loaded before it.


def _check(config):
  """Raises ValueError if timm's side cannot train as a config says."""
  if 'transformer' not in config.model:
    name = config.model.get('model_name')
    raise ValueError(
      f'only Vision Transformers are compared, not {name} (config.model)'
    )
  for key, value in _PLAIN.items():
    found: Any = config
    for name in key.split('.'):
      found = found.get(name, value)
    if found != value:
      raise ValueError(f'--config.{key}={found} is not supported here: use {value}')


def _import_timm():
  """Returns the modules of timm and PyTorch."""
  torch = console.require('torch', 'test', 'this comparison')
  from tests import torchvision_ops  # noqa: F401 (timm fails to import without)

  return console.require('timm', 'test', 'this comparison'), torch


class Theirs:
  """timm's model with the parameters `params` of ours, trained as a config says."""

  def __init__(self, prepared: train.Prepared, params, compiled: bool):
    timm, torch = _import_timm()
    config = prepared.config
    size = prepared.program.task.image_spec(1).shape[1:3]
    heads = config.model.transformer.num_heads
    with tempfile.TemporaryDirectory() as folder:
      source, there = f'{folder}/initial.npz', f'{folder}/timm'
      checkpoint.save(params, source)
      convert.convert(source, there, 'timm', image_size=size, num_heads=heads)
      self.net = timm.create_model(f'local-dir:{there}', pretrained=True)
    self._torch = torch
    self._run = torch.compile(self.net) if compiled else self.net
    self._clip = config.grad_norm_clip or float('inf')
    self._loss = torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    kernels = [x for name, x in self.net.named_parameters() if is_kernel(name, x)]
    others = [x for name, x in self.net.named_parameters() if not is_kernel(name, x)]
    decay = config.weight_decay or 0.0
    self._adam = torch.optim.AdamW(
      [dict(params=kernels, weight_decay=decay), dict(params=others, weight_decay=0.0)],
      betas=(config.b1, config.b2),
      fused=True,
    )

  def _images(self, batch):
    return self._torch.tensor(np.asarray(batch['image'])).permute(0, 3, 1, 2)

  def update(self, batch, rate: float) -> float:
    """Makes an update with a learning rate; returns the loss before it."""
    self.net.train()
    for group in self._adam.param_groups:
      group['lr'] = rate
    label = self._torch.tensor(np.asarray(batch['label']))
    loss = self._loss(self._run(self._images(batch)), label)
    self._adam.zero_grad(set_to_none=True)
    loss.backward()
    self._torch.nn.utils.clip_grad_norm_(self.net.parameters(), self._clip)
    self._adam.step()
    return loss.item()

  def logits(self, batch) -> np.ndarray:
    self.net.eval()
    with self._torch.inference_mode():
      return self._run(self._images(batch)).numpy()


def is_kernel(name, parameter):
  """Returns whether a parameter of timm is a kernel, to which weight decay applies."""
  return parameter.ndim > 1 and name.endswith('.weight')


def _turns(batches: Iterable) -> Iterator[list[dict]]:
  """Yields lists of loaded batches; loading during an update would slow it down."""
  batches = map(jax.device_get, batches)
  while turn := [*itertools.islice(batches, _TURN)]:
    yield turn


def _timed(function, arguments: Iterable[tuple]) -> tuple[list, list[float]]:
  """Returns the results of calls and their times in seconds."""
  results, seconds = [], []
  for args in arguments:
    start = time.perf_counter()
    results.append(function(*args))
    seconds.append(time.perf_counter() - start)
  return results, seconds


def _speed(batch: int, seconds: list[float]) -> float:
  """Returns images a second, by the median time without the first ones."""
  return batch / statistics.median(seconds[_UNTIMED:] or seconds)


def _evaluate(prepared, split, logits) -> tuple[float, float]:
  """Returns the accuracy on a split and images a second."""
  config, task, mesh = prepared.config, prepared.program.task, prepared.mesh
  right = count = 0
  seconds = []
  for turn in _turns(input_pipeline.eval_batches(config, split, task.example, mesh)):
    found, times = _timed(logits, zip(turn))
    seconds += times
    for batch, scores in zip(turn, found, strict=True):
      hits = batch['label'][np.arange(len(scores)), scores.argmax(axis=-1)]
      right += (hits * batch['mask']).sum()
      count += batch['mask'].sum()
  return float(right / count), _speed(config.batch_eval, seconds)


def compare(config, compiled: bool = False) -> dict:
  """Trains both with the seed of a config; returns losses, accuracies and speeds.

  `losses` are pairs (ours, timm's) by update; `accuracy` (a share, of the first
  evaluation), `img_sec` and `img_sec_eval` are such pairs too. `compiled` applies
  torch.compile to timm's model. Raises ValueError for a config that trains differently
  in PyTorch.
  """
  _check(config)
  prepared = train.prepare(config)
  config, program, mesh = prepared.config, prepared.program, prepared.mesh
  schedule = schedules.create_learning_rate_schedule(
    config.total_steps, config.base_lr, config.decay_type, config.warmup_steps,
    decay_at=config.decay_at,
  )  # fmt: skip
  state = program.create_state({})
  theirs = Theirs(prepared, jax.device_get(state.params), compiled)
  update, outputs = program.jit_update(), jax.jit(program.task.outputs)
  batches = input_pipeline.train_batches(
    config, prepared.train, program.task.example, mesh
  )

  def our_update(batch, rate):  # The rate is part of `update`.
    nonlocal state
    state, metrics = update(state, batch)
    return float(metrics['train_loss'])

  def our_logits(batch):
    return np.asarray(outputs(state.params, state.extra, batch))

  losses, seconds = [], []
  with jax.set_mesh(mesh):
    for turn in _turns(itertools.islice(batches, config.total_steps)):
      rates = [float(schedule(len(losses) + i)) for i in range(len(turn))]
      ours, our_seconds = _timed(our_update, zip(turn, rates))
      timms, timm_seconds = _timed(theirs.update, zip(turn, rates))
      losses += zip(ours, timms)
      seconds += zip(our_seconds, timm_seconds)
      console.log(
        f'step {len(losses)}/{config.total_steps}  loss {ours[-1]:.4f}, '
        f'timm {timms[-1]:.4f}'
      )
    split = next(iter(prepared.tests.values()))
    evaluated = [_evaluate(prepared, split, f) for f in (our_logits, theirs.logits)]
  accuracy, img_sec_eval = zip(*evaluated)
  return {
    'seed': config.seed,
    'losses': losses,
    'accuracy': accuracy,
    'img_sec': [_speed(config.batch, times) for times in zip(*seconds)],
    'img_sec_eval': img_sec_eval,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.against_timm'
  parser.add_config()
  parser.add_argument('--seeds', default='0', help='seeds, separated by commas (0)')
  parser.add_argument(
    '--compile', action='store_true', help="apply torch.compile to timm's model"
  )
  parser.add_argument('--json', metavar='FILE', help='write all losses to a file')
  args = parser.parse_args(sys.argv[1:] if argv is None else argv)
  flags.require(args, config='FILE')
  seeds = args.seeds.split(',')
  if not all(seed.isdecimal() for seed in seeds):
    raise ValueError(f'--seeds={args.seeds} must be numbers, such as 0,1,2')
  _import_timm()
  rows = []
  for seed in seeds:
    args.config.seed = int(seed)
    row = compare(args.config, args.compile)
    rows.append(row)
    training, evaluation = (
      ', timm '.join(f'{x:,.0f}' for x in row[name])
      for name in ('img_sec', 'img_sec_eval')
    )
    accuracy = ', timm '.join(f'{100 * x:.2f} %' for x in row['accuracy'])
    console.log(
      f'seed {seed}: accuracy {accuracy}; img/s in '
      f'training {training}, in evaluation {evaluation}'
    )
    if args.json:
      pathlib.Path(args.json).write_text(json.dumps(rows))
  for i, name in enumerate(('vit_jax', 'timm')):
    values = [row['accuracy'][i] for row in rows]
    console.log(f'{name}: {summaries.format_values(metrics_lib.SHARE, values)} %')


if __name__ == '__main__':
  console.use_huge_pages()
  console.quiet()
  try:
    main()
  except (ValueError, ImportError, OSError) as e:
    sys.exit(f'Error: {e}')
