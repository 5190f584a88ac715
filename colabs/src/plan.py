# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does my model fit my TPU, and what would the training cost?
#
# A plan answers before anything is paid: it compiles the very update that a training
# would run, with the TPU's own compiler, and reads from the result how much memory
# each core needs, how long a step takes, and what follows for the whole training.
# **No TPU is needed**: the compiler runs on any Linux machine with an x86 processor,
# such as a Colab runtime without accelerator.
#
# Times are the compiler's *estimates*: good to compare two settings, no
# measurements. They leave out the network between the chips; the least that it takes
# is a line of its own.
#
# ## Your choices
#
# The next cell is the only one to change. To compile one plan takes one to two
# minutes on two cores for v3, and several for v5e and v6e; this notebook makes three.

# %% tags=["parameters"]
# Where git finds the source code of vit_jax: the URL of the repository that this
# notebook comes from. Not needed where the notebook lies in a checkout of it.
REPOSITORY = ''
# MODEL,DATA of configs/pretrain.py: 'b16,imagenet2012', 'l16,imagenet21k',
# 'h14,jft300m', or a model and a folder of your own images.
TRAINING = 'b16,imagenet2012'
# A TPU version (v2, v3, v4, v5e, v5p, v6e) and its chips along each axis.
TOPOLOGY = 'v3:2x2'
# Settings of the training, by the names in configs/common.py.
CHANGES = {'batch': 256, 'model.dtype': 'bfloat16'}
# What to compare with it: further changes by a title.
ALTERNATIVES = {
  'split over all cores': {'mesh.data': 1, 'mesh.fsdp': 8},
  'batch 1024': {'batch': 1024},
}
# Size of data that is not published with the paper: (training images, classes).
SIZE = None
# Price of one chip for an hour, from your provider's list, in your currency; None
# leaves prices out.
PRICE_PER_CHIP_HOUR = None

# %% [markdown]
# ## Get ready
#
# This cell installs what vit_jax lacks, and nothing else: the TensorFlow and the
# JAX of the runtime stay as they are. Where all is installed, it installs nothing.
# It ends with the devices that JAX sees; the
# TPU of the plan is not among them.

# %%
import pathlib
import subprocess
import sys

places = [pathlib.Path(place) for place in ('..', '.', 'vit_jax_checkout')]
found = [p for p in places if (p / 'colabs' / 'colab_tools.py').exists()]
if not found and not REPOSITORY:
  raise ValueError(
    "REPOSITORY is '': set it, at the top, to the URL of the git repository of "
    'vit_jax, and run that cell and this one again.'
  )
if not found:
  found = [places[-1]]
  subprocess.run(
    ['git', 'clone', '--quiet', '--depth=1', REPOSITORY, found[0]], check=True
  )
sys.path.append(str(found[0] / 'colabs'))
import colab_tools

colab_tools.ready(found[0], extras=['colab', 'plan'])

# %% [markdown]
# ## The plan
#
# The table says, from the top: how large the model is; on which devices and how it is
# split over them (the *mesh*); what the memory of one core must hold, and whether it
# does; the time of a step, and the share of the chip's peak that it reaches; what the
# cores send each other; and the whole training.
#
# To expect for B/16 on ImageNet, 256 images a step on the 8 cores of `v3:2x2`
# (libtpu 0.0.52): it fits, with 2.66 of 16 GiB, and the whole training, 300 passes
# over the images, would take 30 hours, or 121 chip-hours.

# %%
from vit_jax.configs import pretrain
from vit_jax.planning import plan as planner


def make_plan(changes):
  """Plans the training with other values of its keys, {key: value}."""
  config = pretrain.get_config(TRAINING)
  config.update_from_flattened_dict(CHANGES)
  config.update_from_flattened_dict(changes)
  size = SIZE or planner.data_size(config)
  return planner.make_plan(config, TOPOLOGY, *size)


plan = make_plan({})
print(planner.table(plan))

# %% [markdown]
# ## What if?
#
# The same with other settings. Splitting the parameters and the optimiser's state
# over all cores (FSDP) saves memory and costs traffic; larger batches use the chip
# better and need more memory. A plan that does not fit says so, in place of a time.

# %%
plans = {'as chosen': plan}
for title, changes in ALTERNATIVES.items():
  plans[title] = make_plan(changes)

# %% [markdown]
# The memory of one core, by what it holds. What is right of the dashed line does not
# fit.

# %%
import matplotlib.pyplot as plt

parts = {
  'parameters': ('params_bytes', '#0072B2'),
  'optimiser': ('optimizer_bytes', '#E69F00'),
  'images and labels': ('batch_bytes', '#CC79A7'),
  'activations and the rest': ('activations_bytes', '#009E73'),
}
fig, axes = plt.subplots(figsize=(8, 1.5 + 0.6 * len(plans)), layout='constrained')
for row, made in enumerate(plans.values()):
  left = 0
  for name, (key, colour) in parts.items():
    size = (made.get(key) or 0) / 2**30
    label = name if row == 0 else None
    axes.barh(row, size, left=left, color=colour, label=label)
    left += size
axes.axvline(plan['memory_of_core_bytes'] / 2**30, color='black', ls='--')
axes.set_yticks(range(len(plans)), plans)
axes.invert_yaxis()
axes.set_xlabel(f'GiB of memory on one core of {TOPOLOGY}')
fig.legend(loc='outside upper center', ncols=4, frameon=False)
plt.show()

# %% [markdown]
# ## What would it cost?
#
# Chip-hours of the whole training, by the compiler's estimates and with the least
# that the network takes. With `PRICE_PER_CHIP_HOUR` set, also what it would cost.

# %%
for title, made in plans.items():
  if not made['fits']:
    print(f'{title:<22}  does not fit')
    continue
  speed = made['images_per_second_per_core']
  hours = made['chip_hours'] * (speed / made['images_per_second_per_core_with_network'])
  price = f'{hours * PRICE_PER_CHIP_HOUR:12,.0f}' if PRICE_PER_CHIP_HOUR else ''
  print(f'{title:<22}  {hours:10,.0f} chip-hours{price}')

# %% [markdown]
# ## Where to go on
#
# To let the computer look for the mesh, the micro-batches and the recomputation with
# which a training is fastest, run in a terminal, in the checkout of vit_jax:
#
# ```
# vit_jax plan --config=configs/pretrain.py:h14,jft300m \
#   --topology=v3:4x4 --config.model.dtype=bfloat16 --search
# ```
