# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose, load and fine-tune a published checkpoint
#
# "How to train your ViT?" ([arXiv 2106.10270](https://arxiv.org/abs/2106.10270))
# published more than 50,000 checkpoints: Vision Transformers and hybrids of several
# sizes, pre-trained with many settings of augmentation and regularisation, and
# fine-tuned on several data sets. This notebook reads their index, chooses one,
# asks it about photographs, and fine-tunes it on a folder of images.
#
# As it stands, it fetches two files of one small model (R+Ti/16, 25 and 42 MB) and
# fine-tunes it on pieces of the two photographs that come with scikit-learn, which
# takes a few minutes on two CPU cores. **Run the cells from the top to the bottom.**
#
# ## Your choices
#
# The next cell is the only one to change. For your own images set `FOLDER`, choose a
# runtime with a TPU or a GPU (in Colab: *Runtime > Change runtime type*), and set
# `CHANGES = {}`, which is the published recipe: 384 px, batch 512, 500 steps.

# %% tags=["parameters"]
# Where git finds the source code of vit_jax: the URL of the repository that this
# notebook comes from. Not needed where the notebook lies in a checkout of it.
REPOSITORY = ''
# Folder of the training run. What lies on Google Drive, /content/drive/MyDrive/...,
# outlives the runtime.
WORKDIR = '/tmp/vit_jax/augreg'
# Folder of the published checkpoints and of their index.csv.
PUBLISHED = 'gs://vit_models/augreg'
# Model to take: 'R_Ti_16', 'Ti_16', 'S_32', 'S_16', 'R26_S_32', 'B_32', 'B_16', ...
MODEL = 'R_Ti_16'
# Names of ImageNet's classes, one per line; '' shows their numbers.
IMAGENET_NAMES = (
  'https://storage.googleapis.com/bit_models/ilsvrc2012_wordnet_lemmas.txt'
)
# Your images, in train/<class>/* and test/<class>/* of a folder, on Google Drive for
# one; '' takes pieces of two photographs.
FOLDER = ''
# Settings of the fine-tuning that differ from the recipe, by the names in
# configs/common.py. These are for a CPU.
CHANGES = {
  'pp.resize': 72, 'pp.crop': 64, 'batch': 16, 'batch_eval': 60,
  'total_steps': 60, 'warmup_steps': 10, 'eval_every': 20, 'progress_every': 5,
}  # fmt: skip

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

colab_tools.ready(found[0], folders=[WORKDIR, FOLDER])

# %% [markdown]
# ## The index
#
# `index.csv` has a row for each fine-tuned checkpoint: `name` of the model, `ds` that
# it was pre-trained on (`i21k`: ImageNet-21k), `final_val`, its accuracy on
# validation data at the end of pre-training, `adapt_ds` and `adapt_final_test`, data
# set and test accuracy of the fine-tuning, and the names of both files.
#
# If the bucket refuses to answer (403), the error names the place where the same
# weights are on Hugging Face: `predict.load_weights` and `config.pretrained` below
# take such a URL too.

# %%
from vit_jax import checkpoint

index = checkpoint.get_augreg_df(directory=PUBLISHED)
print(
  f'{len(index):,} fine-tuned checkpoints, of {index.filename.nunique():,} '
  f'pre-trained ones, of {index["name"].nunique()} models.'
)

# %% [markdown]
# For each model the best checkpoint that was fine-tuned on ImageNet: what it reaches,
# and how fast it is (images a second, as published). Small and
# fast models are on the right, accurate ones on top.

# %%
import matplotlib.pyplot as plt

tuned = index[index.adapt_ds == 'imagenet2012']
best = tuned.sort_values('adapt_final_test').groupby('name').tail(1)

fig, axes = plt.subplots(figsize=(8, 4.5), layout='constrained')
axes.scatter(best.infer_samples_per_sec, best.adapt_final_test * 100)
for row in best.itertuples():
  label = f' {row.name}, {row.adapt_resolution} px'
  axes.annotate(label, (row.infer_samples_per_sec, row.adapt_final_test * 100))
axes.set_xscale('log')
axes.set_xlabel('images a second (published)')
axes.set_ylabel('ImageNet test accuracy (%) (published)')
axes.grid(alpha=0.25)
axes.margins(x=0.25)
plt.show()
columns = [
  'name',
  'adapt_resolution',
  'adapt_final_test',
  'params',
  'wd',
  'aug',
]
best[columns].sort_values('adapt_final_test')

