r"""Fine-tunes a model on the 19 tasks of VTAB-1k, as in the paper (table 4, B.1.1).

  python -m vit_jax.main --config=configs/vtab.py:b16 \
    --config.run.pretrained=ViT-B_16.npz --workdir=/tmp/vtab

The argument is MODEL or MODEL,SIZE, as in vit.py. Tasks whose data set is not on this
machine are left out, and the command says how to get each of them.
--config.run.base_lr=0.003 sets a key of the runs. The paper has one setting for all
tasks. Warm-up follows the original code; augmentation is as in BiT: common.VTAB.

Expected (tables 2 and 9), mean over the 19 tasks: L/16 from ImageNet-21k 72.72,
L/16 from JFT-300M 76.28, H/14 from JFT-300M 77.63; BiT-L has 76.29.
"""

import dataclasses

import ml_collections

from vit_jax.configs import common, schema, vit

# Table 9 of arXiv 2010.11929, accuracy in %: the 7 natural tasks (Caltech101,
# CIFAR-100, DTD, Flowers102, Pets, Sun397, SVHN), the 4 specialised ones (Camelyon,
# EuroSAT, Resisc45, Retinopathy) and the 8 structured ones (Clevr-Count, Clevr-Dist,
# DMLab, dSpr-Loc, dSpr-Ori, KITTI-Dist, sNORB-Azim, sNORB-Elev).
TABLE_9 = {
  'H/14 JFT': (
    95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9,
    83.3, 96.7, 91.4, 76.6,
    91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2,
  ),
  'L/16 JFT': (
    95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4,
    83.6, 96.5, 89.7, 77.1,
    86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1,
  ),
  'L/16 I21k': (
    90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9,
    82.5, 95.6, 85.2, 75.3,
    70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7,
  ),
}  # fmt: skip
# Table 2, mean over the tasks in %.
MEANS = {
  'H/14 JFT': 77.63, 'L/16 JFT': 76.28, 'L/16 I21k': 72.72, 'BiT-L': 76.29
}  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class Vtab(common.Seeded):
  """The config."""

  trainer: str = 'vtab'
  # Tasks, keys of common.VTAB; () for all of them.
  tasks: tuple = ()
  seeds: schema.Seeds = (0,)
  # Train on train800 and test on val200, to choose settings; otherwise train on
  # both and test on the test images.
  validate: bool = False
  # Download the missing data sets that TFDS can download, about 90 GB in total,
  # and prepare the files in run.tfds_manual_dir.
  download: bool = False
  # Checkpoints to keep of a finished run.
  checkpoints: schema.Kept = 'newest'
  # The run of each task, without the data and augmentation that its labels rule out.
  run: ml_collections.ConfigDict


def get_config(model: str = 'b16') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL' or 'MODEL,SIZE'."""
  name, comma, size = model.partition(',')
  config = schema.make(Vtab)
  config.run = vit.get_config(f'{name},vtab/caltech101{comma}{size}')
  # Some tasks have more than 70,000 test images: only one evaluation.
  config.run.update(eval_every=0, progress_every=100)
  return config
