r"""Trains a segmenter here and in transformers, from the same weights on the same batches:

  python -m benchmarks.against_transformers --config=configs/segment_scenes.py \
    --seeds=0,1,2
  python -m benchmarks.against_transformers --config=configs/segment_scenes_eomt.py \
    --seeds=0,1,2

The other model starts with the initial weights of a run of each seed, see twins.py. For
the linear head it is transformers' encoder with PyTorch's BatchNorm, linear map, bilinear
resizing and cross-entropy; for EoMT it is EomtForUniversalSegmentation with its own loss
and matching. Losses with a linear head agree until rounding errors have grown; those of
EoMT are computed on other random points. Prints mIoU and images a second: medians over
updates, without the first ones, which compile, and over batches of the evaluation. Needs
`pip install -e '.[test]'`.
"""

from collections.abc import Iterable, Mapping, Sequence
import os
import tempfile
from typing import Any

from etils import epath
import flax.traverse_util
import jax
import numpy as np

from benchmarks import twins
from vit_jax import console, train
from vit_jax.tasks.segmentation import class_maps, eomt, scores as scores_lib
from vit_jax.weights import writing

# Key of a config -> the value that transformers' side supports.
_PLAIN = {
  'task': 'segment_semantic', 'model.classifier': 'token', 'task_options.layers': (),
  'task_options.window': None, 'task_options.scales': (1.0,), 'task_options.flips': False,
}  # fmt: skip
# Option of the task -> its name in transformers.
_OPTIONS = {
  'class_weight': 'class_weight', 'mask_weight': 'mask_weight',
  'dice_weight': 'dice_weight', 'no_object_weight': 'no_object_weight',
  'num_points': 'train_num_points', 'oversample': 'oversample_ratio',
  'importance': 'importance_sample_ratio',
}  # fmt: skip


def _import_transformers() -> Any:
  """Returns transformers, which must not look for weights on the hub."""
  os.environ['HF_HUB_OFFLINE'] = '1'
  console.require('torch', 'test', 'this comparison')
  from tests import torchvision_ops  # noqa: F401 (transformers fails to import without)

  transformers = console.require('transformers', 'test', 'this comparison')
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  return transformers


def _load(prepared: train.Prepared, params: Any, cls: Any, **fields: Any) -> Any:
  """Returns a model of a class of transformers with parameters of ours."""
  task = prepared.program.task
  head = flax.traverse_util.flatten_dict(params, sep='/').get('class_head/bias')
  model = writing.Model(
    params=params,
    config=prepared.config.model,
    class_names=None,
    num_classes=0 if head is None else len(head) - 1,
    image_size=task.image_size,
  )
  with tempfile.TemporaryDirectory() as folder:
    writing.check(model, 'hf')
    writing.WRITERS['hf'](model, epath.Path(folder))
    return cls.from_pretrained(folder, **fields)


def _linear_net(prepared: train.Prepared, params: Any) -> Any:
  """Returns a module from images [B, 3, H, W] to logits of patches [B, C, h, w]."""
  transformers = _import_transformers()
  import torch

  params = dict(params)
  norm, head = params.pop('head_norm'), params.pop('head')
  height, width = (
    side // patch
    for side, patch in zip(
      prepared.program.task.image_size, prepared.config.model.patches.size
    )
  )

  class LinearSegmenter(torch.nn.Module):
    def __init__(self, encoder: Any) -> None:
      super().__init__()
      self.encoder = encoder
      self.head_norm = torch.nn.BatchNorm1d(len(norm['scale']))
      self.head = torch.nn.Linear(*head['kernel'].shape)

    def forward(self, images: Any) -> Any:
      tokens = self.encoder(pixel_values=images).last_hidden_state
      patches = tokens[:, -height * width :]
      b, n, d = patches.shape
      logits = self.head(self.head_norm(patches.reshape(b * n, d)))
      return logits.reshape(b, height, width, -1).permute(0, 3, 1, 2)

  net = LinearSegmenter(_load(prepared, params, transformers.AutoModel))
  with torch.no_grad():
    for parameter, array in (
      (net.head_norm.weight, norm['scale']), (net.head_norm.bias, norm['bias']),
      (net.head.weight, head['kernel'].T), (net.head.bias, head['bias']),
    ):  # fmt: skip
      parameter.copy_(torch.tensor(np.asarray(array)))
  return net


