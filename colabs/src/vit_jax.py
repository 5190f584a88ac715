# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Vision Transformer, step by step
#
# This notebook looks at images, builds a Vision Transformer, trains it from
# scratch, asks it about images it has never seen, and fine-tunes it for another
# question with few labels. The method is that of "An Image is Worth 16x16 Words"
# ([arXiv 2010.11929](https://arxiv.org/abs/2010.11929)).
#
# As it stands, the notebook needs neither an accelerator nor a download of data:
# it uses the 1,797 handwritten digits that come with scikit-learn, and takes
# about four minutes on two CPU cores. **Run the cells from the top to the bottom.**
#
# ## Your choices
#
# The next cell is the only one to change. For real data, set `DATA` to a folder
# with `train/<class>/*` and `test/<class>/*`, or to the name of a data set of
# [TFDS](https://www.tensorflow.org/datasets/catalog/overview), and choose a
# runtime with a TPU or a GPU first (in Colab: *Runtime > Change runtime type*).

# %% tags=["parameters"]
# Where git finds the source code of vit_jax: the URL of the repository that this
# notebook comes from. Not needed where the notebook lies in a checkout of it.
REPOSITORY = ''
# Folder of the training run. What lies on Google Drive, /content/drive/MyDrive/...,
# outlives the runtime.
WORKDIR = '/tmp/vit_jax/digits'
# What to train on: 'digits', another name of TFDS ('cifar10'), or a folder.
DATA = 'digits'
# Size of the model, where DATA is not 'digits': 'ti16', 's16', 'b16', 'b32', ...
MODEL = 'ti16'
# Other settings of the training, by the names in configs/common.py, for example
# {'batch': 64, 'pp.crop': 96, 'total_epochs': 20.0}.
CHANGES = {}

# What to fine-tune on: a name of TFDS, or a folder. 'parity' asks the model of this
# notebook another question about the digits.
NEW_DATA = 'parity'
# Weights to start from: a file (.npz, .safetensors), a URL, or a training run.
# '' starts from the training run of this notebook.
PRETRAINED = ''
# Other settings of the fine-tuning.
NEW_CHANGES = {}
# Number of updates of the training loop at the end.
LOOP_STEPS = 300

# %% [markdown]
# ## Get ready
#
# This cell installs what vit_jax lacks, and nothing else: the TensorFlow and the
# JAX of the runtime stay as they are. Where all is installed, it installs nothing.
# It ends with the devices that JAX sees.

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

colab_tools.ready(found[0], folders=[WORKDIR, DATA, NEW_DATA])

# %% [markdown]
# ## Data
#
# A *config* holds everything that defines a training run: data, model, optimiser,
# schedule. It is made by a function call, and all of its values can be changed.

# %%
from vit_jax.configs import digits, pretrain

if NEW_DATA == 'parity' and DATA != 'digits':
  raise ValueError(
    f"NEW_DATA='parity' is about the digits, and DATA='{DATA}': set NEW_DATA, at "
    'the top, to a folder or a name of TFDS.'
  )
if DATA == 'digits':
  config = digits.get_config()
else:
  config = pretrain.get_config(f'{MODEL},{DATA}')
config.update_from_flattened_dict(CHANGES)

# %% [markdown]
# Training images are augmented, a little differently each time they are seen; test
# images are only scaled. Of the digits each image is an 8x8 square of grey values,
# shown to the network at 16x16. The next cell draws a few of both, as the network
# sees them.

# %%
import numpy as np

from vit_jax import input_pipeline

info = input_pipeline.get_dataset_info(config.dataset, config.pp.train)
names = info['class_names']
ds_train, ds_test = input_pipeline.get_datasets(config)
train_batch = next(ds_train.as_numpy_iterator())
test_batch = next(ds_test.as_numpy_iterator())


def show(batch, count=16):
  """Shows the first images of a batch, with their labels."""
  labels = [names[i] for i in batch['label'][:count].argmax(axis=1)]
  colab_tools.show(colab_tools.to_pixels(batch['image'][:count]), labels)


print(f'{info["num_examples"]:,} training images of {len(names)} classes.')
print('Training images, augmented:')
show(train_batch)
print('Test images:')
show(test_batch)

