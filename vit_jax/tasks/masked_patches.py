"""Masked patch prediction (arXiv 2010.11929, B.1.2 and section 4.6).

Part of the patches of an image are corrupted: most of them become a learned mask
token, some another patch of the image, some stay as they are. The encoder sees
the result, and a linear head on every token predicts what the corrupted patches
looked like, of which alone the loss is made.

Shapes: B images, h x w = N patches of p x q pixels, C channels, D width of a token.
"""

import math

from etils import epath
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from PIL import ImageDraw
import tensorflow as tf

from vit_jax import input_pipeline
from vit_jax import models
from vit_jax import models_vit
from vit_jax.configs import rules
from vit_jax.data import images as images_lib
from vit_jax.learning import state as state_lib
from vit_jax.tasks import base

# What may become of a patch.
KEPT, MASKED, SWAPPED, UNCHANGED = range(4)
TARGETS = ('mean', '4x4', 'l2')
BITS = 3  # Of each channel of a colour.
_CELLS = 4  # Patches are downsized to so many cells each way.
# Sets the corruption apart from all else that follows from the same seed.
_FOLD = 1_914_201
_EVALUATION = 2_011_929  # Stands for the seed where there is none.
_SHOWN = 8  # Images in the picture at the end of a run.


class MaskedViT(models_vit.VisionTransformer):
  """A Vision Transformer whose tokens are corrupted before they are encoded."""

  def setup(self):
    """Adds the mask token to the parameters of the Vision Transformer."""
    super().setup()
    self.mask_token = self.param(
      'mask_token',
      nn.initializers.normal(stddev=0.02),
      (1, 1, self.hidden_size),
      jnp.dtype(self.param_dtype),
    )

  def __call__(self, images, fate, other, *, train):
    """Predicts every patch.

    Args:
      images: float [B, H, W, C].
      fate: int32 [B, N]: KEPT, MASKED, SWAPPED, or UNCHANGED.
      other: int32 [B, N], the patch that a SWAPPED one becomes.
      train: whether dropout is on.

    Returns:
      float32 [B, N, num_classes].
    """
    tokens = self.embed(images)  # [B, N, D]
    swapped = jnp.take_along_axis(tokens, other[..., None], axis=1)
    fate = fate[..., None]
    tokens = jnp.where(fate == SWAPPED, swapped, tokens)
    mask = self.mask_token.astype(tokens.dtype)
    tokens = jnp.where(fate == MASKED, mask, tokens)
    encoded = self.encode(tokens, train=train)
    return self.head(encoded[:, -fate.shape[1] :])  # Without the class token.


