"""Corrupts files at random, from a seed."""

import json

# Wrong values to put into a JSON file or a header.
ODD = (
  None, True, -1, 0, 1e999, 10**400, 'x', '', '\ud800', [], [[]], {}, {'a': {}},
  [0, 0, 0], {'0': 0}, -(2**63), 0.5,
)  # fmt: skip


def of_bytes(rng, data):
  """Flips, cuts, repeats or overwrites part of a file."""
  data = bytearray(data)
  for _ in range(rng.choice((1, 1, 3, 20))):
    start = rng.randrange(len(data) + 1)
    # Headers and directories are at both ends.
    start = rng.choice((start, min(start, rng.randrange(400)), -rng.randrange(1, 400)))
    size = rng.choice((1, 1, 4, 100))
    kind = rng.randrange(5)
    part = data[start:][:size]
    if kind == 0:
      part = bytes(byte ^ (1 << rng.randrange(8)) for byte in part)
    elif kind == 1:
      part = rng.choice((b'\0', b'\xff', b'9')) * len(part)
    elif kind == 2:
      part = b''
    elif kind == 3:
      part = part + part
    elif len(data) > 20:
      return bytes(data[: rng.randrange(len(data))])
    end = len(data) + start if start < 0 else start
    data[end : end + size] = part
    data = data or bytearray(b'x')
  return bytes(data)


def of_json(rng, tree):
  """Replaces part of a tree with a wrong value."""
  tree = json.loads(json.dumps(tree))
  node = tree
  while True:
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
      return rng.choice(ODD)
    key = rng.choice(keys)
    if not isinstance(node[key], (dict, list)) or rng.random() < 0.4:
      node[key] = rng.choice(ODD)
      return tree
    node = node[key]
