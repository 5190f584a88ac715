r"""Times the steps that users wait for, and writes a table and JSON.

  python -m vit_jax.benchmark --json=/tmp/benchmark.json

Sections (choose with --only): import, start, train, inference, pipeline,
weights, detection, sampling. Each section is warmed up, repeated, and reported as
median, minimum and maximum. A step's share of the peak is relative to the speed
of a large float32 matrix product, measured in the same run. Programs that are
compared take turns.
"""

import argparse
from collections.abc import Callable
import contextlib
import functools
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from vit_jax import checkpoint
from vit_jax import cli
from vit_jax import models
from vit_jax import models_igpt
from vit_jax.configs import common
from vit_jax.configs import models as model_configs
from vit_jax.scale import flops
from vit_jax.scale import sharding

PIPELINE_BATCH = 64
PIPELINE_BATCHES = 20
PRODUCT_SIZE = 2048
WEIGHTS_MODEL = 'ViT-B_16'
DETECTOR, DETECTOR_SIZE, DETECTOR_BATCH = 'DETR-R50', 640, 2
OBJECTS = 7  # Of an image of COCO, in the mean; at most 63.
MATCHINGS = (6, 64, 63, 100)  # Layers, images, targets, predictions.
SAMPLING_MODEL = 'iGPT-S'
SAMPLING_STEPS = 8
SECTIONS = (
  'import', 'start', 'train', 'inference', 'pipeline', 'weights', 'detection',
  'sampling',
)  # fmt: skip


def measure(*functions: Callable, repeats: int) -> list[list[float]]:
  """Times functions in turn, after one unmeasured call of each.

  Args:
    *functions: functions to time. If one returns a float, that is its time.
    repeats: number of measured calls.

  Returns:
    Seconds, a list of `repeats` numbers for each function.
  """
  seconds = [[] for _ in functions]
  for turn in range(repeats + 1):
    for times, function in zip(seconds, functions):
      start = time.perf_counter()
      own = function()
      if turn:
        elapsed = time.perf_counter() - start
        times.append(own if isinstance(own, float) else elapsed)
  return seconds


def row(name: str, values: list[float], unit: str, **extra) -> dict:
  """Makes one row of the table."""
  return {
    'name': name,
    'median': statistics.median(values),
    'min': min(values),
    'max': max(values),
    'unit': unit,
    **extra,
  }


def matrix_product() -> Callable:
  """Returns a function that times the product of two float32 matrices."""
  a = jax.random.normal(jax.random.key(0), (PRODUCT_SIZE, PRODUCT_SIZE))
  multiply = jax.jit(
    lambda a: jax.lax.dot(a, a, precision=jax.lax.Precision.HIGHEST)
  )

  def run():
    # The previous program has filled the caches with its own data. Therefore
    # the first call does not count, and the fastest of the next calls does.
    multiply(a).block_until_ready()
    seconds = []
    for _ in range(4):
      start = time.perf_counter()
      multiply(a).block_until_ready()
      seconds.append(time.perf_counter() - start)
    return min(seconds)

  return run


def benchmark_import(args) -> list[dict]:
  """Times `import vit_jax.models`, and the two packages that it needs."""

  def run(statement):
    return lambda: subprocess.run([sys.executable, '-c', statement], check=True)

  ours, theirs = measure(
    run('import vit_jax.models'),
    run('import flax.linen, optax'),
    repeats=args.repeats,
  )
  ratios = [a / b for a, b in zip(ours, theirs)]
  return [
    row('import vit_jax.models', ours, 's'),
    row('import flax.linen, optax', theirs, 's'),
    row('ratio', ratios, 'x'),
  ]


