"""Defaults of every config, and what is known of common data sets.

Each key does what the comment above it says; all of them can be overridden on
the command line, for example `--config.base_lr=0.01 --config.pp.crop=64`.
"""

from collections.abc import Iterable
import copy

import ml_collections
from ml_collections.config_dict import placeholder

# data set: (training split, test split). A part of the training data is held out
# to choose the learning rate on (arXiv 2010.11929, B.1.1).
SPLITS = {
  'cifar10': ('train[:98%]', 'test'),
  'cifar100': ('train[:98%]', 'test'),
  'imagenet2012': ('train[:99%]', 'validation'),
  'imagenet21k': ('full[102400:]', 'full[:102400]'),
  'oxford_iiit_pet': ('train[:90%]', 'test'),
  'oxford_flowers102': ('train[:90%]', 'test'),
}

# Fine-tuning (table 4). Data set: updates, learning rates to try.
FINE_TUNING = {
  'imagenet2012': (20_000, (0.003, 0.01, 0.03, 0.06)),
  'cifar10': (10_000, (0.001, 0.003, 0.01, 0.03)),
  'cifar100': (10_000, (0.001, 0.003, 0.01, 0.03)),
  'oxford_iiit_pet': (500, (0.001, 0.003, 0.01, 0.03)),
  'oxford_flowers102': (500, (0.001, 0.003, 0.01, 0.03)),
}
# Any other data, a folder for one: as the small ones of the table.
_OTHER_STEPS = 500
# Updates of warm-up, of runs of 10,000 updates and more and of shorter ones,
# which the paper's 500 would fill.
_WARMUP, _SHORT_WARMUP = 500, 100

# The settings of "How to train your ViT?" (arXiv 2106.10270). Name: layers and
# magnitude of RandAugment, p of mixup.
AUGREG = {
  'none': (0, 0, 0.0),
  'light1': (2, 0, 0.0),
  'light2': (2, 10, 0.2),
  'medium1': (2, 15, 0.2),
  'medium2': (2, 15, 0.5),
  'strong1': (2, 20, 0.5),
  'strong2': (2, 20, 0.8),
}


def _preset(dataset, total_steps):
  train, test = SPLITS.get(dataset, ('train', 'test'))
  return ml_collections.ConfigDict(
    {
      'total_steps': total_steps,
      'warmup_steps': _WARMUP if total_steps >= 10_000 else _SHORT_WARMUP,
      'pp': {'train': train, 'test': test, 'crop': 384},
    }
  )


# What `with_dataset` sets.
DATASET_PRESETS = {
  dataset: _preset(dataset, total_steps)
  for dataset, (total_steps, _) in FINE_TUNING.items()
}


def _any(value):
  """Makes a key whose value may be of any type, an int or a pair for one."""
  return ml_collections.FieldReference(value, field_type=object)


