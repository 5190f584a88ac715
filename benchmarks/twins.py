"""Trains a model here and the same model in PyTorch, in turn, on the same batches.

Both start from the same weights and make all updates of a config, twenty at a time in
turn, PyTorch with its AdamW on the CPU. against_timm.py and against_transformers.py bring
the models.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from vit_jax import checkpoint, console, input_pipeline, train
from vit_jax.commands import flags
from vit_jax.learning import schedules
from vit_jax.run import metrics as metrics_lib
from vit_jax.studies import summaries

# Key of a config -> the only value that PyTorch's side supports.
_PLAIN = {
  'optimizer': 'adam', 'l2_decay': 0.0, 'ema_decay': 0.0, 'accum_steps': 1,
  'lr_multipliers': (), 'layer_decay': 1.0, 'weight_decay_on': 'kernels',
  'independent_weight_decay': False, 'class_weights': None,
  'model.transformer.dropout_rate': 0.0,
  'model.transformer.attention_dropout_rate': 0.0,
  'model.transformer.stochastic_depth': 0.0, 'optim_dtype': 'float32', 'lora.rank': 0,
  'model.dtype': 'float32',
}  # fmt: skip
_NUM_UNTIMED = 3  # The first batches, which include compilation.
_TURN = 20  # Batches of one turn, which are loaded before it.


def check(config: ml_collections.ConfigDict, plain: Mapping[str, Any]) -> None:
  """Raises ValueError if PyTorch's side cannot train as a config says.

  `plain` has further keys of the config, and the value that each must have.
  """
  if 'transformer' not in config.model:
    name = config.model.get('model_name')
    raise ValueError(
      f'only Vision Transformers are compared, not {name} (config.model)'
    )
  for key, supported in {**_PLAIN, **plain}.items():
    value: Any = config
    for name in key.split('.'):
      value = value.get(name, supported)
    if value != supported:
      raise ValueError(f'--config.{key}={value} is not supported here: use {supported}')


def is_kernel(name: str, parameter: Any) -> bool:
  """Returns whether a parameter in PyTorch is a kernel, to which weight decay applies."""
  return parameter.ndim > 1 and name.endswith('.weight')


class Twin(abc.ABC):
  """A model in PyTorch that is trained as a config says; a subclass has the loss.

  Attributes:
    net: the module.
  """

  def __init__(
    self, config: ml_collections.ConfigDict, net: Any, compiled: bool = False
  ) -> None:
    """Makes the optimiser; `compiled` applies torch.compile."""
    torch = console.require('torch', 'test', 'this comparison')
    self.net = net
    self._torch = torch
    self._run = torch.compile(net) if compiled else net
    self._clip = config.grad_norm_clip or float('inf')
    decay = config.weight_decay or 0.0
    groups = []
    for name, parameter in net.named_parameters():
      weight_decay = decay if self.decays(name, parameter) else 0.0
      groups.append(
        dict(params=[parameter], weight_decay=weight_decay, factor=self.factor(name))
      )
    self._adam = torch.optim.AdamW(groups, betas=(config.b1, config.b2), fused=True)

  def decays(self, name: str, parameter: Any) -> bool:
    """Returns whether weight decay applies to a parameter."""
    return is_kernel(name, parameter)

  def factor(self, name: str) -> float:
    """Returns the factor on the learning rate of a parameter."""
    return 1.0

  def tensors(self, batch: Mapping[str, Any], name: str) -> Any:
    """Returns an array of a batch as a tensor, images with the channels first."""
    array = self._torch.tensor(np.asarray(batch[name]))
    return array.permute(0, 3, 1, 2) if name == 'image' else array

  @abc.abstractmethod
  def loss(self, batch: Mapping[str, Any], step: int) -> Any:
    """Returns the mean loss of a batch in training, a tensor."""

  @abc.abstractmethod
  def outputs(self, batch: Mapping[str, Any]) -> Any:
    """Returns what `Comparison.outputs` returns, with tensors."""

  def update(self, batch: Mapping[str, Any], step: int, rate: float) -> float:
    """Makes an update with a learning rate; returns the loss before it."""
    self.net.train()
    for group in self._adam.param_groups:
      group['lr'] = rate * group['factor']
    loss = self.loss(batch, step)
    self._adam.zero_grad(set_to_none=True)
    loss.backward()
    self._torch.nn.utils.clip_grad_norm_(self.net.parameters(), self._clip)
    self._adam.step()
    return loss.item()

  def evaluate(self, batch: Mapping[str, Any]) -> Any:
    """Returns the outputs of a batch in evaluation, with NumPy arrays."""
    self.net.eval()
    with self._torch.inference_mode():
      return jax.tree.map(lambda tensor: tensor.numpy(), self.outputs(batch))


class Comparison(NamedTuple):
  """What a program compares.

  `make_twin` takes what is prepared, the initial parameters here, and whether to compile.
  `outputs` takes the task here, parameters, extra state and an evaluation batch; returns a
  tree of arrays. `measure` takes what is prepared and pairs of a batch and its outputs;
  returns a share.
  """

  make_twin: Callable[[train.Prepared, Any, bool], Twin]
  outputs: Callable[[Any, Any, Any, dict], Any]
  measure: Callable[[train.Prepared, Iterable[tuple[dict, Any]]], float]
  plain: Mapping[str, Any]  # See `check`.
  name: str  # Name of the other library.
  metric: str  # Name of the number that `measure` returns.


def _turns(batches: Iterable) -> Iterator[list[dict]]:
  """Yields lists of loaded batches; loading during an update would slow it down."""
  batches = map(jax.device_get, batches)
  while turn := [*itertools.islice(batches, _TURN)]:
    yield turn


def _timed(
  function: Callable[..., Any], arguments: Iterable[tuple]
) -> tuple[list, list[float]]:
  """Returns the results of calls and their times in seconds."""
  results, seconds = [], []
  for args in arguments:
    start = time.perf_counter()
    results.append(function(*args))
    seconds.append(time.perf_counter() - start)
  return results, seconds


def _speed(batch: int, seconds: list[float]) -> float:
  """Returns images a second, by the median time without the first ones."""
  return batch / statistics.median(seconds[_NUM_UNTIMED:] or seconds)


def _evaluate(
  comparison: Comparison, prepared: train.Prepared, outputs: Callable[[dict], Any]
) -> tuple[float, float]:
  """Returns the measure of the first evaluation, and images a second."""
  split = next(iter(prepared.tests.values()))
  seconds: list[float] = []

  def pairs() -> Iterator[tuple[dict, Any]]:
    batches = input_pipeline.task_batches(prepared.program.task, split, prepared.mesh)
    for turn in _turns(batches):
      results, times = _timed(outputs, zip(turn))
      seconds.extend(times)
      yield from zip(turn, results)

  value = comparison.measure(prepared, pairs())
  return value, _speed(prepared.config.batch_eval, seconds)


class _Trainer:
  """The model here, with the methods of `Twin`."""

  def __init__(self, comparison: Comparison, prepared: train.Prepared) -> None:
    program = prepared.program
    abstract = program.abstract
    weights = checkpoint.pretrained_weights(
      prepared.config, program.task, abstract.params, abstract.extra
    )
    self.state = program.create_state(weights)
    self._jit_update = program.jit_update()
    self._outputs = jax.jit(functools.partial(comparison.outputs, program.task))

  def update(self, batch: dict, step: int, rate: float) -> float:
    """Makes an update, which has its own learning rate; returns the loss before it."""
    del step, rate
    self.state, metrics = self._jit_update(self.state, batch)
    return float(metrics['train_loss'])

  def evaluate(self, batch: dict) -> Any:
    """Returns the outputs of a batch in evaluation, with NumPy arrays."""
    state = self.state
    return jax.device_get(self._outputs(state.params, state.extra, batch))


def _train(
  prepared: train.Prepared, trainer: _Trainer, twin: Twin, name: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
  """Makes all updates, in turn; returns pairs (ours, theirs) of losses and seconds."""
  config = prepared.config
  schedule = schedules.create_learning_rate_schedule(
    config.total_steps,
    config.base_lr,
    config.decay_type,
    config.warmup_steps,
    decay_at=config.decay_at,
  )
  batches = input_pipeline.train_batches(
    config, prepared.train, prepared.program.task.example, prepared.mesh
  )
  losses: list[tuple[float, float]] = []
  seconds: list[tuple[float, float]] = []
  for turn in _turns(itertools.islice(batches, config.total_steps)):
    steps = range(len(losses), len(losses) + len(turn))
    rates = [float(schedule(step)) for step in steps]
    our_losses, our_seconds = _timed(trainer.update, zip(turn, steps, rates))
    their_losses, their_seconds = _timed(twin.update, zip(turn, steps, rates))
    losses += zip(our_losses, their_losses)
    seconds += zip(our_seconds, their_seconds)
    console.log(
      f'step {len(losses)}/{config.total_steps}  loss {our_losses[-1]:.4f}, '
      f'{name} {their_losses[-1]:.4f}'
    )
  return losses, seconds


def compare(
  comparison: Comparison, config: ml_collections.ConfigDict, compiled: bool = False
) -> dict[str, Any]:
  """Trains both with the seed of a config; returns losses, measures and speeds.

  `losses` are pairs (ours, theirs) by update; the metric (a share, of the first
  evaluation), `img_sec` and `img_sec_eval` are such pairs too. `compiled` applies
  torch.compile to the model in PyTorch. Raises ValueError for a config that trains
  differently in PyTorch.
  """
  check(config, comparison.plain)
  prepared = train.prepare(config)
  trainer = _Trainer(comparison, prepared)
  params = jax.device_get(trainer.state.params)
  twin = comparison.make_twin(prepared, params, compiled)
  with jax.set_mesh(prepared.mesh):
    losses, seconds = _train(prepared, trainer, twin, comparison.name)
    value, speed_eval = _evaluate(comparison, prepared, trainer.evaluate)
    twin_value, twin_speed_eval = _evaluate(comparison, prepared, twin.evaluate)
  batch = prepared.config.batch
  return {
    'seed': prepared.config.seed,
    'losses': losses,
    comparison.metric: (value, twin_value),
    'img_sec': [_speed(batch, list(times)) for times in zip(*seconds)],
    'img_sec_eval': (speed_eval, twin_speed_eval),
  }


def main(
  comparison: Comparison, module: str, doc: str, argv: Sequence[str] | None
) -> None:
  """Runs the program of a module of benchmarks with command-line arguments."""
  parser = flags.Parser('', doc)
  parser.prog = f'python -m benchmarks.{module}'
  parser.add_config()
  parser.add_argument('--seeds', default='0', help='seeds, separated by commas (0)')
  parser.add_argument(
    '--compile', action='store_true', help='apply torch.compile to the other model'
  )
  parser.add_argument('--json', metavar='FILE', help='write all losses to a file')
  args = parser.parse_args(sys.argv[1:] if argv is None else argv)
  flags.require(args, config='FILE')
  seeds = args.seeds.split(',')
  if not all(seed.isdecimal() for seed in seeds):
    raise ValueError(f'--seeds={args.seeds} must be numbers, such as 0,1,2')
  name, metric = comparison.name, comparison.metric
  rows = []
  for seed in seeds:
    args.config.seed = int(seed)
    row = compare(comparison, args.config, args.compile)
    rows.append(row)
    measures = f', {name} '.join(f'{100 * x:.2f} %' for x in row[metric])
    training = f', {name} '.join(f'{x:,.0f}' for x in row['img_sec'])
    evaluation = f', {name} '.join(f'{x:,.0f}' for x in row['img_sec_eval'])
    console.log(
      f'seed {seed}: {metric} {measures}; img/s in training {training}, in evaluation '
      f'{evaluation}'
    )
    if args.json:
      pathlib.Path(args.json).write_text(json.dumps(rows))
  for i, side in enumerate(('vit_jax', name)):
    values = [row[metric][i] for row in rows]
    console.log(f'{side}: {summaries.format_values(metrics_lib.SHARE, values)} %')


def run(main: Callable[[], None]) -> None:
  """Runs a program as a command; errors of its arguments end it with one line."""
  console.use_huge_pages()
  console.quiet()
  try:
    main()
  except (ValueError, ImportError, OSError) as e:
    sys.exit(f'Error: {e}')
