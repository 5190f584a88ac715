"""Times functions in turn, and makes rows of a table of the times."""

from collections.abc import Callable
import statistics
import time

import jax

PRODUCT_SIZE = 2048
# Seconds of our steps in a turn on CPUs, where a program is slow right after another one.
TURN_SECONDS = 2.0


def measure(*functions: Callable, repeats: int) -> list[list[float]]:
  """Times functions in turn, after one unmeasured call of each.

  Returns a list of `repeats` times in seconds for each function. If a function returns
  a float, that is its time.
  """
  seconds = [[] for _ in functions]
  for turn in range(repeats + 1):
    for times, function in zip(seconds, functions):
      start = time.perf_counter()
      reported = function()
      if turn:
        elapsed = time.perf_counter() - start
        times.append(reported if isinstance(reported, float) else elapsed)
  return seconds


def row(name: str, values: list[float], unit: str) -> dict:
  """Makes one row of the table."""
  median = statistics.median(values)
  ends = {'min': min(values), 'max': max(values)}
  return {'name': name, 'median': median, **ends, 'unit': unit}


def compared(
  name: str,
  values: list[float],
  reference: str,
  reference_values: list[float],
  unit: str,
) -> list[dict]:
  """Makes rows of two programs that took turns, and of their ratio."""
  ratios = [a / b for a, b in zip(values, reference_values)]
  return [
    row(name, values, unit),
    row(reference, reference_values, unit),
    row('ratio', ratios, 'x'),
  ]


def matrix_product(dtype: str, size: int) -> Callable:
  """Returns a function that times the product of two matrices [size, size]."""
  a = jax.random.normal(jax.random.key(0), (size, size), dtype)
  precision = jax.lax.Precision.HIGHEST if dtype == 'float32' else None
  multiply = jax.jit(lambda a: jax.lax.dot(a, a, precision=precision))

  def run() -> float:
    # The first call finds the caches filled by the program before it.
    call = lambda: multiply(a).block_until_ready()
    return min(measure(call, repeats=4)[0])

  return run
