r"""Trains a ViT here and in timm, from the same weights on the same batches:

  python -m benchmarks.against_timm --config=configs/fashion_mnist.py --seeds=0,1,2

timm's model starts with the initial weights of a run of each seed, see twins.py. The
losses agree until rounding errors have grown; after that, the accuracies show whether one
of them learns better. Also prints images a second: medians over updates, without the first
ones, which compile, and over batches of the evaluation. Needs `pip install -e '.[test]'`.
"""

from collections.abc import Iterable, Mapping, Sequence
import tempfile
from typing import Any

import numpy as np

from benchmarks import twins
from vit_jax import checkpoint, console, train
from vit_jax.weights import convert

# Key of a config -> the value that timm's side supports.
_PLAIN = {
  'task': 'classify', 'loss': 'softmax', 'task_options.mixup': 0.0,
  'task_options.cutmix': 0.0, 'pretrained': None, 'model.registers': 0,
  'model.representation_size': None,
}  # fmt: skip


def _import_timm() -> Any:
  """Returns timm."""
  console.require('torch', 'test', 'this comparison')
  from tests import torchvision_ops  # noqa: F401 (timm fails to import without)

  return console.require('timm', 'test', 'this comparison')


class Timm(twins.Twin):
  """timm's model with the parameters `params` of ours."""

  def __init__(self, prepared: train.Prepared, params: Any, compiled: bool) -> None:
    timm = _import_timm()
    config = prepared.config
    size = prepared.program.task.image_spec(1).shape[1:3]
    heads = config.model.transformer.num_heads
    with tempfile.TemporaryDirectory() as folder:
      source, target = f'{folder}/initial.npz', f'{folder}/timm'
      checkpoint.save(params, source)
      convert.convert(source, target, 'timm', image_size=size, num_heads=heads)
      net = timm.create_model(f'local-dir:{target}', pretrained=True)
    super().__init__(config, net, compiled)
    self._loss = self._torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)

  def loss(self, batch: Mapping[str, Any], step: int) -> Any:
    """Returns the mean cross-entropy of a batch, a tensor."""
    return self._loss(self.outputs(batch), self.tensors(batch, 'label'))

  def outputs(self, batch: Mapping[str, Any]) -> Any:
    """Returns the logits of a batch, a tensor [B, C]."""
    return self._run(self.tensors(batch, 'image'))


def _accuracy(
  prepared: train.Prepared, pairs: Iterable[tuple[dict, np.ndarray]]
) -> float:
  """Returns the share of images whose label has the greatest logit."""
  right = count = 0
  for batch, logits in pairs:
    hits = batch['label'][np.arange(len(logits)), logits.argmax(axis=-1)]
    right += (hits * batch['mask']).sum()
    count += batch['mask'].sum()
  return float(right / count)


def _outputs(task: Any, params: Any, extra: Any, batch: dict) -> Any:
  return task.outputs(params, extra, batch)


COMPARISON = twins.Comparison(Timm, _outputs, _accuracy, _PLAIN, 'timm', 'accuracy')


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the comparison with command-line arguments."""
  _import_timm()
  twins.main(COMPARISON, 'against_timm', __doc__, argv)


if __name__ == '__main__':
  twins.run(main)
