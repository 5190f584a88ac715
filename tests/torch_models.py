"""timm and transformers for the tests, with a CPU build of PyTorch."""

import os

os.environ['HF_HUB_OFFLINE'] = '1'

# isort: split
from tests import torchvision_ops  # noqa: F401

# isort: split
import numpy as np
import timm  # noqa: F401 (for importers of this module)
import torch
import transformers

from vit_jax import models_detr

# For models this small, synchronising threads takes longer than computing.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def hf_model(
  cls=transformers.ViTForImageClassification, config=transformers.ViTConfig, **kwargs
):
  """Returns a tiny Hugging Face model for images of 8 x 12 and three classes."""
  fields = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=(8, 12),
    patch_size=4,
    id2label={0: 'ant', 1: 'bee', 2: 'cow'},
    label2id={'ant': 0, 'bee': 1, 'cow': 2},
  )
  return randomize(cls(config(**{**fields, **kwargs})))


def logits(model, images):
  """Returns the logits of images [B, H, W, C] as a NumPy array."""
  with torch.no_grad():
    out = model.eval()(torch.tensor(images).permute(0, 3, 1, 2))
  return getattr(out, 'logits', out).numpy()


def randomize(model):
  """Fills all parameters with random numbers that give logits of order 1."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, value in model.named_parameters():
      noise = torch.randn(value.shape, generator=generator)
      scale = 0.5 if value.ndim < 2 else max(1, value[0].numel()) ** -0.5
      norm = 'norm' in name and name.endswith('weight')
      value.copy_(noise * scale * 0.3 + 1 if norm else noise * scale)
  return model


def detect(model, images, mask, **kwargs):
  """Applies Hugging Face's DETR.

  Args:
    model: the model.
    images: float32 [B, H, W, 3] in [-1, 1].
    mask: bool [B, H, W], False for padding.
    **kwargs: further arguments of the model.
  """
  pixels = (images / 2 + 0.5 - models_detr.MEAN) / models_detr.STD
  pixels = (pixels * mask[..., None]).astype(np.float32)
  with torch.no_grad():
    return model(
      torch.tensor(pixels).permute(0, 3, 1, 2),
      pixel_mask=torch.tensor(mask).long(),
      **kwargs,
    )
