"""Times sampling images from an iGPT."""

import argparse
from collections.abc import Callable
import functools
import statistics
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from vit_jax import models, models_igpt

MODEL = 'iGPT-S'
STEPS = 8  # Pixels sampled per call.


def _draw_pixels(model: Any, params: Any, batch: int) -> Callable:
  """Returns a function that samples STEPS pixels from a given position on."""
  keys = jax.random.split(jax.random.key(0), batch)
  color = np.zeros(batch, np.int32)

  @jax.jit
  def run(params: Any, cache: Any, start: int) -> jax.Array:
    positions = start + jax.numpy.arange(STEPS)
    draw_next = models_igpt.next_pixel(model, params, keys)
    return models_igpt.draw_pixels(draw_next, color, cache, positions)[0]

  cache = model.empty_cache(batch)
  return lambda start: run(params, cache, start).block_until_ready()


def _draw_uncached(model: Any, params: Any, batch: int) -> Callable:
  """Returns a function that samples one pixel, without cached keys and values."""
  keys = jax.random.split(jax.random.key(0), batch)

  @functools.partial(jax.jit, static_argnums=1)
  def run(params: Any, start: int) -> jax.Array:
    part = model.clone(num_positions=start + 1)
    table = params['position_embedding'][: start + 1]
    params = {**params, 'position_embedding': table}
    colors = jax.numpy.zeros((batch, start + 1), 'int32')
    logits = part.apply({'params': params}, colors)
    return models_igpt.draw(keys, logits[:, -1], 1.0)

  return lambda start: run(params, start).block_until_ready()


def _speeds(times: list[list[float]], pixels: int) -> list[float]:
  """Returns the pixels per second of each turn, the mean over positions."""
  return [pixels / statistics.mean(turn) for turn in zip(*times)]


def rows(args: argparse.Namespace) -> list[dict]:
  """Times sampling pixels at three positions of an image; reports their mean."""
  model = models.get_model(MODEL)
  pixels = model.num_positions
  colors = np.zeros((1, pixels), np.int32)
  params = jax.jit(model.init)(jax.random.key(0), colors)['params']
  make = (model, params, args.batch)
  places = [pixels // 6, pixels // 2, pixels * 5 // 6]
  programs = _draw_pixels(*make), _draw_uncached(*make)
  functions = []
  for program in programs:
    for place in places:
      functions.append(functools.partial(program, place))
  times = timing.measure(*functions, repeats=args.repeats)
  cached = _speeds(times[: len(places)], args.batch * STEPS)
  uncached = _speeds(times[len(places) :], args.batch)
  name = f'samples, {MODEL}, with cached keys and values'
  return timing.compared(name, cached, 'without', uncached, 'pixel/s')
