"""What segmenters take from the weights of other Vision Transformers."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from vit_jax.learning import optim

# Parameters of EoMT that encoders lack.
QUERIES_AND_MASKS = ('queries', 'mask_mlp/', 'upscale_', 'class_head/')
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


def check_frozen(
  config: ml_collections.ConfigDict, weights: Mapping[str, Any], params: Any
) -> None:
  """Raises ValueError if queries or masks of EoMT are frozen at random values."""
  frozen = optim.frozen_sizes(config.lr_multipliers, params)
  missing = [path for path in sorted(frozen) if path not in weights]
  random = [path for path in missing if path.startswith(QUERIES_AND_MASKS)]
  if random:
    raise ValueError(
      f'lr_multipliers={config.lr_multipliers} freezes {len(random)} parameters that '
      f"pretrained={config.pretrained!r} lacks, such as '{random[0]}': they would stay "
      'random; to freeze only the encoder, pass --config.lr_multipliers='
      "\"(('queries|mask_mlp|upscale|class_head', 1.0), ('', 0.0))\""
    )
