r"""Self-training with unlabelled images: Noisy Student (arXiv 1911.04252).

  python -m vit_jax.main --workdir=/tmp/ns \
    --config=configs/noisy_student.py:b16,imagenet2012,/data/unlabelled

The argument is MODEL,LABELLED,UNLABELLED, or MODEL,LABELLED,UNLABELLED,STUDENT
for students with another, usually larger model. Models are short names of models.py.
LABELLED and UNLABELLED are TFDS names or folders; labels of the unlabelled images are
not read. To hide the labels of 90 % of a data set:

  python -m vit_jax.main --workdir=/tmp/ns \
    --config=configs/noisy_student.py:s16,imagenet2012,imagenet2012 \
    --config.teacher.pp.train='train[:10%]' \
    --config.student.pp.train='train[:10%]' \
    --config.unlabelled_split='train[10%:]'

docs/self_training.md has the published recipe.

The paper trains EfficientNets; model, optimiser, weight decay and dropout here are
from configs/pretrain.py. The paper ends with an epoch and a half at a higher
resolution: use configs/vit.py with --config.pretrained=/tmp/ns/student_3_0.

Published for EfficientNet-L2 with 300M unlabelled images: 88.4 % on ImageNet; for
EfficientNet-B7 86.9 %, and 85.0 % without the unlabelled images. Nothing is
published for a ViT.
"""

import ml_collections
from ml_collections.config_dict import placeholder

from vit_jax.configs import common, pretrain


def get_config(arg: str = 'b16,imagenet2012,imagenet21k'):
  """Returns the config: the program, and the configs of teacher and student."""
  model, labelled, unlabelled, student = common.split_argument(
    arg,
    'MODEL,LABELLED,UNLABELLED or MODEL,LABELLED,UNLABELLED,STUDENT',
    'noisy_student.py:b16,imagenet2012,/data/unlabelled',
  )
  config = ml_collections.ConfigDict()
  config.trainer = 'noisy_student'
  config.teacher = _with_noise(pretrain.get_config(f'{model},{labelled}'))
  config.student = _with_noise(pretrain.get_config(f'{student or model},{labelled}'))
  # Labelled images of a batch; the unlabelled ones are added.
  config.student.batch = 512
  # Epochs over the labelled images.
  config.student.total_epochs = 350.0
  return set_defaults(
    config, unlabelled, common.SPLITS.get(unlabelled, ('train', ''))[0]
  )


def _with_noise(run):
  """Adds the published noise to the config of a run; returns the config."""
  run.pp.randaugment = (2, 27)
  if 'transformer' in run.model:
    run.model.transformer.stochastic_depth = 0.2
  return run


def set_defaults(config, unlabelled: str, split: str):
  """Sets all keys but `trainer`, `teacher` and `student`; returns the config."""
  # A TFDS name or a folder, and the split; '{seed}' stands for the seed.
  config.unlabelled = unlabelled
  config.unlabelled_split = split
  # Each seed has its own teacher and students. A seed also replaces '{seed}' in
  # the names of splits, for draws of labels.
  config.seeds = (0,)
  # Workdir of a run to use as the first teacher; None: train `teacher`.
  config.teacher_workdir = placeholder(str)
  # Minimum probability of a pseudo-label.
  config.confidence = 0.3
  # Images per class: the most confident ones, or all of them several times. None:
  # every confident image once.
  config.per_class = placeholder(int)
  config.per_class = 130_000
  # Whether a pseudo-label is the probability of each class, or the best class.
  config.soft = True
  # Soft labels: number of top classes whose probabilities are stored; the rest is
  # spread evenly over the others. None: all classes, as in the paper, which takes 8
  # bytes per image and class on disk and in memory.
  config.soft_classes = placeholder(int)
  config.soft_classes = 32
  # Unlabelled images per labelled image of a batch, for each iteration.
  config.ratios = (14.0, 14.0, 28.0)
  # Metric to compare.
  config.metric = 'accuracy_test'
  return config