# %% [markdown]
# ## Model
#
# A Vision Transformer cuts an image into patches, turns each patch into a vector (a
# *token*) by one matrix product, adds a position embedding and a class token, and
# runs a plain Transformer encoder over the sequence. The class token's output gives
# the logits of the classes.
#
# The next cell draws the patches of one image, and counts the parameters of each
# part of the model. The model for the digits is small: 16 patches, 4 layers, 96
# channels.

# %%
import jax

from vit_jax import models

height, width = models.patch_grid(config.model, train_batch['image'].shape[1:3])
rows = np.split(colab_tools.to_pixels(test_batch['image'][0]), height)
patches = [patch for row in rows for patch in np.split(row, width, axis=1)]
print(f'One image as {height} x {width} patches:')
colab_tools.show(patches[: 8 * width], columns=width)

model = models.make_model(config.model, num_classes=len(names))
image = train_batch['image'][:1]
params = jax.jit(lambda: model.init(jax.random.key(0), image, train=False))()['params']
for part, leaves in params.items():
  count = sum(leaf.size for leaf in jax.tree.leaves(leaves))
  print(f'{part:<12} {count:>12,} parameters')

# %% [markdown]
# ## Training
#
# `train_and_evaluate` trains to the end of the config: it shows a bar, evaluates on
# all test images now and then, and saves checkpoints.
#
# **Stop it at any time** with the stop button: it saves the current step. **Run the
# cell again** to resume; the result is the same as without a stop.
# A finished run says so. To train again with other settings, choose
# another `WORKDIR`.
#
# To expect for the digits: 99.2 % of the 360 test images, after 80 passes over the
# training images. Measured on two cores of an AMD EPYC virtual machine: about 100
# seconds, of which compiling takes about 10.

# %%
from vit_jax import train

state, metrics = train.train_and_evaluate(config, WORKDIR)
print(f'Test accuracy: {metrics["accuracy_test"]:.2%}')

# %% [markdown]
# ### Learning curves
#
# Each run writes its numbers to `metrics.jsonl` in its folder. Here they are as
# curves: the loss of both splits, the accuracy, and the learning rate (a linear
# warm-up, then a cosine).

# %%
from vit_jax.figures import charts, results

charts.learning_curves(results.learning_curves(WORKDIR))

# %% [markdown]
# ## Prediction
#
# `predict.load` loads a trained model from its folder. It takes paths, PIL images or
# arrays of any size. The next cell asks it about test images; `predicted (true)`
# stands above an image whose prediction is wrong.

# %%
from vit_jax import predict

trained = predict.load(WORKDIR)
pixels = colab_tools.to_pixels(test_batch['image'][:16])
true = [names[i] for i in test_batch['label'][:16].argmax(axis=1)]
predicted = [best[0][0] for best in trained.predict(list(pixels), top=1)]
colab_tools.show(
  pixels, [p if p == t else f'{p} ({t})' for p, t in zip(predicted, true)]
)

# %% [markdown]
# One image more closely: the probabilities of the three most probable classes. To
# ask about a photograph of your own, put its path in place of the example's.

# %%
for name, probability in trained.predict([f'{WORKDIR}/example.png'], top=3)[0]:
  print(f'{probability:7.2%}  {name}')

# %% [markdown]
# ## Fine-tuning
#
# A trained model knows what images look like. To answer another question it keeps
# all layers but the last: the *head* is new, initialised with zeros, and everything is
# trained a little further. The paper's recipe is SGD with momentum, without weight
# decay, at a higher resolution, for which the position embeddings are interpolated.
#
# Here the question is whether a digit is **even or odd**, from only 30 labelled
# images, three of each digit, at 24x24 pixels. The next cell writes images as files,
# one folder for each class, which is how you would bring your own. (All of them come
# from the test split, so that the model has not been trained on any. The question is
# a toy; that few labels are enough is not.)

# %%
import collections
import pathlib

from PIL import Image

from vit_jax.configs import digits_transfer, vit

if NEW_DATA == 'parity':
  folder = pathlib.Path(f'{WORKDIR}_parity')
  seen = collections.Counter()
  for batch in ds_test.as_numpy_iterator():
    images = colab_tools.to_pixels(batch['image'])
    for image, digit in zip(images, batch['label'].argmax(axis=1)):
      split = 'train' if seen[digit] < 3 else 'test'
      path = folder / split / ('odd' if digit % 2 else 'even')
      path.mkdir(parents=True, exist_ok=True)
      Image.fromarray(image.squeeze()).save(path / f'{digit}_{seen[digit]}.png')
      seen[digit] += 1
  tuning = digits_transfer.get_config().finetune
  tuning.dataset, tuning.pp.train = str(folder), 'train'
  tuning.update(base_lr=0.01, total_steps=100, warmup_steps=10)
