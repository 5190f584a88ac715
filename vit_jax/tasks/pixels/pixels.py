"""iGPT: predicts the pixels of images, without labels.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2. A pixel
becomes the number of its nearest colour in a palette. There are two objectives:

  ar    predicts each pixel from the pixels before it, in raster order
        (config.model.causal=True)
  bert  predicts randomly masked pixels from the others (config.model.causal=False)

The loss of an image is the mean over its predicted pixels, and the loss of a batch
the mean over images, in nats; `bits_per_dim` is the same in bits.

Shapes: B images, N pixels, K colours, C channels.
"""

from collections.abc import Callable
import copy
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from vit_jax import console, input_pipeline, models, models_igpt, preprocess
from vit_jax.configs import task_options
from vit_jax.data import feeding, order, records
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import processes
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks import base, predict_flags
from vit_jax.tasks.pixels import palette as palette_lib, sampling

# The palette is fitted to the first images of the run, and random pixels of each.
_IMAGES, _PIXELS = 10_000, 256
_SEED = 17_042_019  # For the masks and samples of evaluations.


class Task(base.Task):
  """Learns to predict pixels."""

  Options = task_options.Pixels
  METRICS: ClassVar = {'bits_per_dim': metrics_lib.LOSS}
  METADATA: ClassVar[tuple[str, ...]] = ('palette',)
  LEARNED = ('palette',)
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ()
  FLAGS, IMAGELESS, NEEDS = predict_flags.PIXELS

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    _check_model(config)
    self.palette = np.asarray(metadata['palette'], np.float32)  # [K, C]
    self.model = models.make_model(
      config.model, num_classes=len(metadata.get('class_names', ()))
    )
    palette_lib.check(self.palette, self.model.num_colors, config.pp.channels)
    super().__init__(config, metadata)

  # --- Data ---

  @classmethod
  def learn(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the palette of a file, the weights or the images."""
    _check_model(config)
    path = config.task_options.palette or config.pretrained
    if isinstance(path, str):
      palette = palette_lib.load(path)
      origin = f" of '{path}'"
    else:
      colors = processes.from_first(
        'finding a palette', lambda: _find_palette(config, source).tolist()
      )
      palette = np.asarray(colors, np.float32)
      origin = ''
    num_colors = config.model.get('num_colors', len(palette))
    palette_lib.check(palette, num_colors, config.pp.channels, origin)
    return {'palette': palette.tolist()}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    greys = np.linspace(-1, 1, config.model.num_colors)[:, None]
    palette = np.repeat(greys, config.pp.channels, axis=1).tolist()
    return {**super().planned_metadata(config, num_classes), 'palette': palette}

  def colors(self, images: jax.Array) -> jax.Array:
    """Returns the numbers of the colours of images [B, H, W, C], int32 [B, N]."""
    numbers = palette_lib.quantise(images, self.palette)
    return numbers.reshape(images.shape[0], -1)

  def images(self, colors: np.ndarray) -> np.ndarray:
    """Returns images, float32 [B, H, W, C]; the inverse of `colors`."""
    pixels = self.palette[np.asarray(colors)]
    return pixels.reshape(len(pixels), *self.image_size, pixels.shape[-1])

  def _inputs(
    self, batch: base.Batch, keys: Callable[[int], jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the arguments of the model; `keys` maps B to B random keys."""
    colors = self.colors(batch['image'])
    if self.model.causal:
      return {'colors': colors}

    def draw(key: jax.Array) -> jax.Array:
      return jax.random.bernoulli(key, self.options.masked, colors.shape[1:])

    return {'colors': colors, 'masked': jax.vmap(draw)(keys(len(colors)))}

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the parameters, and no extra state."""
    colors = jnp.zeros((1, self.model.num_positions), jnp.int32)
    return self.model.init(rng, colors, train=False)['params'], {}

  def augment(self, batch: base.Batch, rng: jax.Array) -> base.Batch:
    """Replaces images by `colors`, and for 'bert' adds `masked`, bool [B, N]."""
    batch = dict(super().augment(batch, rng))
    inputs = self._inputs(batch, lambda count: jax.random.split(rng, count))
    del batch['image']
    return {**batch, **inputs}

  def _scores(
    self, logits: jax.Array, inputs: dict[str, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    """Returns nats of pixels, and 1 for pixels that count, float32 [B, N]."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, inputs['colors'])
    weights = inputs.get('masked', jnp.ones(nats.shape))
    return nats, weights.astype(jnp.float32)

  def _means(
    self, values: jax.Array, weights: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the means of values over the pixels of images.

    All images have the same weight, as in the released code (src/model.py of
    github.com/openai/image-gpt), regardless of how many pixels are masked.

    Args:
      values: of pixels, [B, N].
      weights: 1 for pixels that count, else 0, [B, N].

    Returns:
      Means [B], and weights [B]: 1 for images of which pixels count, else 0.
    """
    count = weights.sum(axis=1)
    means = (values * weights).sum(axis=1) / jnp.maximum(count, 1.0)
    return means, jnp.minimum(count, 1.0)

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the mean nats of images, summed, and the number of images."""
    logits = self.model.apply({'params': params}, **batch, train=True)
    nats, weights = self._means(*self._scores(logits, batch))
    total, count = nats.sum(), weights.sum()
    return (total, count), {'bits_per_dim': (total / math.log(2), count)}

  # --- Evaluation ---

  def _read(self, params: Any, batch: base.Batch) -> tuple[dict[str, jax.Array], Any]:
    """Returns the model's arguments for test images, and its outputs.

    The index of an image determines which of its pixels are masked.
    """

    def keys(count: int) -> jax.Array:
      index = batch.get('index', jnp.zeros(count, jnp.int32))
      return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(_SEED), index)

    inputs = self._inputs(batch, keys)
    return inputs, self.model.apply({'params': params}, **inputs, train=False)

  def read(self, params: Any, extra: Any, batch: base.Batch) -> dict[str, jax.Array]:
    """Computes how well the model predicts the pixels of images.

    Arrays [B, N]: `colors`, int32; `bits`, float32, of each pixel; `weights`,
    float32, 1 for predicted pixels; `likely`, int32, the most likely colour. These
    are the task's `outputs`; finetune.Task has others.
    """
    inputs, logits = self._read(params, batch)
    if isinstance(logits, tuple):  # With the logits of classes.
      logits = logits[0]
    nats, weights = self._scores(logits, inputs)
    return {
      'colors': inputs['colors'],
      'bits': nats / math.log(2),
      'counted': weights,
      'likely': logits.argmax(axis=-1).astype(jnp.int32),
    }

  outputs = read

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Raises ValueError: to sample pixels, a model runs repeatedly."""
    raise ValueError(
      f"task='{self.config.task}' samples pixel by pixel, which is not a single "
      'program to export: export its features (--features)'
    )

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the mean bits of images, summed, and the number of images."""
    results = self.read(params, extra, batch)
    weights = results['counted'] * batch['mask'][:, None]
    bits, image_weights = self._means(results['bits'], weights)
    return {'bits_per_dim': (bits.sum(), image_weights.sum())}

  def intermediates(
    self, params: Any, extra: Any, batch: base.Batch, capture: Any = False
  ) -> dict[str, Any]:
    """Returns what the model sows, `layer_0`, ...; for 'bert' nothing is masked."""
    colors = self.colors(batch['image'])
    return self._intermediates(params, {'image': colors}, capture)

  # --- Pictures ---

  def draw_training(self, batch: base.Batch) -> dict[str, np.ndarray]:
    return super().draw_training({**batch, 'image': self.images(batch['colors'])})

  def drawn_outputs(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Computes `read`, and for 'ar' samples and completions of upper halves."""
    results = self.read(params, extra, batch)
    if not self.model.causal:
      return results
    height, width = self.image_size
    upper = results['colors'][:, : height // 2 * width]
    key = jax.random.key(_SEED)
    return {
      **results,
      'samples': models_igpt.sample(self.model, params, upper[:, :0], key),
      'completions': models_igpt.sample(self.model, params, upper, key),
    }

  def draw_evaluation(self, batch: base.Batch, outputs: Any) -> dict[str, np.ndarray]:
    """Draws samples and completions; for 'bert' masked pixels and guesses."""
    images = self.images(outputs['colors'])
    if self.model.causal:
      samples = self.images(outputs['samples'])
      columns = {
        'image': images,
        'cut': sampling.cut(images, self.image_size[0] // 2),
        'completed': self.images(outputs['completions']),
      }
      return {
        'samples': sampling.draw(grids.to_pixels(samples)),
        'completions': grids.side_by_side(columns),
      }
    is_masked = outputs['counted'] > 0  # [B, N]
    guessed = np.where(is_masked, outputs['likely'], outputs['colors'])
    columns = {
      'image': images,
      'masked': np.where(is_masked.reshape(*images.shape[:-1], 1), 0.0, images),
      'predicted': self.images(guessed),
    }
    return {'masked_pixels': grids.side_by_side(columns)}

  def describe(self) -> str:
    if self.model.causal:
      target = 'each pixel from those before it'
    else:
      target = f'{self.options.masked:.0%} of the pixels from the others'
    return f'to predict {target}: one of {len(self.palette)} colours'

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return sampling.Predictor(self, params, extra, step)


def _check_model(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError unless the model is an iGPT for images of this size."""
  if models.kind_of(config.model) != 'igpt':
    raise ValueError(
      f"task='{config.task}' needs an iGPT, but "
      f"model='{config.model.get('model_name')}' is not one: use configs/igpt.py "
      '(config.model)'
    )
  height, width = preprocess.crop_size(config.pp)
  default = models_igpt.ImageGPT.num_positions
  num_positions = config.model.get('num_positions', default)
  if height * width != num_positions:
    raise ValueError(
      f'crop={height}x{width} has {height * width:,} pixels, but the model has '
      f'num_positions={num_positions:,}: set --config.pp.crop, or '
      f'--config.model.num_positions={height * width}'
    )


def _find_palette(
  config: ml_collections.ConfigDict, source: records.Source
) -> np.ndarray:
  """Finds a palette in random pixels of the first images of a run."""
  count = min(_IMAGES, source.num_examples)
  config = copy.deepcopy(config)
  config.batch = min(256, count)
  rows = np.arange(config.batch)
  steps = -(-count // config.batch)

  @no_autograph
  def example(
    record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    del seed  # No augmentation: the palette is for whole images.
    return {'image': preprocess.prepare(record['image'], None, config.pp)}

  def indices(step: int) -> np.ndarray:
    return order.training_indices(source, step * config.batch + rows, config.seed)

  data = input_pipeline.train_dataset(config, source, example, rows)
  batches = feeding.read(data.take(steps), source, indices)
  num_colors = config.model.num_colors
  console.log(
    f'Finding a palette of {num_colors} colours in {console.pluralize(count, "image")} ...'
  )
  with console.bar(
    iterable=batches, total=steps, desc='Reading pixels', delay=3, leave=False
  ) as bar:
    pixels = palette_lib.sample((batch['image'] for batch in bar), _PIXELS, config.seed)
  return palette_lib.fit(pixels, num_colors, config.seed)
