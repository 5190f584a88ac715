"""Weight files that are broken or malicious, from a seed."""

import io
import json
import pathlib
import pickle
import struct
import zipfile

import numpy as np
import torch

from tests import broken


class Bomb:
  """Creates a file when it is unpickled."""

  def __init__(self, marker):
    self.marker = marker

  def __reduce__(self):
    return (pathlib.Path.touch, (self.marker,))


def write_npz(path, members, compression=zipfile.ZIP_STORED):
  """Writes an archive of (name, bytes or array) pairs."""
  with zipfile.ZipFile(path, 'w', compression) as archive:
    for name, content in members:
      if isinstance(content, np.ndarray):
        buffer = io.BytesIO()
        np.save(buffer, content)
        content = buffer.getvalue()
      archive.writestr(name, content)
  return str(path)


def npy(header, data=b''):
  """Returns an .npy file with an arbitrary header."""
  text = header.encode().ljust(117) + b'\n'
  return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text)) + text + data


def claim(shape, descr='<f4'):
  return npy(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}")


def broken_state(rng, state, marker):
  """Replaces some tensors of a state dict with other objects, or with code to run."""
  whole, state = state, dict(state)
  for _ in range(rng.choice((1, 3))):
    name = rng.choice(list(whole))
    value = whole[name]
    state[rng.choice((name, name, 'x', 7, ''))] = rng.choice((
      value[..., :1], value.reshape(-1), value.double(), value.bool(),
      torch.tensor(0.5), torch.zeros(0), torch.ones(1).expand(2**rng.randrange(20)),
      value.detach().to_sparse(), value.to('meta'), {}, None, 'x', Bomb(marker),
    ))  # fmt: skip
  wrap = rng.choice(('', '', 'model', 'state_dict'))
  buffer = io.BytesIO()
  content = {wrap: state} if wrap else state
  if rng.random() < 0.2:
    return pickle.dumps(content if rng.random() < 0.5 else Bomb(marker))
  torch.save(content, buffer, _use_new_zipfile_serialization=rng.random() < 0.5)
  return buffer.getvalue()


def broken_files(rng, good, marker):
  """Yields the path of each file, relative to `good`, and its broken contents."""
  names = (
    'a.npz', 'b.npz', 'timm/model.safetensors', 'timm/config.json',
    'hf/model.safetensors', 'hf/config.json', 'hf/new.bin', 'hf/old.bin',
  )  # fmt: skip
  whole = {name: (good / name).read_bytes() for name in names}
  state = torch.load(good / 'hf' / 'new.bin', weights_only=True)
  while True:
    for name, data in whole.items():
      if name.endswith(('.npz', '.safetensors')) or rng.random() < 0.5:
        yield name, broken.of_bytes(rng, data)
      elif name.endswith('.bin'):
        yield name, broken_state(rng, state, marker)
      else:
        text = json.dumps(broken.of_json(rng, json.loads(data)))
        yield name, text.encode()
