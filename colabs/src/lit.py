# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Images and texts: LiT
#
# LiT ("LiT: Zero-Shot Transfer with Locked-image text Tuning",
# [arXiv 2111.07991](https://arxiv.org/abs/2111.07991)) has two towers: a Vision
# Transformer embeds images, and a language model embeds texts, as vectors of the same
# width. The product of two vectors says how well an image and a text fit together.
#
# This notebook loads a published model, embeds photographs and texts, draws which
# of them fit together, and classifies the images of a data set that the model was
# not trained on: a few sentences about each class take the place of training.
#
# As it stands, it downloads the model `LiT-B16B` (783 MB) and CIFAR-100 (161 MB).
# On a GPU or a TPU it then takes a minute or two, on a CPU several. **Run the cells
# from the top to the bottom.**
#
# ## Your choices
#
# The next cell is the only one to change.

# %% tags=["parameters"]
# Where git finds the source code of vit_jax: the URL of the repository that this
# notebook comes from. Not needed where the notebook lies in a checkout of it.
REPOSITORY = ''
# Name of a published model: 'LiT-B16B', 'LiT-B16B_2', 'LiT-L16L', 'LiT-L16S' or
# 'LiT-L16Ti'; or weights of your own: the path of a .npz, hf://OWNER/NAME, ...
MODEL = 'LiT-B16B'
# Path of the vocabulary; '' uses the published one, or the one next to
# your weights (weights.npz, weights.txt).
VOCABULARY = ''
# Paths of photographs; [] takes those of scikit-learn, a temple and a flower.
IMAGES = []
# Texts to compare the photographs with.
TEXTS = [
  'a photo of a temple in China',
  'a building behind trees',
  'a photo of a flower',
  'petals, seen from near by',
  'a photo of a cat',
  'a plate of food',
]
# Data set to classify: a name of TFDS, or a folder with train/<class>/* and
# test/<class>/*.
DATA = 'cifar100'
# Split of the data set.
SPLIT = 'test'
# Number of images to classify; None for the whole split.
NUM_IMAGES = 500
# Sentences about a class, with {} for its name: 'short' are 8 of CLIP, 'full' its
# 80; or one sentence, such as 'a photo of a {}'.
TEMPLATES = 'short'

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

colab_tools.ready(
  found[0], extras=('colab', 'text'), folders=[MODEL, VOCABULARY, DATA, *IMAGES]
)

# %% [markdown]
# ## Load a model
#
# A name stands for a published model: `load_variables` downloads its weights into
# the folder of the notebook, and takes them from there the next time. Of other
# weights the shapes tell what model they are for.
#
# If the bucket refuses to answer (403), get the `.npz` and the vocabulary (`.txt` or
# `.model`) in another way, and give their paths at the top.

# %%
import jax

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.weights import convert

if MODEL in model_configs.MODEL_CONFIGS:
  model = models.get_model(MODEL)
  variables = model.load_variables()
else:
  weights = convert.read(MODEL)
  model = models.make_model(weights.config)
  variables = {'params': weights.params}
if VOCABULARY:
  model = model.clone(pp={**model.pp, 'vocab_path': VOCABULARY})
variables = jax.device_put(variables)
for name, tower in (('img', 'image tower'), ('txt', 'text tower')):
  leaves = jax.tree.leaves(variables['params'][name])
  print(f'{tower:<12} {sum(x.size for x in leaves):>12,} parameters')

# %% [markdown]
# ## Embed images and texts
#
# The tokenizer turns texts into rows of numbers, as many for a long text as for a
# short one. Images become squares of the size that the model takes, with values from
# -1 to 1. `apply` returns the embeddings, of length 1, and the inverse temperature `t`.

# %%
import numpy as np
from PIL import Image
from sklearn import datasets as sample_datasets

tokenizer = model.get_tokenizer()
preprocess_images = model.get_image_preprocessing()
photographs = [np.asarray(Image.open(path).convert('RGB')) for path in IMAGES]
photographs = photographs or sample_datasets.load_sample_images().images
images = preprocess_images(photographs)  # float32 [n, size, size, 3].
tokens = tokenizer(TEXTS)  # int32 [m, max_len].
embed = jax.jit(model.apply)
zimg, ztxt, out = embed(variables, images=images, tokens=tokens)
print(f'tokens of "{TEXTS[0]}": {tokens[0].tolist()}')
print(f'images: {images.shape} -> {zimg.shape}')
print(f'texts: {tokens.shape} -> {ztxt.shape}')
print(f't: {out["t"].item():.2f}')