else:
  tuning = vit.get_config(f'{MODEL},{NEW_DATA}')
tuning.pretrained = PRETRAINED or WORKDIR
tuning.update_from_flattened_dict(NEW_CHANGES)

# %%
_, tuned = train.train_and_evaluate(tuning, f'{WORKDIR}_tuned')
print(f'Test accuracy, fine-tuned: {tuned["accuracy_test"]:.2%}')

# %% [markdown]
# ### Was it worth it?
#
# To see what the first training has given, train the same model on the same 30
# labels from random weights, with the recipe that suits that best: Adam, and three
# times as many steps. To expect: 96 % fine-tuned and 86 % from scratch.

# %%
if NEW_DATA == 'parity':
  scratch = digits_transfer.get_config().scratch
  scratch.dataset, scratch.pp.train = tuning.dataset, 'train'
  scratch.update_from_flattened_dict(NEW_CHANGES)
  _, alone = train.train_and_evaluate(scratch, f'{WORKDIR}_scratch')
  print(f'Test accuracy, fine-tuned:   {tuned["accuracy_test"]:.2%}')
  print(f'Test accuracy, from scratch: {alone["accuracy_test"]:.2%}')

# %% [markdown]
# ## A training loop of your own
#
# You do not have to use `train_and_evaluate`. Models are plain Flax modules,
# batches are dicts of arrays, and an update is a function that you compile. This
# loop trains the model above from its random weights with Optax: clipped gradients,
# AdamW with weight decay on kernels only, a warm-up and a cosine. It runs on one
# device; several devices, checkpoints and resuming are what `train_and_evaluate` adds.
#
# To expect for the digits: 98 % after 300 steps, in about half a minute.

# %%
import optax

learning_rate = optax.warmup_cosine_decay_schedule(
  0.0, 2e-3, warmup_steps=LOOP_STEPS // 10, decay_steps=LOOP_STEPS
)
kernels = jax.tree.map(lambda x: x.ndim > 1, params)
tx = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.adamw(learning_rate, weight_decay=0.05, mask=kernels),
)


@jax.jit
def update(params, opt_state, batch, key):
  """Returns new parameters, the new state of the optimiser, and the loss."""

  def loss_fn(params):
    logits = model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': key}
    )  # [B, classes].
    return optax.softmax_cross_entropy(logits, batch['label']).mean()

  loss, gradients = jax.value_and_grad(loss_fn)(params)
  updates, opt_state = tx.update(gradients, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


@jax.jit
def count_correct(params, batch):
  """Returns the number of right predictions; `mask` is 0 where a row is padding."""
  logits = model.apply({'params': params}, batch['image'], train=False)
  correct = logits.argmax(axis=-1) == batch['label'].argmax(axis=-1)  # [B].
  return (correct * batch['mask']).sum()


opt_state = tx.init(params)
batches = ds_train.as_numpy_iterator()
for step in range(LOOP_STEPS):
  key = jax.random.fold_in(jax.random.key(1), step)
  params, opt_state, loss = update(params, opt_state, next(batches), key)
  if (step + 1) % max(1, LOOP_STEPS // 5) == 0:
    print(f'step {step + 1:>5}, loss {loss:.3f}')
correct = total = 0
for batch in ds_test.as_numpy_iterator():
  correct += count_correct(params, batch)
  total += batch['mask'].sum()
print(f'Test accuracy, own loop: {correct / total:.2%}')

# %% [markdown]
# ## Where to go on
#
# - `vit_jax_augreg.ipynb` chooses among the published checkpoints, and fine-tunes
#   one on your images.
# - `inspect.ipynb` shows what is inside a trained model.
# - [Coming from timm or Hugging Face](../docs/coming_from_timm.md) has such a loop
#   with pretrained weights, frozen layers, layer-wise decay and averaged weights.
# - `plan.ipynb` says whether a model fits a TPU, and what a training would cost.
