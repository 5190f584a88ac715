"""Lets timm and transformers be imported beside a PyTorch without CUDA.

Both import torchvision, whose package on PyPI is built for the PyTorch with
CUDA. Beside another it fails for want of two operators, which no test needs:
they are declared here, without a body.
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