# %% [markdown]
# ## Choose
#
# Two files of `MODEL`: to fine-tune, the pre-trained checkpoint that was best at the
# end of pre-training, which the paper recommends to choose by (section 4.5); to ask
# about photographs as it is, the one that is best on ImageNet.

# %%
pretrained = checkpoint.augreg_filename(MODEL, PUBLISHED)
chosen = best[best.filename.str.startswith(f'{MODEL}-')].iloc[-1]
classifier = f'{PUBLISHED}/{chosen.adapt_filename}.npz'
print(f'to fine-tune:  {pretrained}')
print(f'to ask:        {classifier}')

# %% [markdown]
# ## Predict
#
# `predict.load_weights` finds out from the file which model its weights are for. The
# photographs are scikit-learn's: a temple in China, and a flower.

# %%
from sklearn import datasets as sample_datasets

from vit_jax import predict
from vit_jax.weights import fetch

imagenet_names = None
if IMAGENET_NAMES:
  imagenet_names = fetch.fetch(IMAGENET_NAMES).read_text().splitlines()
published = predict.load_weights(
  classifier, imagenet_names, (int(chosen.adapt_resolution),) * 2
)
photographs = sample_datasets.load_sample_images().images
for photograph, classes in zip(photographs, published.predict(photographs)):
  colab_tools.show([photograph], columns=1, size=4)
  for name, probability in classes:
    print(f'{probability:7.2%}  {name}')

# %% [markdown]
# ## Images to fine-tune on
#
# Your images lie in `FOLDER`, with a folder for each class: `train/cat/1.jpg`,
# `test/cat/2.jpg`. Without one, the next cell cuts the two photographs into pieces
# of 64 pixels, half of them to train on and half to test on, and the question is
# from which photograph a piece comes.

# %%
import pathlib

from PIL import Image

folder = FOLDER
if not folder:
  folder = f'{WORKDIR}_pieces'
  for name, photograph in zip(('china', 'flower'), photographs):
    for number in range(60):
      top, left = 64 * (number // 10), 64 * (number % 10)
      part = 'train' if (number // 10 + number % 10) % 2 else 'test'
      path = pathlib.Path(folder, part, name, f'{number}.png')
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(photograph[top : top + 64, left : left + 64]).save(path)
files = sorted(pathlib.Path(folder, 'train').glob('*/*'))
some = files[:: max(1, len(files) // 16)][:16]
colab_tools.show(
  [plt.imread(file)[..., :3] for file in some], [f.parent.name for f in some]
)

# %% [markdown]
# ## Fine-tune
#
# The config of this paper, for the checkpoint that was chosen: SGD with momentum, a
# cosine schedule, no weight decay. The head starts with zeros, and the position
# embeddings are interpolated to the resolution.
#
# **Stop it at any time** with the stop button: it saves the current step. **Run the
# cell again** to resume. To train again with other settings, choose
# another `WORKDIR`.

# %%
from vit_jax import train
from vit_jax.configs import augreg

config = augreg.get_config(MODEL)
config.dataset = folder
config.pretrained = pretrained
config.update_from_flattened_dict(CHANGES)
state, metrics = train.train_and_evaluate(config, WORKDIR)
print(f'Test accuracy: {metrics["accuracy_test"]:.2%}')

# %%
from vit_jax.figures import charts, results

charts.learning_curves(results.learning_curves(WORKDIR))

# %% [markdown]
# ## What it has learned
#
# The confusion matrix counts the test images by their class and by the class that
# was predicted; on its diagonal are those that are right.

# %%
from vit_jax.data import sources

model = predict.load(WORKDIR)
test = sources.open_split(model.config, 'test', class_names=model.class_names)
found = results.classify(model, test)
charts.confusion(found, model.class_names, 'test')

# %% [markdown]
# To ask about images of your own, name them by their paths.

# %%
some = sorted(pathlib.Path(folder, 'test').glob('*/*'))[:4]
for path, classes in zip(some, model.predict([str(p) for p in some], top=2)):
  print(path.name, ', '.join(f'{name} {p:.1%}' for name, p in classes))

# %% [markdown]
# ## Take it with you
#
# `checkpoint.save` writes an `.npz` by the published names, which the original's
# readers and timm's `load_npz` understand.

# %%
checkpoint.save(model.params, f'{WORKDIR}/tuned.npz')
size = pathlib.Path(f'{WORKDIR}/tuned.npz').stat().st_size
print(f'{WORKDIR}/tuned.npz, {size / 2**20:.1f} MiB')