def benchmark_start(args) -> list[dict]:
  """Times the digits run from the start of the process to its first step."""

  def run():
    with tempfile.TemporaryDirectory() as workdir:
      process = subprocess.Popen(
        [
          sys.executable, '-m', 'vit_jax.main', '--config=configs/digits.py',
          f'--workdir={workdir}/run',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )  # fmt: skip
      printed = []
      for line in process.stdout:
        printed.append(line)
        if line.startswith('Compiled in'):
          break
      process.kill()
      process.communicate()
      if not printed or not printed[-1].startswith('Compiled in'):
        raise RuntimeError('the digits did not start:\n' + ''.join(printed))

  [times] = measure(run, repeats=args.repeats)
  return [row('digits: start to first step', times, 's')]


def _make_program(model, image_size: int, mesh, task: str, num_classes: int):
  """Returns the program that trains a model with Adam.

  Args:
    model: config of the model.
    image_size: height and width of the images.
    mesh: the devices.
    task: name of the task.
    num_classes: number of classes.
  """
  from vit_jax import train as train_lib
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model, config.task = model, task
  config.pp.crop = image_size
  config.update(
    optimizer='adam', optim_dtype='float32', total_steps=10, warmup_steps=1,
    weight_decay=0.1,
  )  # fmt: skip
  config = run_config.complete(config)
  metadata = run_config.get_task(task).planned_metadata(config, num_classes)
  return train_lib.make_program(config, metadata, mesh)


def _random_batch(program, size: int) -> dict:
  """Returns a batch of random numbers from 0 to 1."""
  rng = np.random.RandomState(0)
  return {
    name: rng.uniform(size=spec.shape).astype(spec.dtype)
    for name, spec in program.task.batch_spec(size).items()
  }


def _training_step(program, batch) -> Callable:
  """Returns a function that makes one update."""
  holder = [program.create_state({})]
  update = jax.jit(program.update, donate_argnums=0)

  def step():
    holder[0], metrics = update(holder[0], batch)
    jax.block_until_ready(metrics)

  return step


def _model_step(args, mesh, train: bool, attention: str | None) -> Callable:
  """Returns a function that makes one update of a model, or computes logits.

  Args:
    args: arguments of the command.
    mesh: the devices.
    train: whether to make an update.
    attention: implementation of attention; None for a model without.
  """
  model = model_configs.get_config(args.model)
  model.dtype = args.dtype
  if attention:
    model.transformer.attention = attention
  program = _make_program(model, args.image_size, mesh, 'classify', 1000)
  batch = _random_batch(program, args.batch)
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  if train:
    return _training_step(program, batch)
  state = program.create_state({})
  predict = jax.jit(program.task.outputs)
  return lambda: predict(state.params, {}, batch).block_until_ready()


def _model_rows(args, train: bool) -> list[dict]:
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, args.batch)
  attends = 'transformer' in model_configs.get_config(args.model)
  kinds = ('default', 'xla') if attends else (None,)
  steps = [_model_step(args, mesh, train, kind) for kind in kinds]
  with jax.set_mesh(mesh):
    ours, *others, products = measure(
      *steps, matrix_product(), repeats=args.repeats
    )
  model = models.get_model(args.model, num_classes=1000)
  work = args.batch * flops.forward_flops(model, 2 * (args.image_size,))
  work = flops.training_flops(work) if train else work
  peak = [2 * PRODUCT_SIZE**3 / t * mesh.size for t in products]
  kind = 'training step' if train else 'inference'
  label = f'{kind}, {args.model}, batch {args.batch}, {args.dtype}'
  share = statistics.median(work / t for t in ours) / statistics.median(peak)
  return [
    row(label, [args.batch / t for t in ours], 'img/s', share_of_peak=share),
    *(
      row('ratio to attention=xla', [b / a for a, b in zip(ours, xla)], 'x')
      for xla in others
    ),
    row(
      'matrix product, float32, beside it',
      [p / 1e9 for p in peak],
      'GFLOP/s',
    ),
  ]


def benchmark_train(args) -> list[dict]:
  """Times the training step of the trainer, with Adam."""
  return _model_rows(args, train=True)


def benchmark_inference(args) -> list[dict]:
  """Times the logits of a batch of images."""
  return _model_rows(args, train=False)


def photographs(folder: pathlib.Path, count: int = 64):
  """Writes JPEGs of 500x375 pixels, cropped from scikit-learn's photographs."""
  from PIL import Image
  from sklearn import datasets

  rng = np.random.RandomState(0)
  images = datasets.load_sample_images().images
  for split in ('train', 'test'):
    for i in range(count):
      image = images[i % len(images)]
      y = rng.randint(image.shape[0] - 374)
      x = rng.randint(image.shape[1] - 499)
      path = folder / split / f'class{i % len(images)}' / f'{i}.jpg'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(image[y : y + 375, x : x + 500]).save(path, quality=90)


