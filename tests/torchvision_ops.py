"""Lets timm and transformers be imported with a CPU build of PyTorch.

Both import torchvision, whose package on PyPI is built for PyTorch with CUDA. With
another build, its import fails because two operators are missing, which no test
needs: they are declared here, without a body.
"""

import torch

try:
  import torchvision  # noqa: F401
except RuntimeError:
  _LIBRARY = torch.library.Library('torchvision', 'DEF')
  for _name in ('nms', 'qnms'):
    _LIBRARY.define(
      f'{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor'
    )