# %% [markdown]
# ## Which texts fit?
#
# The *logit* of an image and a text is `t` times the product of their embeddings.
# Softmax over the texts makes shares of the logits of an image, here in percent: each
# column sums to 100.

# %%
from IPython import display

from vit_jax import models_lit
from vit_jax.tasks.image_text import similarity_plots

logits = models_lit.similarity(zimg, ztxt, out)  # float32 [n, m].
display.display(Image.fromarray(similarity_plots.matrix(images, TEXTS, logits)))
for i, row in enumerate(np.asarray(jax.nn.softmax(logits, axis=-1))):
  print(f'image {i}: {row.max():7.2%}  {TEXTS[row.argmax()]}')

# %% [markdown]
# ## Zero-shot classification
#
# A class becomes a few sentences: "a photo of the large {}." and others. The
# embedding of the class is the mean of the embeddings of its sentences. An image is
# of the class whose embedding has the largest product with its own.
#
# First the classes.

# %%
from vit_jax import input_pipeline
from vit_jax.data.texts import templates

info = input_pipeline.get_dataset_info(DATA, SPLIT)  # Downloads the data.
names = [name.replace('_', ' ') for name in info['class_names']]
prompts = templates.get(TEMPLATES)
classes = []  # [E] of each class.
for name in names:
  sentences = templates.fill([name], prompts)
  embeddings = embed(variables, tokens=tokenizer(sentences))[1]
  classes.append(embeddings.mean(axis=0))
classes = np.stack(classes)  # [C, E].
print(f'{len(names)} classes, {len(prompts)} sentences about each, such as')
print('\n'.join(f'  {sentence}' for sentence in sentences[:3]))

# %% [markdown]
# Then the images. `get_pp` prepares those of a `tf.data.Dataset` as the cells above
# have prepared photographs. Grey images get three equal channels.
#
# To expect: `LiT-B16B` with the 8 short sentences is published with 79.19 % on the
# 10,000 test images of CIFAR-100. An accuracy on 500 images differs from that on all
# of them by 2 percentage points or so.

# %%
import tensorflow as tf

from vit_jax import console
from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.data.images import images as image_files

BATCH = 50
config = common.set_dataset(common.get_config(), DATA)
source = sources.open_split(
  config, SPLIT, ('image', 'label'), class_names=info['class_names']
)
pp = model.get_pp()


def prepare(number):
  """Returns image and label of an example, as the model takes them."""
  record = source.read(source.record(number))
  image = image_files.decode(record['image'])  # uint8 [height, width, 3].
  return pp({'image': image, 'label': record['label'][0]})


count = min(NUM_IMAGES or source.num_examples, source.num_examples)
numbers = tf.data.Dataset.range(count)
batches = numbers.map(prepare, num_parallel_calls=2).batch(BATCH)
seen, labels, predicted = [], [], []
with console.bar(total=count, desc='Classifying') as bar:
  for batch in batches.as_numpy_iterator():
    zimg = embed(variables, images=batch['image'])[0]
    predicted += (zimg @ classes.T).argmax(axis=1).tolist()
    labels += batch['label'].tolist()
    seen += list(batch['image'][: 16 - len(seen)])
    bar.update(len(batch['label']))
accuracy = np.mean(np.equal(predicted, labels))
print(f'Zero-shot accuracy on {count:,} images: {accuracy:.2%}')

# %% [markdown]
# Some of them, with the class that the model chose; `predicted (true)` stands above
# an image whose prediction is wrong.

# %%
titles = [
  names[p] if p == t else f'{names[p]} ({names[t]})' for p, t in zip(predicted, labels)
]
colab_tools.show(
  colab_tools.to_pixels(np.stack(seen)), titles[: len(seen)], columns=4, size=2
)

# %% [markdown]
# ## The same in short
#
# `predict.load_weights` does all of this behind one call, in batches and on all
# devices: `predict.load_weights('LiT-B16B.npz').predict(photographs, classes=['a
# temple', 'a flower'])`. In a terminal, in the checkout of vit_jax:
#
# ```
# vit_jax predict --weights=LiT-B16B.npz --classes='a temple;a flower' photo.jpg
# ```
#
# `docs/image_text.md` tells how to evaluate on any data set, and how to train on
# pairs of your own.