def plain_pipeline(folder: pathlib.Path, batch: int):
  """Returns the usual pipeline, for comparison: decodes whole images, crops."""
  import tensorflow as tf

  def augment(path):
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      tf.shape(image),
      tf.zeros([0, 0, 4], tf.float32),
      area_range=(0.05, 1.0),
      min_object_covered=0,
      use_image_if_no_bounding_boxes=True,
    )
    image = tf.slice(image, begin, size)
    image = tf.image.resize(image, (224, 224))
    image = tf.image.random_flip_left_right(image)
    return (image - 127.5) / 127.5

  files = tf.data.Dataset.list_files(f'{folder}/train/*/*').cache().repeat()
  data = files.shuffle(1000).map(augment, tf.data.AUTOTUNE)
  return data.batch(batch).prefetch(1)


def time_pipeline(name: str, folder: str):
  """Prints the seconds that 20 batches of 'ours' or 'plain' take."""
  cli.load_tensorflow()
  from vit_jax import input_pipeline
  from vit_jax.data import sources

  if name == 'ours':
    config = common.set_dataset(common.get_config(), folder)
    config.batch = PIPELINE_BATCH
    source = sources.open_split(config, 'train')
    example = input_pipeline.labelled_example(config, len(source.class_names))
    rows = np.arange(PIPELINE_BATCH)
    data = input_pipeline.train_dataset(config, source, example, rows)
  else:
    data = plain_pipeline(pathlib.Path(folder), PIPELINE_BATCH)
  iterator = data.as_numpy_iterator()
  for _ in range(5):
    next(iterator)
  start = time.perf_counter()
  for _ in range(PIPELINE_BATCHES):
    next(iterator)
  print(time.perf_counter() - start)


def benchmark_pipeline(args) -> list[dict]:
  """Times training crops of 224 px from 500x375 JPEGs of photographs."""

  def run(name, folder):
    # In separate processes, as in a training: two pipelines in one process slow
    # each other down.
    code = f'from vit_jax import benchmark as b; b.time_pipeline({name!r}, {folder!r})'
    command = [sys.executable, '-c', code]
    return lambda: float(subprocess.check_output(command, text=True))

  with tempfile.TemporaryDirectory() as folder:
    photographs(pathlib.Path(folder))
    ours, plain = measure(
      run('ours', folder), run('plain', folder), repeats=args.repeats
    )
  images = PIPELINE_BATCH * PIPELINE_BATCHES
  speeds = [[images / t for t in times] for times in (ours, plain)]
  ratios = [a / b for a, b in zip(*speeds)]
  return [
    row('input pipeline, 500x375 JPEG -> 224 px', speeds[0], 'img/s'),
    row('plain pipeline beside it', speeds[1], 'img/s'),
    row('ratio', ratios, 'x'),
  ]


def benchmark_weights(args) -> list[dict]:
  """Times loading an .npz into the parameters of a model, with all checks."""
  config = model_configs.get_config(WEIGHTS_MODEL)
  model = models.make_model(config, num_classes=1000)
  shapes = jax.eval_shape(
    lambda: model.init(
      jax.random.key(0), np.zeros((1, 224, 224, 3)), train=False
    )
  )['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.random(x.shape, np.float32), shapes)

  def read():
    with np.load(path) as arrays:
      return [arrays[name] for name in arrays.files]

  def load():
    return checkpoint.load_pretrained(
      pretrained_path=path, init_params=params, model_config=config
    )

  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/weights.npz'
    checkpoint.save(params, path)
    ours, plain = measure(load, read, repeats=args.repeats)
  ratios = [a / b for a, b in zip(ours, plain)]
  return [
    row(f'load_pretrained, {WEIGHTS_MODEL}.npz', ours, 's'),
    row('np.load of all its arrays beside it', plain, 's'),
    row('ratio', ratios, 'x'),
  ]


def _set_losses(task, batch) -> Callable:
  """Returns a function that computes a detector's losses and their gradient."""
  from vit_jax.learning import boxes

  rng = np.random.RandomState(0)
  shape = (
    task.model.num_decoder_layers, len(batch['count']), task.model.num_queries,
  )  # fmt: skip
  logits = rng.randn(*shape, len(task.class_names) + 1).astype(np.float32)
  found = rng.uniform(0.1, 0.5, (*shape, 4)).astype(np.float32)

  def total(logits, found):
    targets = (batch[name] for name in ('class', 'box', 'count'))
    sums = boxes.losses(logits, found, *targets)
    return sum(x.sum() for x in sums.values())

  compute = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
  return lambda: jax.block_until_ready(compute(logits, found))


def matchings() -> dict[str, Callable]:
  """Returns functions that solve the same problems of assignment, by name."""
  import optax
  from scipy import optimize

  from vit_jax.learning import matching

  rng = np.random.RandomState(0)
  cost = rng.randn(*MATCHINGS).astype(np.float32)
  counts = np.full(MATCHINGS[1], MATCHINGS[2], np.int32)

  def callback(cost):
    def solve(cost):
      flat = np.asarray(cost).reshape(-1, *MATCHINGS[2:])
      found = [optimize.linear_sum_assignment(x)[1] for x in flat]
      return np.array(found, np.int32).reshape(MATCHINGS[:3])

    shape = jax.ShapeDtypeStruct(MATCHINGS[:3], np.int32)
    return jax.pure_callback(solve, shape, cost)

  def by_optax(cost):
    targets, chosen = optax.assignment.hungarian_algorithm(cost)
    return chosen[targets.argsort()]

  algorithms = {
    'on the device (matching.match)': lambda x: matching.match(x, counts),
    'SciPy in a host callback': callback,
    'optax.assignment': lambda x: jax.vmap(by_optax)(
      x.reshape(-1, *MATCHINGS[2:])
    ),
  }

  def run(function):
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(cost))

  return {name: run(function) for name, function in algorithms.items()}


