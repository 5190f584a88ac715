r"""Fine-tunes a Vision Transformer, as in the paper (table 4, B.1.1).

  vit_jax train --config=configs/vit.py:b16,cifar10 \
    --config.pretrained=ViT-B_16.npz --workdir=/tmp/vit
  vit_jax train --config=configs/vit.py:b16,/path/to/folder \
    --config.pretrained=model.safetensors --workdir=/tmp/vit
  vit_jax train --config=configs/vit.py:pretrained,cifar10 \
    --config.pretrained=hf://facebook/dinov2-base --workdir=/tmp/dinov2

The argument is MODEL,DATA or MODEL,DATA,SIZE. MODEL is a short name from
models.py, or 'pretrained' for the model of --config.pretrained. An EoMT learns to segment
images, see docs/segmentation.md. DATA is a TFDS name, or
a folder with train/<class>/* and test/<class>/*. SIZE is the size of the images in
pixels; without it, images are prepared as the files next to the weights say, if there
are any (config.pp.match_pretrained). Without --config.pretrained, the weights are the
file named after the model, such as ViT-B_16.npz, in --config.pretrained_dir, by default
'.'.

common.FINE_TUNING has the learning rates that the paper tries on each data set.
Expected from the 21k models: CIFAR-10 B/16 98.92 and 99.03 (issue #21 of the
original), CIFAR-100 B/32 92.31 (issue #152), ImageNet B/16 84.61 (issue #85).
"""

import ml_collections

from vit_jax.configs import common, models

SIZE = 384
# Side in pixels for a model of unknown patches: a multiple of 8, 14, 16, 28 and 32.
PRETRAINED_SIZE = 224
# The paper averages the weights from this size on (table 2: 512 for L/16, 518
# for H/14).
AVERAGED_SIZE = 512


def get_config(model_dataset: str = 'b16,cifar10') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA' or 'MODEL,DATA,SIZE'."""
  form, example = 'MODEL,DATA or MODEL,DATA,SIZE', 'vit.py:l16,/my/folder,512'
  model, dataset, size = common.split_argument(model_dataset, form, example)
  if size and not size.isdigit():
    raise ValueError(
      f"size '{size}' must be pixels, as in configs/{example}; {common.COMMA}"
    )
  config = common.with_dataset(common.get_config(), dataset)
  if model == models.PRETRAINED:
    config.model = ml_collections.ConfigDict({'kind': model})
    default = PRETRAINED_SIZE
  else:
    config.model = models.get_config(model)
    if models.kind_of(config.model) == 'eomt':
      config.task = 'segment_semantic'
    # Patches of 14 pixels do not divide 384: 27 of them fit, the rest is dropped.
    patch = config.model.patches.size[0]
    default = SIZE // patch * patch if patch == 14 else SIZE
  config.pp.crop = int(size) if size else default
  config.pp.match_pretrained = not size
  if config.pp.crop >= AVERAGED_SIZE:
    config.ema_decay = 0.9999
  if (model, dataset) == ('b16', 'cifar10'):
    config.base_lr = 0.01
  return config