def get_config() -> ml_collections.ConfigDict:
  """Returns the defaults: every key that exists, but for the model's size."""
  config = ml_collections.ConfigDict()

  # What is learned: a task of vit_jax/run/config.py (TASKS), or the dotted name of
  # a module with a class Task: see vit_jax/tasks/base.py.
  config.task = 'classify'
  # The task's own options, as its file lists them (OPTIONS);
  # --config.task_options.mixup=0.2 for one.
  config.task_options = ml_collections.ConfigDict()
  # What runs: 'train' ('inference_time' and 'transfer' have configs of their
  # own).
  config.trainer = 'train'
  # Everything random (initial weights, order, augmentation, dropout) comes from
  # this number.
  config.seed = 0

  # --- Data ---
  # A TFDS name, or a folder with train/<class>/* and test/<class>/*, or with
  # train.jsonl and test.jsonl (vit_jax/data/manifest.py). Or several to train on
  # together, with weights: (('cifar10', 0.7), ('/data/photos', 0.3)); evaluation
  # then reads the first.
  config.dataset = _any(None)
  # Where TFDS keeps its data sets (default: ~/tensorflow_datasets).
  config.tfds_data_dir = placeholder(str)
  # Where data sets lie that must be downloaded by hand (ImageNet).
  config.tfds_manual_dir = placeholder(str)
  # Images per update, over all devices and hosts together.
  config.batch = 512
  # Images per evaluation step, over all devices and hosts together.
  config.batch_eval = 512
  # Batches kept ready on the devices.
  config.prefetch = 2
  # Of a source that can only be streamed (tfrecord files too big for memory):
  # records that are shuffled among each other, and bytes that each host may hold
  # for that; the smaller counts. All other sources are shuffled as a whole.
  config.shuffle_buffer = 50_000
  config.shuffle_buffer_bytes = 2**30
  # A folder's images that cannot be decoded. 'error' decodes all of them once,
  # before training, names those and stops; 'skip' leaves them out and counts them;
  # 'trust' does not look, and such an image stops the run when its turn comes. What
  # was found is kept in the workdir, or beside the images by vit_jax.manifest.
  config.broken_images = 'error'
  # Largest number of pixels, height times width, of an image file; a larger one
  # counts as broken and is not decoded. The default is Pillow's.
  config.max_image_pixels = 89_478_485

  # Splits, as TFDS writes them ('train[:90%]'), and preprocessing. Of a folder that
  # has test/ (or test.jsonl), a `test` cut from the training images is not followed,
  # as in the original, which tests on test/: name other splits in `evals`.
  config.pp = ml_collections.ConfigDict()
  config.pp.train = 'train'
  config.pp.test = 'test'
  # Size of the images that the model sees, in pixels: an int, or (height,
  # width).
  config.pp.crop = _any(224)
  # Evaluation: None squeezes the image to `crop`; a number makes the short side
  # that long and cuts `crop` out of the middle.
  config.pp.resize = placeholder(int)
  # Colour channels: 3, or 1 for grey.
  config.pp.channels = 3
  # Training: smallest and largest share of the image's area, and of its width
  # to height, that a random crop has. None for `crop_area` squeezes the image.
  config.pp.crop_area = _any((0.05, 1.0))
  config.pp.crop_ratio = (3 / 4, 4 / 3)
  # Decodes a JPEG, or the part of it that is cut out, at 1/2, 1/4 or 1/8 where
  # that has as many pixels as `crop` or more, in height and width: photographs of
  # many megapixels take half of the time, and their pixels differ a little.
  config.pp.jpeg_shrink = True
  # Training: mirrors every other image.
  config.pp.flip = True
  # Training: turns the image by up to so many degrees either way.
  config.pp.rotate = 0.0
  # Training: RandAugment as (layers, magnitude), (2, 15) for one; () for none.
  # Magnitudes are from 0 to 30, and for images of about 224 pixels.
  config.pp.randaugment = ()
  # Training: strength, from 0 to 1, by which brightness, contrast and
  # saturation change.
  config.pp.color_jitter = 0.0
  # Training: share of the images of which a random rectangle is made grey.
  config.pp.random_erasing = 0.0

  # --- Model: set from models.py ---
  config.model = placeholder(ml_collections.ConfigDict)

  # Weights to start from, all but the head: a published .npz, a .safetensors or
  # .bin of timm's or Hugging Face's, a URL or gs:// path of one, or the workdir
  # of a run. Position embeddings are resized to the image.
  config.pretrained = placeholder(str)
  # The same, as the folder of published files, each named after its model: takes
  # <pretrained_dir>/<model.model_name>.npz where `pretrained` is None. None:
  # random weights, --config.pretrained_dir=None.
  config.pretrained_dir = '.'
  # With pretrained_dir, a model of the AugReg paper ('R_Ti_16': its best 21k
  # checkpoint by the folder's index.csv) or the name of one checkpoint.
  config.model_or_filename = placeholder(str)
  # Patches (height, width) of weights that are neither square nor say it.
  config.pretrained_grid = _any(None)

  # --- Objective ---
  # 'softmax' or 'sigmoid' cross-entropy (for several labels an image).
  config.loss = 'softmax'
  config.label_smoothing = 0.0

  # --- Optimiser ---
  # Number of updates, or of passes over the training data (give one).
  config.total_steps = placeholder(int)
  config.total_epochs = placeholder(float)
  # 'sgd' (with momentum) or 'adam'.
  config.optimizer = 'sgd'
  config.momentum = 0.9
  config.b1 = 0.9
  config.b2 = 0.999
  # Type of the accumulator: SGD's momentum, Adam's first moment.
  config.optim_dtype = 'bfloat16'
  # Learning rate after the warm-up.
  config.base_lr = 0.03
  # 'cosine', 'linear' or 'constant'.
  config.decay_type = 'cosine'
  # Updates, or passes over the data, in which the learning rate rises (give one).
  # None for both: 500 updates, or a tenth of the run if that is less.
  config.warmup_steps = placeholder(int)
  config.warmup_epochs = placeholder(float)
  # Decoupled, on kernels only, multiplied by the learning rate.
  config.weight_decay = 0.0
  # Factors on the learning rate, as ordered (regex, factor) pairs; the first one
  # found in a parameter's path decides, 0 freezes. A linear probe:
  # (('head/', 1.0), ('', 0.0)); layer-wise decay: see layer_wise_decay below.
  config.lr_multipliers = ()
  # Largest global norm of the gradient (0: no limit).
  config.grad_norm_clip = 1.0
  # Micro-batches that a batch is computed in, to save memory; the result is the
  # same but for dropout's noise.
  config.accum_steps = 1
  # Decay of the exponential average of the weights (0: none is kept), which rises
  # to this value: (1 + t) / (10 + t) after t updates at most. Where an average is
  # kept, it is what evaluation and prediction use.
  config.ema_decay = 0.0

  # --- Devices ---
  # Size of each axis of the mesh; -1 is the rest. 'data' and 'fsdp' split the
  # batch, 'fsdp' splits the parameters and the optimiser's state too, 'model'
  # splits heads and hidden layers: see vit_jax/scale/sharding.py.
  config.mesh = ml_collections.ConfigDict({'data': -1, 'fsdp': 1, 'model': 1})
  # Ordered (regex, spec) pairs, which go before what follows from the mesh.
  config.sharding_rules = ()

  # --- Log, evaluation, checkpoints ---
  # What is evaluated: (name, split) or (name, split, data set) each; the name ends
  # the names of the metrics. Empty: (('test', pp.test),).
  config.evals = ()
  # Steps between two lines of progress, evaluations and checkpoints; 0 leaves
  # only those at the end of the run.
  config.progress_every = 10
  config.eval_every = 100
  config.checkpoint_every = 1_000
  # How many of the newest checkpoints stay; the best one, by `best_metric`,
  # stays too.
  config.keep_checkpoints = 2
  config.best_metric = 'accuracy_test'
  # Steps to record with the profiler, shown by TensorBoard (0: none).
  config.profile_steps = 0
  return config