def benchmark_detection(args) -> list[dict]:
  """Times DETR's update, its matching and losses, and ways of matching."""
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  model = model_configs.get_config(DETECTOR)
  model.dtype = args.dtype
  program = _make_program(model, DETECTOR_SIZE, mesh, 'detect', 91)
  batch = _random_batch(program, DETECTOR_BATCH)
  batch['count'] = np.full(DETECTOR_BATCH, OBJECTS, np.int32)
  steps, losses = measure(
    _training_step(program, batch),
    _set_losses(program.task, batch),
    repeats=args.repeats,
  )
  label = (
    f'{DETECTOR}, {DETECTOR_SIZE} px, batch {DETECTOR_BATCH}, {args.dtype}'
  )
  shares = [100 * a / b for a, b in zip(losses, steps)]
  ways = matchings()
  times = measure(*ways.values(), repeats=args.repeats)
  return [
    row(f'training step, {label}', steps, 's'),
    row('its matching and losses', [1e3 * t for t in losses], 'ms'),
    row('share of the step', shares, '%'),
    *(
      row(f'matching, {name}', [1e3 * t for t in seconds], 'ms')
      for name, seconds in zip(ways, times)
    ),
  ]


def _draw_pixels(model, params, batch: int) -> Callable:
  """Returns a function that draws SAMPLING_STEPS pixels after a number of them."""
  keys = jax.random.split(jax.random.key(0), batch)
  color = np.zeros(batch, np.int32)

  @jax.jit
  def run(params, cache, start):
    positions = start + jax.numpy.arange(SAMPLING_STEPS)
    draw_next = models_igpt.next_pixel(model, params, keys)
    return models_igpt.draw_pixels(draw_next, color, cache, positions)[0]

  cache = model.empty_cache(batch)
  return lambda start: run(params, cache, start).block_until_ready()


def _draw_uncached(model, params, batch: int) -> Callable:
  """Returns a function that draws a pixel after a number of them, uncached."""
  keys = jax.random.split(jax.random.key(0), batch)

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, start):
    part = model.clone(num_positions=start + 1)
    table = params['position_embedding'][: start + 1]
    params = {**params, 'position_embedding': table}
    colors = jax.numpy.zeros((batch, start + 1), 'int32')
    logits = part.apply({'params': params}, colors)
    return models_igpt.draw(keys, logits[:, -1], 1.0)

  return lambda start: run(params, start).block_until_ready()


