r"""Fine-tunes an EoMT, or trains a linear head, to segment the 150 classes of ADE20K.

  vit_jax train --config=configs/segment_ade20k.py:eomt_dinov3_l16,/data/ADEChallengeData2016 \
    --config.pretrained=hf://facebook/dinov3-vitl16-pretrain-lvd1689m --workdir=/tmp/ade20k
  vit_jax train --config=configs/segment_ade20k.py:dinov2_s14,/data/ADEChallengeData2016 \
    --config.pretrained=hf://facebook/dinov2-small --workdir=/tmp/ade20k_linear

The argument is MODEL,DATA. MODEL is an EoMT of models.py, which is trained as a whole, or
a plain Vision Transformer, of which only a linear head is trained. DATA has the published
folders images/ and annotations/, and classes.json with the names of the 150 classes.

Never run here. Published mIoU on the 2,000 validation images, with windows of 512 px:

  eomt_dinov3_s16  46.6    eomt_l16    58.4    dinov2_s14  44.3
  eomt_dinov3_b16  54.4                        dinov2_b14  47.3
  eomt_dinov3_l16  59.1                        dinov2_l14  47.7
                                               dinov2_g14  49.0

Those of DINOv3 are LightlyTrain's (docs.lightly.ai/train/stable/semantic_segmentation.html,
versions 0.11 to 0.16), the next one is that of the code released with arXiv 2503.19108,
the linear ones are from arXiv 2304.07193, table 10. Hyperparameters are those of the
released code, of the linear head those of DINOv2's configurations for mmsegmentation, with
one warm-up for all parameters, and random crops of a quarter to all of the image in place
of scale jitter from .5 to 2, which also shrinks images.
"""

import ml_collections

from vit_jax.configs import common, models

_SIZE = 512


def get_config(
  model_dataset: str = 'eomt_l16,/data/ADEChallengeData2016',
) -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA'."""
  form, example = 'MODEL,DATA', 'segment_ade20k.py:eomt_l16,/my/folder'
  model, dataset = common.split_argument(model_dataset, form, example)
  config = common.get_config()
  config.dataset = dataset
  config.pp.update(train='train', test='validation')
  config.model = models.get_config(model)
  config.task = 'segment_semantic'

  patch = config.model.patches.size[0]
  config.pp.crop = -(-_SIZE // patch) * patch  # 518 for patches of 14 pixels.
  config.pp.crop_area = (0.25, 1.0)
  config.pp.color_jitter = 0.5
  config.pp.antialias = True
  options = {'reduce_zero_label': True, 'window': config.pp.crop}

  config.update(batch=16, batch_eval=16, total_steps=40_000, optimizer='adam')
  config.update(decay_type='optax:polynomial_schedule')
  if models.kind_of(config.model) == 'eomt':
    config.model.num_queries = 100
    config.update(base_lr=1e-4, warmup_steps=1_000, weight_decay=0.05)
    config.layer_decay = 0.8
    config.decay_args = {'power': 0.9, 'end_value': 0.0}
  else:
    config.update(base_lr=1e-3, warmup_steps=1_500, weight_decay=1e-4)
    config.lr_multipliers = (('head', 1.0), ('', 0.0))
    options |= {'stride': 341, 'max_class_share': 0.75}
    config.decay_args = {'power': 1.0, 'end_value': 0.0}
  config.task_options = options
  config.update(eval_every=4_000, checkpoint_every=4_000)
  return config
