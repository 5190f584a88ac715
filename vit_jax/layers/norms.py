"""Norms of tokens and of heads.

`config.model.transformer.norm` selects one:

  layer          LayerNorm (arXiv 1607.06450)
  layer_no_bias  LayerNorm with a scale, but no bias
  rms            RMSNorm: no bias, and the mean is not subtracted (arXiv 1910.07467),
                 as in ViT-22B (arXiv 2302.05442, section 2)

Their scale, and the bias of `layer`, have the same names in the parameters.
"""

from typing import Any

import flax.linen as nn


def make(kind: str, eps: float, name: str, **types: Any) -> nn.Module:
  """Returns a norm of a kind over the last dimension; `eps` is added to the variance."""
  if kind == 'rms':
    return nn.RMSNorm(eps, name=name, **types)
  return nn.LayerNorm(eps, use_bias=kind == 'layer', name=name, **types)
