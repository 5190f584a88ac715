"""Learns English next to a locked image tower, on the digits, without a download.

  vit_jax train --config=configs/digits.py --workdir=/tmp/digits
  vit_jax train --config=configs/lit_digits.py --workdir=/tmp/lit_digits

The image tower comes from the first command, whose workdir is the config's
argument (configs/lit_digits.py:/tmp/digits). The text tower, a small BERT, starts
from random numbers. The names of three and eight never occur with their images
(vit_jax/data/tfds/digit_captions.py).

The second command takes about two and a half minutes on two cores. With a template
that training has not seen it reaches 100 % on the 299 test images of the eight named
digits, and 0 % on the 61 of the other two (chance: 10 %).

With the argument WORKDIR,FOLDER the image tower is a run of configs/fashion_mnist.py,
and FOLDER is what `python -m benchmarks.fashion captions FOLDER` has written: ten
minutes of processor time, 89.4 % of the test images (docs/benchmarks.md).
"""

import ml_collections

from vit_jax.configs import common, digits, models


def get_config(workdir: str = '/tmp/digits') -> ml_collections.ConfigDict:
  """Returns the config for WORKDIR of a run of configs/digits.py, or WORKDIR,FOLDER."""
  workdir, folder = common.split_argument(
    workdir, 'WORKDIR or WORKDIR,FOLDER', 'lit_digits.py:/tmp/digits'
  )
  config = digits.get_config()
  config.task = 'image_text'
  config.dataset = 'digit_captions'
  config.pretrained = {'img': workdir}
  # The image tower computes as in the evaluation of its run.
  config.lr_multipliers = (('img/', 0.0),)
  config.pp.update(crop_area=None, rotate=0.0)

  image = config.model
  config.model = ml_collections.ConfigDict()
  config.model.update(kind='lit', model_name='LiT-digits', image=image)
  config.model.text_model = 'bert'
  config.model.text = {
    'config': dict(
      width=96,
      num_layers=2,
      num_heads=3,
      mlp_dim=384,
      vocab_size=256,
      num_positions=16,
    ),
  }
  config.model.pp = {
    'tokenizer_name': 'bert',
    'vocab_path': 'words',
    'size': 16,
    'max_len': 12,
  }
  config.model.out_dim = (None, image.hidden_size)
  config.model.temperature_init = models.Lit.temperature_init

  # Zero-shot on all digits, on those that training has named, and on the others,
  # with templates that training has not seen.
  config.task_options.templates = 'this digit is a {}'
  config.task_options.classes = 'zero;one;two;three;four;five;six;seven;eight;nine'
  config.evals = (
    ('test', 'test'),
    ('seen', 'test_seen'),
    ('held_out', 'test_held_out'),
  )
  config.best_metric = 'accuracy_test'
  config.update(batch=256, label_smoothing=0.0, weight_decay=1e-4)
  config.update(total_epochs=100.0, warmup_epochs=5.0, grad_norm_clip=1.0)
  if folder:
    config.dataset = folder
    config.pp.update(crop=28, flip=False)
    config.task_options.update(
      templates='a grey photo of this {}', classes='', precompute=True
    )
    config.update(evals=(), batch_eval=500)
    config.update(total_epochs=4.0, warmup_epochs=0.4)
  return config