class Task(base.Task):
  """Learns to predict what corrupted patches look like."""

  OPTIONS = {  # noqa: RUF012
    # Share of the patches that are corrupted (15 % is slightly worse), and of
    # these the share that is masked, and replaced by another patch of the image;
    # the rest stay as they are.
    'corruption': 0.5,
    'masked': 0.8,
    'swapped': 0.1,
    # What is predicted of a patch: 'mean', its mean colour in 3 bits a channel;
    # '4x4', the same of each cell of the patch downsized to 4 x 4; 'l2', all of
    # its pixels, by regression.
    'target': 'mean',
  }
  OPTION_RULES = {  # noqa: RUF012
    'corruption': rules.share,
    'masked': rules.number(0, 1),
    'swapped': rules.number(0, 1),
    'target': rules.one_of(*TARGETS),
  }
  METRICS = ('accuracy', 'loss')
  NEW_PARAMS = ('head/', 'mask_token')
  OWN_PARAMS = ('head/', 'mask_token')
  DRAWS = True
  NEXT = 'an image, what is masked of it, and what is predicted'

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    if self.options.masked + self.options.swapped > 1 + 1e-9:
      raise ValueError(
        f'masked={self.options.masked} and swapped={self.options.swapped} are '
        'more than all corrupted patches: they must not sum to more than 1 '
        '(config.task_options.masked)'
      )
    if models.kind_of(config.model) != 'vit':
      raise ValueError(
        f'model={config.model.get("model_name")} has no tokens that could be '
        "masked: use a Vision Transformer, 'b16' say (config.model)"
      )
    self.grid = models.patch_grid(config.model, self.image_size)  # (h, w)
    self.patch = tuple(
      size // count for size, count in zip(self.image_size, self.grid)
    )
    if self.options.target == '4x4' and any(p % _CELLS for p in self.patch):
      raise ValueError(
        f"target='4x4' needs patches whose sides are multiples of {_CELLS}, not "
        f"{self.patch}: use 'mean' or 'l2' (config.task_options.target)"
      )
    self.num_patches = math.prod(self.grid)
    if self.num_patches < 2:
      raise ValueError(
        f'crop={config.pp.crop} is one patch: there is nothing to predict it '
        'from; use larger images or smaller patches (config.pp.crop)'
      )
    channels = config.pp.channels
    self.num_colors = 2 ** (BITS * channels)  # 512, of grey 8.
    outputs = {
      'mean': self.num_colors,
      '4x4': _CELLS**2 * self.num_colors,
      'l2': math.prod(self.patch) * channels,
    }[self.options.target]
    self.model = models.make_model(
      config.model, cls=MaskedViT, num_classes=outputs
    )
    jax.eval_shape(self.init, jax.random.key(0))  # Finds what does not fit.

  def inputs(self, record, seed=None):
    """Returns the image, and what becomes of its patches.

    In evaluation that follows from the number of the image in its split.
    """
    example = super().inputs(record, seed)
    if seed is None:
      seed = tf.stack(
        [tf.constant(_EVALUATION, tf.int64), tf.cast(record['index'], tf.int64)]
      )
    seeds = tf.random.experimental.stateless_split(
      tf.random.experimental.stateless_fold_in(seed, _FOLD), 2
    )
    fate, other = corrupt(seeds, self.num_patches, self.options)
    return {**example, 'fate': fate, 'other': other}

  def batch_spec(self, size):
    """Returns shapes of images, and of what becomes of their patches."""
    patches = jax.ShapeDtypeStruct((size, self.num_patches), jnp.int32)
    return {'image': self.image_spec(size), 'fate': patches, 'other': patches}

  def init(self, rng):
    """Returns the parameters of the Vision Transformer, and the mask token."""
    batch = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), self.batch_spec(1)
    )
    return self.model.init(rng, **batch_args(batch), train=False)['params'], {}

  def _losses(self, outputs, batch):
    """Returns loss, and share that is right, of every patch: float32 [B, N]."""
    outputs = outputs.astype(jnp.float32)
    patches = cut(batch['image'], self.grid)  # [B, N, p, q, C]
    if self.options.target == 'l2':
      error = outputs - patches.reshape(outputs.shape)
      means = outputs.reshape(patches.shape).mean(axis=(2, 3))  # [B, N, C]
      right = colors(means) == mean_colors(patches)
      return (error**2).mean(axis=-1), right.astype(jnp.float32)
    cells = _CELLS if self.options.target == '4x4' else 1
    target = mean_colors(patches, cells)  # [B, N, cells**2]
    logits = outputs.reshape(*target.shape, self.num_colors)
    logs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(logs, target[..., None], axis=-1)[..., 0]
    right = logits.argmax(axis=-1) == target
    return loss.mean(axis=-1), right.astype(jnp.float32).mean(axis=-1)

  def _sums(self, outputs, batch):
    loss, right = self._losses(outputs, batch)
    counted = (batch['fate'] != KEPT).astype(jnp.float32)  # [B, N]
    if 'mask' in batch:
      counted *= batch['mask'][:, None]
    count = counted.sum()
    return {
      'accuracy': ((right * counted).sum(), count),
      'loss': ((loss * counted).sum(), count),
    }

  def loss(self, params, extra, batch, rng):
    """Returns the loss summed over the corrupted patches, and their number."""
    del extra
    outputs = self.model.apply(
      {'params': params},
      **batch_args(batch),
      train=True,
      rngs={'dropout': rng},
    )
    sums = self._sums(outputs, batch)
    return sums['loss'], {'accuracy': sums['accuracy']}

  def outputs(self, params, extra, batch):
    """Returns what is predicted of every patch, float32 [B, N, ...]."""
    del extra
    return self.model.apply(
      {'params': params}, **batch_args(batch), train=False
    )

  def measure(self, params, extra, batch):
    """Returns loss, and the share of colours predicted right."""
    return self._sums(self.outputs(params, extra, batch), batch)

  def describe(self):
    """Says what is predicted."""
    what = {
      'mean': f'the mean colour (of {self.num_colors}) of',
      '4x4': f'4 x 4 colours (of {self.num_colors}) of',
      'l2': 'the pixels of',
    }[self.options.target]
    return (
      f'to predict {what} corrupted patches: {self.options.corruption:.0%} of the '
      f'{self.num_patches} of an image'
    )

  def predictor(self, params, extra, step):
    """Returns a predictor that draws."""
    return Predictor(self, params, extra, step)

  def finish(self, source, state, mesh):
    """Returns a picture of test images, what was masked, what is predicted."""
    batches = input_pipeline.eval_batches(
      self.config, source, self.example, mesh
    )

    def first(params, extra, batch):
      shown = jax.tree.map(lambda x: x[:_SHOWN], batch)
      return shown, self.outputs(params, extra, batch)[:_SHOWN]

    with jax.set_mesh(mesh):
      whole = jax.NamedSharding(mesh, jax.P())
      batch, outputs = jax.device_get(
        jax.jit(first, out_shardings=whole)(
          state_lib.best_params(state), state.extra, next(batches)
        )
      )
    count = int(batch['mask'].sum())
    batch, outputs = jax.tree.map(lambda x: x[:count], (batch, outputs))
    return base.Ending(
      pictures={'masked_patches': draw(self.pictures(batch, outputs))}
    )

  def pictures(self, batch, outputs) -> np.ndarray:
    """Returns images, what is seen of them, and what is predicted, side by side.

    Args:
      batch: arrays [B, ...] as `inputs` makes them.
      outputs: what `outputs` returns of them.

    Returns:
      float32 [B, 3, H, W, C] in [-1, 1]. Corrupted patches are grey in the
      second; in the third they are what the model predicts.
    """
    images = np.asarray(batch['image'])
    patches = cut(images, self.grid)  # [B, N, p, q, C]
    corrupted = (np.asarray(batch['fate']) != KEPT)[..., None, None, None]
    if self.options.target == 'l2':
      predicted = np.asarray(outputs, np.float32).reshape(patches.shape)
    else:
      cells = _CELLS if self.options.target == '4x4' else 1
      best = np.asarray(outputs).reshape(
        *patches.shape[:2], cells, cells, self.num_colors
      ).argmax(-1)  # fmt: skip
      predicted = middle(best, images.shape[-1])
      for axis, size in ((2, self.patch[0]), (3, self.patch[1])):
        predicted = predicted.repeat(size // cells, axis)
    seen = np.where(corrupted, 0.0, patches)
    guessed = np.where(corrupted, predicted.clip(-1, 1), patches)
    return np.stack(
      [images, paste(seen, self.grid), paste(guessed, self.grid)], axis=1
    )


class Predictor(base.Predictor):
  """Predicts masked patches of images."""

  def predict(self, images):
    """Returns for each image float32 [3, H, W, C], see Task.pictures."""
    return list(self.task.pictures(*self.run(images)))

  def report(self, images, args):
    """Writes a picture."""
    out = epath.Path(args.out)
    pictures = np.stack(self.predict(images))
    out.write_bytes(images_lib.encode_png(draw(pictures)))
    return [f'{len(pictures)} image(s), masked and predicted: {out}']


def batch_args(batch) -> dict:
  """Returns the arguments of MaskedViT out of a batch."""
  return {
    'images': batch['image'], 'fate': batch['fate'], 'other': batch['other'],
  }  # fmt: skip


def corrupt(seeds, num_patches: int, options):
  """Draws what becomes of each patch, independently of the others.

  Args:
    seeds: int64 [2, 2].
    num_patches: number N of patches.
    options: reads `corruption`, `masked` and `swapped`.

  Returns:
    fate int32 [N], and other int32 [N], a patch that is not the same one.
  """
  draw = tf.random.stateless_uniform([num_patches], seeds[0])
  limits = np.cumsum([options.masked, options.swapped, 1.0])
  limits = options.corruption * np.minimum(limits, 1.0)
  fate = tf.fill([num_patches], KEPT)
  for limit, kind in zip(limits[::-1], (UNCHANGED, SWAPPED, MASKED)):
    fate = tf.where(draw < limit, kind, fate)
  step = tf.random.stateless_uniform(
    [num_patches], seeds[1], 1, num_patches, tf.int32
  )
  other = (tf.range(num_patches) + step) % num_patches
  return tf.cast(fate, tf.int32), other


def cut(images, grid):
  """Cuts images [B, H, W, C] into patches [B, N, p, q, C]."""
  b, height, width, c = images.shape
  h, w = grid
  x = images.reshape(b, h, height // h, w, width // w, c).swapaxes(2, 3)
  return x.reshape(b, h * w, height // h, width // w, c)


def paste(patches, grid):
  """Puts patches [B, N, p, q, C] together to images [B, H, W, C]."""
  b, _, p, q, c = patches.shape
  h, w = grid
  x = patches.reshape(b, h, w, p, q, c).swapaxes(2, 3)
  return x.reshape(b, h * p, w * q, c)


def colors(values):
  """Returns the number of a colour: BITS bits of each channel, the first highest.

  Args:
    values: float [..., C] in [-1, 1].

  Returns:
    int32 [...], from 0 to 2**(BITS * C) - 1.
  """
  levels = 2**BITS
  bins = jnp.floor((values + 1) / 2 * levels).astype(jnp.int32)
  bins = bins.clip(0, levels - 1)
  places = levels ** jnp.arange(values.shape[-1])[::-1]
  return (bins * places).sum(axis=-1)


def mean_colors(patches, cells: int | None = None):
  """Returns the number of the mean colour of patches [B, N, p, q, C].

  Args:
    patches: float in [-1, 1].
    cells: into how many cells each way a patch is cut first; None: it is not.

  Returns:
    int32 [B, N, cells * cells], or [B, N].
  """
  b, n, p, q, c = patches.shape
  k = cells or 1
  x = patches.astype(jnp.float32).reshape(b, n, k, p // k, k, q // k, c)
  found = colors(x.mean(axis=(3, 5))).reshape(b, n, k * k)
  return found if cells else found[..., 0]


def middle(numbers, channels: int) -> np.ndarray:
  """Returns the colour in the middle of those of a number, in [-1, 1]."""
  levels = 2**BITS
  places = levels ** np.arange(channels)[::-1]
  bins = (np.asarray(numbers)[..., None] // places) % levels
  return ((bins + 0.5) / levels * 2 - 1).astype(np.float32)


def draw(pictures: np.ndarray, least: int = 96) -> np.ndarray:
  """Draws rows of image, what is seen of it, what is predicted.

  Args:
    pictures: float32 [B, 3, H, W, C] in [-1, 1].
    least: pixels that each is enlarged to at least.

  Returns:
    uint8 [height, width, 3].
  """
  b, columns, height, width, c = pictures.shape
  times = max(1, -(-least // min(height, width)))
  pixels = ((pictures + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
  pixels = np.broadcast_to(pixels, (*pixels.shape[:-1], max(c, 3)))
  height, width, gap, top = height * times, width * times, 8, 20
  canvas = Image.new(
    'RGB',
    (columns * (width + gap) + gap, b * (height + gap) + top),
    'white',
  )
  pen = ImageDraw.Draw(canvas)
  for i, title in enumerate(('image', 'masked', 'predicted')):
    pen.text((gap + i * (width + gap), 4), title, fill='black')
  for row in range(b):
    for column in range(columns):
      image = Image.fromarray(pixels[row, column])
      image = image.resize((width, height), Image.Resampling.NEAREST)
      canvas.paste(
        image, (gap + column * (width + gap), top + row * (height + gap))
      )
  return np.asarray(canvas)