def set_dataset(config, dataset):
  """Sets the data set, and its splits where they are known."""
  config.dataset = dataset
  known = SPLITS.get(dataset) if isinstance(dataset, str) else None
  config.pp.train, config.pp.test = known or ('train', 'test')
  return config


def with_dataset(
  config: ml_collections.ConfigDict, dataset: str
) -> ml_collections.ConfigDict:
  """Returns a copy, set for fine-tuning on a data set (table 4, B.1.1).

  Sets the splits, the size of the images, and the numbers of updates.

  Args:
    config: what `get_config` returns.
    dataset: a key of DATASET_PRESETS, any other TFDS name, or a folder.
  """
  config = copy.deepcopy(config)
  config.dataset = dataset
  preset = DATASET_PRESETS.get(dataset) or _preset(dataset, _OTHER_STEPS)
  config.update(copy.deepcopy(preset))
  return config


def set_augmentation(config, name: str):
  """Sets RandAugment and mixup to one of the published settings.

  Args:
    config: changed in place: `pp.randaugment` and `task_options.mixup`.
    name: a key of AUGREG.

  Returns:
    config.

  Raises:
    ValueError: if there is no such setting.
  """
  if name not in AUGREG:
    raise ValueError(
      f"augmentation '{name}' is unknown: use one of {', '.join(AUGREG)}"
    )
  layers, magnitude, mixup = AUGREG[name]
  config.pp.randaugment = (layers, magnitude) if layers else ()
  with config.unlocked():
    if config.get('task_options') is None:
      config.task_options = ml_collections.ConfigDict()
    config.task_options.mixup = mixup
  return config


def layer_wise_decay(
  config: ml_collections.ConfigDict, factor: float
) -> ml_collections.ConfigDict:
  """Makes the learning rate of a Vision Transformer fall from layer to layer.

  The head has the whole rate, the last layer and the norm behind it `factor` times
  that, the layer before `factor` squared, and so on down to the embeddings
  (arXiv 2106.08254, section 3.2, and others).

  Args:
    config: with its model; `lr_multipliers` is set.
    factor: above 0 and below 1, .75 for one.
  """
  layers = config.model.transformer.num_layers
  rules = [('^(head|pre_logits)/', 1.0), ('encoder_norm/', factor)]
  rules += [
    (f'encoderblock_{i}/', factor ** (layers - i)) for i in range(layers)
  ]
  config.lr_multipliers = (*rules, ('', factor ** (layers + 1)))
  return config


def flatten(config, prefix: tuple[str, ...] = ('config',)) -> Iterable[tuple]:
  """Yields ('config.pp.crop', 384) and the like, for sweeps."""
  for key, value in config.items():
    if isinstance(value, dict | ml_collections.ConfigDict):
      yield from flatten(value, (*prefix, key))
    else:
      yield '.'.join((*prefix, key)), value
