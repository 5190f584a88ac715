"""What segmenters take from the weights of other Vision Transformers."""

from collections.abc import Mapping
from typing import Any

# Parts that read the tokens of an encoder in a classifier.
_READERS = ('head', 'MAPHead_0/', 'pool_norm/')
_LAST_NORM = 'Transformer/encoder_norm/'


def new_params(weights: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the prefixes of paths that do not come from weights, arrays by path.

  Weights with a norm after the pooling, such as those of fine-tuned MAEs, lack the
  encoder's last norm, which then has its initial values.
  """
  if any(path.startswith(_LAST_NORM) for path in weights):
    return _READERS
  return (*_READERS, _LAST_NORM)
