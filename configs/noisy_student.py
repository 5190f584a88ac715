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

import dataclasses
from typing import Annotated

import ml_collections

from vit_jax.configs import common, pretrain, schema

_Ratios = Annotated[
  tuple[schema.Positive, ...], schema.Fits('one or more numbers above 0', bool)
]


@dataclasses.dataclass(kw_only=True)
class NoisyStudent(common.Seeded):
  """The config."""

  trainer: str = 'noisy_student'
  # Configs of runs; the batch of a student is the number of labelled images.
  teacher: ml_collections.ConfigDict
  student: ml_collections.ConfigDict
  # A TFDS name or a folder, and the split; '{seed}' stands for the seed.
  unlabelled: schema.Text
  unlabelled_split: schema.Text
  seeds: schema.Seeds = (0,)
  # Workdir of a run to use as the first teacher; None: train `teacher`.
  teacher_workdir: schema.Text | None = None
  # Minimum probability of a pseudo-label.
  confidence: schema.Probability = 0.3
  # Images per class: the most confident ones, or all of them several times. None:
  # every confident image once.
  per_class: schema.Count | None = 130_000
  # Whether a pseudo-label is the probability of each class, or the best class.
  soft: bool = True
  # Soft labels: number of top classes whose probabilities are stored; the rest is
  # spread evenly over the others. None: all classes, as in the paper, which takes 8
  # bytes per image and class on disk and in memory.
  soft_classes: schema.Count | None = 32
  # Unlabelled images per labelled image of a batch, for each iteration.
  ratios: _Ratios = (14.0, 14.0, 28.0)
  # Metric to compare.
  metric: schema.Text = 'accuracy_test'


def get_config(arg: str = 'b16,imagenet2012,imagenet21k') -> ml_collections.ConfigDict:
  """Returns the config: the program, and the configs of teacher and student."""
  model, labelled, unlabelled, student = common.split_argument(
    arg,
    'MODEL,LABELLED,UNLABELLED or MODEL,LABELLED,UNLABELLED,STUDENT',
    'noisy_student.py:b16,imagenet2012,/data/unlabelled',
  )
  config = schema.make(NoisyStudent)
  config.teacher = _with_noise(pretrain.get_config(f'{model},{labelled}'))
  config.student = _with_noise(pretrain.get_config(f'{student or model},{labelled}'))
  # Labelled images of a batch; the unlabelled ones are added.
  config.student.batch = 512
  # Epochs over the labelled images.
  config.student.total_epochs = 350.0
  config.unlabelled = unlabelled
  config.unlabelled_split = common.SPLITS.get(unlabelled, ('train', ''))[0]
  return config


def _with_noise(run: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Adds the published noise to the config of a run; returns the config."""
  run.pp.randaugment = (2, 27)
  if 'transformer' in run.model:
    run.model.transformer.stochastic_depth = 0.2
  return run
