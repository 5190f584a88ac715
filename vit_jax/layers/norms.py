"""Norms of tokens and of heads.

`config.model.transformer.norm` selects one:

  layer          LayerNorm (arXiv 1607.06450)
  layer_no_bias  LayerNorm with a scale, but no bias
  rms            RMSNorm: no bias, and the mean is not subtracted (arXiv 1910.07467),
                 as in ViT-22B (arXiv 2302.05442, section 2)

Their scale, and the bias of `layer`, have the same names in the parameters.
"""

import flax.linen as nn

from vit_jax.layers import patches

NORMS = ('layer', 'layer_no_bias', 'rms')


def make(kind: str, eps: float, name: str, **types) -> nn.Module:
  """Returns a norm of NORMS over the last dimension.

  `eps` is added to the variance. Raises ValueError if the kind is unknown.
  """
  patches.check_choice('norm', kind, NORMS, 'config.model.transformer')
  if kind == 'rms':
    return nn.RMSNorm(eps, name=name, **types)
  return nn.LayerNorm(eps, use_bias=kind == 'layer', name=name, **types)