def _draw_hugging_face(model, batch: int) -> Callable:
  """Returns a function like `_draw_pixels` for Hugging Face's `generate`."""
  import torch
  import transformers

  theirs = transformers.ImageGPTForCausalImageModeling(
    transformers.ImageGPTConfig(
      vocab_size=model.num_colors + 1,
      n_positions=model.num_positions,
      n_embd=model.hidden_size,
      n_layer=model.num_layers,
      n_head=model.num_heads,
    )
  ).eval()
  pasts = {}

  def run(start):
    colors = torch.zeros((batch, start + 1), dtype=torch.long)
    with torch.no_grad():
      if start not in pasts:
        seen = theirs(colors[:, :start], use_cache=True)
        pasts[start] = seen.past_key_values
      begin = time.perf_counter()
      theirs.generate(
        colors,
        past_key_values=pasts[start],
        max_new_tokens=SAMPLING_STEPS,
        do_sample=True,
        use_cache=True,
      )
      seconds = time.perf_counter() - begin
    pasts[start].crop(start - pasts[start].get_seq_length())
    return seconds

  return run


def benchmark_sampling(args) -> list[dict]:
  """Times the drawing of images, with and without cached keys and values.

  Some pixels are drawn at three places, a sixth, a half and five sixths of an
  image, and their mean time is reported: a sample takes 1,024 times as long.
  """
  model = models.get_model(SAMPLING_MODEL)
  pixels = model.num_positions
  colors = np.zeros((1, pixels), np.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), colors)['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), shapes
  )
  params = jax.device_put(params)
  make = (model, params, args.batch)
  programs = [(_draw_pixels(*make), SAMPLING_STEPS), (_draw_uncached(*make), 1)]
  names = ['with cached keys and values', 'without, beside it']
  try:
    programs.append((_draw_hugging_face(model, args.batch), SAMPLING_STEPS))
    names.append("Hugging Face's generate beside it")
  except ImportError:
    print("Not beside Hugging Face's: torch or transformers cannot be imported")
  places = [pixels // 6, pixels // 2, pixels * 5 // 6]
  times = measure(
    *(functools.partial(run, at) for run, _ in programs for at in places),
    repeats=args.repeats,
  )
  speeds = []
  for i, (_, steps) in enumerate(programs):
    turns = zip(*times[i * len(places) : (i + 1) * len(places)])
    speeds.append(
      [args.batch * steps / statistics.mean(turn) for turn in turns]
    )
  ours, *others = speeds
  rows = [row(f'samples, {SAMPLING_MODEL}, {names[0]}', ours, 'pixel/s')]
  for name, other in zip(names[1:], others):
    rows += [
      row(name, other, 'pixel/s'),
      row('ratio', [a / b for a, b in zip(ours, other)], 'x'),
    ]
  return rows


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of this command."""
  parser = cli.parser('vit_jax.benchmark', __doc__)
  parser.add_argument('--only', nargs='+', choices=SECTIONS, default=SECTIONS)
  parser.add_argument('--json', type=pathlib.Path, help='file for the results')
  parser.add_argument(
    '--repeats', type=int, default=5, help='measured calls (5)'
  )
  parser.add_argument('--model', default='s16', help='model to step (s16)')
  parser.add_argument(
    '--batch', type=int, default=8, help='images per step (8)'
  )
  parser.add_argument('--image_size', type=int, default=224)
  parser.add_argument(
    '--dtype', default='float32', choices=('float32', 'bfloat16')
  )
  return parser


def main() -> None:
  """Runs the sections of the command line; prints and writes the results."""
  args = make_parser().parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  if args.repeats < 1:
    raise ValueError(f'repeats={args.repeats} must be at least 1 (--repeats)')
  device = jax.devices()[0]
  machine = {
    'device': device.device_kind,
    'platform': device.platform,
    'num_devices': jax.device_count(),
    'processor': platform.processor() or platform.machine(),
    'python': platform.python_version(),
    'jax': jax.__version__,
  }
  print(', '.join(f'{key} {value}' for key, value in machine.items()))
  results = {}
  with contextlib.ExitStack() as stack:
    if args.json:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(args.json.open('w'))
    for section in args.only:
      results[section] = globals()[f'benchmark_{section}'](args)
      for line in results[section]:
        share = line.get('share_of_peak')
        print(
          f'{line["name"]:<45} {line["median"]:>9.2f} {line["unit"]:<8}'
          f' ({line["min"]:.2f} to {line["max"]:.2f})'
          + (f'  {100 * share:.0f} % of peak' if share else ''),
          flush=True,
        )
    if args.json:
      json.dump({'machine': machine, 'results': results}, file, indent=1)


if __name__ == '__main__':
  cli.run(main)
