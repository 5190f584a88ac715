r"""Demonstrates the gain from pre-training without labels, on digits.

  python -m vit_jax.main --config=configs/masked_patches_transfer.py \
    --workdir=/tmp/masked_transfer

A small ViT pre-trained on masked patches (configs/masked_patches_digits.py) is
fine-tuned on 5 labels per class, and compared with one trained from scratch on them.
Expected over three draws of the labels: fine-tuned 88.0 %, from scratch 85.6 %, a gain
of 2.4 ± 4.0 points.
With configs/masked_patches_transfer.py:fashion_mnist, which fine-tunes on 1 % of the
labels and takes half an hour of processor time: 78.4 %, from scratch 72.1 %. With 10 %
of the labels (docs/benchmarks.md): 82.6 %, from scratch 74.9 %.
"""

import ml_collections

from vit_jax.configs import digits_transfer, masked_patches_digits, studies

DATASETS = ('digits', 'fashion_mnist')


def get_config(dataset: str = 'digits') -> ml_collections.ConfigDict:
  """Returns the config: the program, and the configs of the three runs."""
  studies.check_dataset(dataset, DATASETS, 'masked_patches_transfer')
  config = digits_transfer.get_config()
  config.pretrain = masked_patches_digits.get_config()
  config.pretrain.update(eval_every=0, checkpoint_every=0)
  for run in (config.finetune, config.scratch):
    run.update(dataset='digits/few', batch=50, total_steps=900)
    run.pp.crop = 16
  # The best learning rates of .0003, .001, .003 and .01, and of .1 and .3.
  config.scratch.base_lr = 3e-3
  config.finetune.base_lr = 0.1
  if dataset == 'fashion_mnist':
    for run in (config.pretrain, config.finetune, config.scratch):
      studies.change_dataset(run, dataset)
      run.pp.crop = 28
    config.pretrain.update(batch=64, total_epochs=4.0, warmup_epochs=0.4)
    for run in (config.finetune, config.scratch):
      run.pp.train = 'train[{seed}000:{seed}600]'  # 1 % of the labels.
  return config
