r"""Demonstrates Noisy Student on scikit-learn's digits, without a download.

  python -m vit_jax.main --config=configs/noisy_student_digits.py \
    --workdir=/tmp/noisy_student

A small ViT learns from 10 labels per class, with three draws of the labels. It labels
the other 1,337 training images, and a student of the same size learns from all of
them, with noise; then once more, with the student as the teacher.

Takes a few minutes on two cores. Expected accuracy on the 360 test images: teacher
91.8 %; first student 93.8 %, 2.0 ± 2.5 points above the teacher of the same draw;
second student 94.3 %, 2.5 ± 2.2 points above: with so few images the gain is about as
large as its deviation between draws. With configs/noisy_student_digits.py:fashion_mnist,
1 % of the labels and one iteration: teacher 70.6 %, student 70.2 %, 0.4 ± 0.7 points below
it.

The settings were chosen with few_3, on 300 of its unlabelled images.
"""

import ml_collections

from vit_jax.configs import digits, noisy_student, schema, studies

DATASETS = ('digits', 'fashion_mnist')


def get_config(dataset: str = 'digits') -> ml_collections.ConfigDict:
  """Returns the config: the program, and the configs of teacher and student."""
  studies.check_dataset(dataset, DATASETS, 'noisy_student_digits')
  config = schema.make(noisy_student.NoisyStudent)
  few = digits.get_config()
  few.dataset = 'digits/few10'
  few.pp.train = 'few_{seed}'
  few.update(total_epochs=None, warmup_epochs=None)
  few.update(eval_every=0, checkpoint_every=0)
  few.update(total_steps=600, warmup_steps=60, batch=50, base_lr=3e-3)
  config.teacher = few

  config.student = config.teacher.copy_and_resolve_references()
  config.student.update(total_steps=400, warmup_steps=40, batch=20)
  config.student.update(label_smoothing=0.0)
  # RandAugment is made for larger images.
  config.student.pp.update(rotate=15.0, random_erasing=0.25)
  config.student.pp.crop_area = (0.6, 1.0)
  config.student.model.transformer.dropout_rate = 0.1
  config.student.model.transformer.stochastic_depth = 0.1

  config.unlabelled = 'digits/few10'
  config.unlabelled_split = 'unlabelled_{seed}'
  config.seeds = (0, 1, 2)
  config.per_class = 130
  config.ratios = (4.0, 4.0)
  if dataset == 'fashion_mnist':
    for run in (config.teacher, config.student):
      studies.change_dataset(run, dataset)
      run.pp.crop = 28
      run.pp.train = 'train[{seed}000:{seed}600]'  # 1 % of the labels.
    config.student.update(total_steps=600, warmup_steps=60, batch=40)
    config.update(unlabelled=dataset, unlabelled_split='train[6000:]')
    config.update(per_class=4000, ratios=(4.0,))
  return config
