r"""Estimates the cost of global, local and axial attention by image size.

  python -m benchmarks.patterns --json=/tmp/patterns.json \
    --out=docs/pictures/attention_patterns.png

Of the 12 layers of ViT-B/16, per image: the FLOPs of a forward pass, and its time as the
compiler estimates it for a core of TPU v3, in bfloat16 (see docs/plan.md), from one
layer. No TPU is needed, only '.[plan]', and about 3 minutes of processor time. What the
JSON file has is not computed again.
"""

import json
import pathlib
import sys
import typing
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import console
from vit_jax.commands import flags
from vit_jax.configs import models as model_configs
from vit_jax.figures import colors, drawing
from vit_jax.layers import encoder
from vit_jax.planning import flops, topology

PATTERNS = typing.get_args(model_configs.AttentionPattern)
SIZES = (224, 384, 512, 768, 1024)
PATCH = 16
_TOKENS = 8192  # At most, per batch.


def layer_costs(pattern: str, size: int, device: Any) -> tuple[float, float]:
  """Returns FLOPs and estimated seconds of a layer's forward pass, per image."""
  config = model_configs.get_config('ViT-B_16')
  side = size // PATCH
  images = _TOKENS // side**2
  transformer = model_configs.Transformer(
    **{**config.transformer, 'num_layers': 1},
    position_embedding='none',
    attention_pattern=pattern,
  )
  layer = encoder.Encoder(transformer, dtype=jnp.bfloat16)
  apply = lambda variables, x: layer.apply(variables, x, train=False, grid=(side, side))
  init = lambda x: layer.init(jax.random.key(0), x, train=False, grid=(side, side))
  place = jax.sharding.SingleDeviceSharding(device)
  x = jax.ShapeDtypeStruct((images, side**2, config.hidden_size), jnp.bfloat16)
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    (jax.eval_shape(init, x), x),
  )
  traced = jax.jit(apply).trace(*args)
  with topology.quiet_compiler():
    cost = traced.lower().compile().cost_analysis()
  return flops.count_flops(traced.jaxpr) / images, cost['optimal_seconds'] / images


def pairs(side: int) -> int:
  """Returns how many pairs of patches attend in local attention."""
  reach = min(model_configs.Transformer.attention_window // 2, side - 1)
  pairs_on_axis = side
  for distance in range(1, reach + 1):
    pairs_on_axis += 2 * (side - distance)
  return pairs_on_axis**2


@drawing.styled
def draw(rows: list[dict]) -> Any:
  """Draws FLOPs and times by image size, a line for each pattern."""
  fig = drawing.new_figure(4.2, 'Layers of ViT-B/16, forward, one image', 10.0)
  flops_axes, time_axes = fig.subplots(1, 2)
  config = model_configs.get_config('ViT-B_16')
  for axes, key in ((flops_axes, 'gflops'), (time_axes, 'ms')):
    for i, pattern in enumerate(PATTERNS):
      pattern_rows = [row for row in rows if row['pattern'] == pattern]
      color = colors.of_line(i)
      line = ('o-', 's--', '^-')[i]
      axes.plot(SIZES, [row[key] for row in pattern_rows], line, c=color, label=pattern)
      if (pattern, key) == ('local', 'gflops'):
        unseen = [(n // PATCH) ** 4 - pairs(n // PATCH) for n in SIZES]
        gflops_per_token = 4e-9 * config.hidden_size * config.transformer.num_layers
        least = [
          row[key] - gflops_per_token * n for row, n in zip(pattern_rows, unseen)
        ]
        axes.plot(SIZES, least, ':', c=color, label='local, pairs that attend')
    axes.set(xlabel='image size, px', yscale='log')
    axes.set_xticks(SIZES, SIZES)
    axes.grid(alpha=0.25)
  flops_axes.set(ylabel='GFLOPs')
  time_axes.set(ylabel='ms, TPU v3 core (estimate)')
  flops_axes.legend()
  return fig


def main() -> None:
  """Computes the costs that --json lacks, prints them and draws the figure."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.patterns'
  parser.add_argument('--json', metavar='FILE', help='file for the results')
  parser.add_argument('--out', metavar='FILE', help='file for the figure, a PNG')
  args = parser.parse_args(sys.argv[1:])
  for flag in ('json', 'out'):
    flags.check_output(flag, getattr(args, flag))
  device = topology.get_topology('v3:2x2')[0]
  file = args.json and pathlib.Path(args.json)
  rows = json.loads(file.read_text()) if file and file.exists() else []
  measured = {(row['pattern'], row['size']) for row in rows}
  layers = model_configs.get_config('ViT-B_16').transformer.num_layers
  for size in SIZES:
    for pattern in PATTERNS:
      if (pattern, size) not in measured:
        count, seconds = (layers * cost for cost in layer_costs(pattern, size, device))
        costs = {'gflops': 1e-9 * count, 'ms': 1e3 * seconds}
        rows.append({'pattern': pattern, 'size': size, **costs})
        print(
          '{pattern:<7} {size:>5} px {gflops:8.1f} GFLOPs {ms:7.2f} ms'.format(
            **rows[-1]
          ),
          flush=True,
        )
        if file:
          file.write_text(json.dumps(rows, indent=1))
  if args.out:
    draw(rows, path=args.out)


if __name__ == '__main__':
  console.quiet()
  main()
