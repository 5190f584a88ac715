r"""Trains a classifier here and in timm, from the same weights on the same batches:

  python -m benchmarks.against_timm --config=configs/fashion_mnist.py --seeds=0,1,2

timm's model starts with the initial weights of a run of each seed. Both make all
updates of the config by turns, timm's with PyTorch's AdamW and cross-entropy. The
losses agree until rounding has grown; then the accuracies show whether one learns
better. The first updates of both are not timed, since they compile. Needs
`pip install -e '.[test]'`.
"""

from collections.abc import Iterator, Sequence
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from vit_jax import checkpoint, console, input_pipeline, train
from vit_jax.commands import flags
from vit_jax.learning import optim
from vit_jax.weights import convert

# Fields of a config that PyTorch's AdamW and cross-entropy have no counterpart for here.
_PLAIN = {
  'task': 'classify', 'loss': 'softmax', 'optimizer': 'adam', 'l2_decay': 0.0,
  'ema_decay': 0.0, 'accum_steps': 1, 'lr_multipliers': (), 'weight_decay_on': 'kernels',
  'independent_weight_decay': False, 'task_options.mixup': 0.0,
  'task_options.cutmix': 0.0, 'model.transformer.dropout_rate': 0.0,
  'model.transformer.attention_dropout_rate': 0.0,
}  # fmt: skip
_UNTIMED = 5


def _check(config):
  """Raises ValueError if timm's side does not do what a complete config asks for."""
  for key, value in _PLAIN.items():
    found: Any = config
    for name in key.split('.'):
      found = found[name]
    if found != value:
      raise ValueError(f'the comparison needs --config.{key}={value}, not {found}')


class Theirs:
  """timm's model with the parameters `params` of ours, and its optimiser."""

  def __init__(self, prepared: train.Prepared, params):
    from tests import torch_models  # Before timm: it imports where torchvision fails.
    import torch

    self._torch, self._config = torch, prepared.config
    torch.set_num_threads(max(torch.get_num_threads(), len(console.cores())))
    model = prepared.config.model
    with tempfile.TemporaryDirectory() as folder:
      source, there = f'{folder}/initial.npz', f'{folder}/timm'
      checkpoint.save(params, source)
      size = prepared.program.task.image_spec(1).shape[1:3]
      heads = model.transformer.num_heads
      convert.convert(source, there, 'timm', image_size=size, num_heads=heads)
      self.net = torch_models.timm.create_model(f'local-dir:{there}', pretrained=True)
    groups = {True: [], False: []}
    for parameter in self.net.parameters():
      groups[parameter.ndim > 1].append(parameter)

  def update(self, batch: dict[str, np.ndarray], rate: float) -> float:
    """Makes an update with a learning rate; returns the loss before it."""