class Linear(twins.Twin):
  """A linear head on transformers' encoder, see linear.py of the task."""

  def __init__(self, prepared: train.Prepared, params: Any, compiled: bool) -> None:
    twins.check(prepared.config, {'task_options.dice_weight': None})
    super().__init__(prepared.config, _linear_net(prepared, params), compiled)

  def loss(self, batch: Mapping[str, Any], step: int) -> Any:
    functional = self._torch.nn.functional
    segmentation = self.tensors(batch, 'segmentation').long()
    logits = self._run(self.tensors(batch, 'image'))
    logits = functional.interpolate(logits, segmentation.shape[1:], mode='bilinear')
    return functional.cross_entropy(logits, segmentation.clamp(min=-1), ignore_index=-1)

  def outputs(self, batch: Mapping[str, Any]) -> Any:
    return self._run(self.tensors(batch, 'image')).permute(0, 2, 3, 1)


class Eomt(twins.Twin):
  """EomtForUniversalSegmentation, trained with its own loss."""

  def __init__(self, prepared: train.Prepared, params: Any, compiled: bool) -> None:
    transformers = _import_transformers()
    options = eomt.loss_options(prepared.config.task_options)._asdict()
    fields = {name: options[ours] for ours, name in _OPTIONS.items()}
    cls = transformers.EomtForUniversalSegmentation
    net = _load(prepared, params, cls, **fields)
    super().__init__(prepared.config, net, compiled)
    self._total_steps = prepared.config.total_steps

  def _set_mask_rates(self, rates: Any) -> None:
    self.net.attn_mask_probs.copy_(self._torch.tensor(np.asarray(rates)))

  def loss(self, batch: Mapping[str, Any], step: int) -> Any:
    count = len(self.net.attn_mask_probs)
    self._set_mask_rates(eomt.mask_rates(step, self._total_steps, count))
    class_labels, mask_labels = [], []
    for segmentation in self.tensors(batch, 'segmentation').long():
      labels = segmentation[segmentation >= 0].unique()
      class_labels.append(labels)
      mask_labels.append((segmentation == labels[:, None, None]).float())
    images = self.tensors(batch, 'image')
    outputs = self._run(images, mask_labels=mask_labels, class_labels=class_labels)
    return outputs.loss

  def outputs(self, batch: Mapping[str, Any]) -> Any:
    self._set_mask_rates([0.0] * len(self.net.attn_mask_probs))
    outputs = self._run(self.tensors(batch, 'image'))
    return {
      'logits': outputs.class_queries_logits, 'masks': outputs.masks_queries_logits
    }  # fmt: skip

  def decays(self, name: str, parameter: Any) -> bool:
    # Tables of queries and positions are not kernels.
    return twins.is_kernel(name, parameter) and not name.startswith(
      ('query.', 'embeddings.position')
    )

  def factor(self, name: str) -> float:
    # Ours is the sum of two parameters: the token and its position.
    return 2.0 if name == 'embeddings.cls_token' else 1.0


_TWINS = {'vit': Linear, 'eomt': Eomt}


def _make_twin(prepared: train.Prepared, params: Any, compiled: bool) -> twins.Twin:
  kind = prepared.config.model.get('kind', 'vit')
  return _TWINS[kind](prepared, params, compiled)


def _outputs(task: Any, params: Any, extra: Any, batch: dict) -> Any:
  return task.head.outputs(params, extra, batch['image'])


def _miou(prepared: train.Prepared, pairs: Iterable[tuple[dict, Any]]) -> float:
  """Returns the mIoU at the size of the masks."""
  task = prepared.program.task
  num_classes = len(task.class_names)

  @jax.jit
  def count(outputs: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    windows = jax.tree.map(lambda x: x[:, None, None], outputs)  # One of each image.
    view = class_maps.ViewOutputs(windows, batch['extent_0'], task.views[0], False)
    truth, size = batch['truth'], batch['size']
    predicted = class_maps.class_maps(task.head, [view], size, truth.shape[1:])
    counts = class_maps.confusion(truth, predicted, num_classes)
    return (counts * batch['mask'][:, None, None]).sum(axis=0)

  confusion = np.zeros([num_classes, num_classes])
  for batch, outputs in pairs:
    confusion += np.asarray(count(outputs, batch))
  return scores_lib.measure(confusion, np.zeros([3, num_classes]))['miou']


COMPARISON = twins.Comparison(
  _make_twin, _outputs, _miou, _PLAIN, 'transformers', 'mIoU'
)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the comparison with command-line arguments."""
  _import_transformers()
  twins.main(COMPARISON, 'against_transformers', __doc__, argv)


if __name__ == '__main__':
  twins.run(main)
