# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is inside a trained model
#
# This notebook draws the figures of the paper
# ([arXiv 2010.11929](https://arxiv.org/abs/2010.11929), section 4.5) for any training
# run or any file of weights: filters, position embeddings, attention. It shows the
# learning curves and the mistakes of a run, and gives you the arrays behind the
# figures to draw your own.
#
# As it stands, it takes the model of the handwritten digits that `vit_jax.ipynb`
# trains, and trains it first where that has not been done (about 100 seconds on two
# CPU cores). **Run the cells from the top to the bottom.**
#
# ## Your choices
#
# The next cell is the only one to change.

# %% tags=["parameters"]
# Where git finds the source code of vit_jax: the URL of the repository that this
# notebook comes from. Not needed where the notebook lies in a checkout of it.
REPOSITORY = ''
# Folder of a training run; '' takes or trains the model of the digits.
RUN = ''
# Weights in place of a run: a file (.npz, .safetensors), a URL, or a folder.
WEIGHTS = ''
# Paths of images to look at; [] takes the first of the run's test images or, for
# WEIGHTS, the photographs of scikit-learn.
IMAGES = []

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

colab_tools.ready(found[0], folders=[RUN, WEIGHTS])

# %% [markdown]
# ## The model

# %%
from sklearn import datasets as sample_datasets

from vit_jax import predict, train
from vit_jax.configs import digits

images = IMAGES
if WEIGHTS:
  model = predict.load_weights(WEIGHTS)
  images = images or sample_datasets.load_sample_images().images
else:
  run = RUN or '/tmp/vit_jax/digits'
  if not RUN:
    train.train_and_evaluate(digits.get_config(), run)
  model = predict.load(run)
print(f'{model.config.model.model_name}, after {model.step:,} steps')

# %% [markdown]
# ## All figures
#
# `visualize.figures` draws what the model has: a file of weights has no learning
# curves, an MLP-Mixer no attention. Above each figure stands what it shows.

# %%
from IPython import display
import matplotlib.pyplot as plt

from vit_jax.figures import gallery, visualize

texts = {entry.name: entry for entry in gallery.entries_of(model.task)}
figures = visualize.figures(model, images)
for name, figure in figures.items():
  if name in texts:
    entry = texts[name]
    text = f'### {entry.title}\n{entry.caption} ({entry.source})'
    display.display(display.Markdown(text))
  display.display(figure)

# %% [markdown]
# To keep one: `figures['filters'].savefig('filters.png')`. To write all of them, with
# a page that opens in a browser, run in a terminal, in the checkout of vit_jax:
#
# ```
# vit_jax visualize --workdir=RUN --out=FOLDER
# ```
#
# ## The arrays behind the figures
#
# Drawing is kept apart from computing: each figure is drawn from arrays, which are
# yours to draw in another way. `attention` returns the attention weights of all
# layers, `[images, heads, queries, keys]`, whatever implementation the model uses.
# (This and the next cell need a Vision Transformer.)

# %%
from vit_jax.figures import internals

shown = visualize.subject(model, images)
batch = shown.batch['image']  # float32 [B, H, W, C] in [-1, 1].
seen = internals.attention(model.task.model, model.params, batch)
patch = [size / cells for size, cells in zip(batch.shape[1:3], seen.grid)]
distances = internals.mean_distances(seen.weights, seen.grid, patch)
print('layers, heads:', distances.shape)
print('attention weights of a layer:', seen.weights[0].shape)
print('maps:', internals.maps(seen).shape)
print('rollout:', internals.rollout_maps(seen).shape)

# %% [markdown]
# For example: how concentrated is the attention of the class token, layer by layer?
# The entropy of its weights, in bits, is 0 for a head that looks at one token, and
# the dashed line for a head that looks at all of them equally.

# %%
import numpy as np

entropies = []  # [K] of each layer.
for weights in seen.weights:
  query = weights[:, :, 0]  # The first token, [B, K, N].
  bits = -(query * np.log2(query.clip(1e-12))).sum(axis=-1)
  entropies.append(bits.mean(axis=0))
fig, axes = plt.subplots(figsize=(7, 3.5), layout='constrained')
axes.plot(range(1, len(entropies) + 1), entropies, 'o', color='#0072B2')
axes.axhline(np.log2(query.shape[-1]), color='black', ls='--')
axes.set_xlabel('layer')
axes.set_ylabel('entropy of attention (bits)')
axes.set_xticks(range(1, len(entropies) + 1))
axes.set_ylim(bottom=0)
plt.show()
