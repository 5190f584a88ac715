"""Times updates and logits of timm's models, in a separate process.

JAX and PyTorch bring different versions of NVIDIA's libraries. This process reads
a line of JSON with the arguments of `make_step` and answers with the cost of the
first call; then, for each line with a number of calls, with the seconds they took.
"""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import json
import subprocess
import sys
import time
from typing import Any, TextIO

import ml_collections

from vit_jax.configs import models as model_configs

COMMAND = [sys.executable, '-m', 'benchmarks.timm_steps']


class TimmProcess:
  """The process; takes the arguments of `make_step`.

  `first` is the cost of the first call: `seconds` with compilation, and `peak_bytes`
  of memory on a GPU. Raises OSError if the process ends.
  """

  def __init__(self, **kwargs: Any) -> None:
    self._process = subprocess.Popen(
      COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.first = self._ask(kwargs)

  def _ask(self, question: Any) -> Any:
    with contextlib.suppress(BrokenPipeError):
      print(json.dumps(question), file=self._process.stdin, flush=True)
    answer = self._process.stdout.readline()
    if not answer:
      raise OSError(
        f'the process that runs timm ended (status {self._process.wait()}); its '
        'message is above'
      )
    return json.loads(answer)

  def __call__(self, count: int) -> float:
    """Makes `count` steps; returns the seconds that they took."""
    return self._ask(count)

  def close(self) -> None:
    """Ends the process, which frees its memory on the device."""
    self._process.kill()
    self._process.communicate()


def arguments(model: ml_collections.ConfigDict, channels: int) -> dict[str, Any]:
  """Returns the arguments of timm's VisionTransformer that match a config.

  Raises ValueError if timm's class cannot represent the model.
  """
  plain = model_configs.get_config('b16')
  other = [name for name in model if name not in plain and name != 'dtype']
  if model_configs.kind_of(model) == 'vit':
    for part in ('patches', 'transformer'):
      other += [f'{part}.{name}' for name in model[part] if name not in plain[part]]
    for name in ('classifier', 'representation_size'):
      other += [name] if model[name] != plain[name] else []
  if other:
    raise ValueError(
      f"timm's plain Vision Transformers lack {', '.join(other)} of the model "
      f"'{model.model_name}': use one without, such as b16 (--model, --config)"
    )
  return dict(
    patch_size=model.patches.size,
    in_chans=channels,
    num_classes=1000,
    embed_dim=model.hidden_size,
    depth=model.transformer.num_layers,
    num_heads=model.transformer.num_heads,
    mlp_ratio=model.transformer.mlp_dim / model.hidden_size,
  )


def make_step(
  model: Mapping[str, Any],
  batch: int,
  image_size: int,
  dtype: str,
  train: bool,
  compiled: bool,
) -> Callable[[], Any]:
  """Returns a function that makes an update by fused AdamW, or the logits.

  It does not wait for the device. 'bfloat16' is by torch.autocast.
  """
  from timm.models import vision_transformer
  import torch

  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  torch.set_float32_matmul_precision('high')
  module = vision_transformer.VisionTransformer(img_size=image_size, **model).to(device)
  run = torch.compile(module) if compiled else module
  shape = batch, model['in_chans'], image_size, image_size
  images = torch.randn(shape, device=device)
  if dtype == 'float32':
    types = contextlib.nullcontext
  else:
    types = lambda: torch.autocast(device, torch.bfloat16)
  if not train:
    module.eval()

    @torch.inference_mode()
    def logits() -> Any:
      with types():
        run(images)

    return logits

  labels = torch.randint(1000, (batch,), device=device)
  optimizer = torch.optim.AdamW(
    module.parameters(), lr=1e-3, weight_decay=0.1, fused=True
  )

  def update() -> None:
    with types():
      loss = torch.nn.functional.cross_entropy(run(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

  return update


def main(requests: Iterable[str], answers: TextIO) -> None:
  """Answers lines of JSON, see the top."""
  import torch

  cuda = torch.cuda.is_available()
  requests = iter(requests)

  def timed(step: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
      step()
    if cuda:
      torch.cuda.synchronize()
    return time.perf_counter() - start

  step = make_step(**json.loads(next(requests)))
  first = {'seconds': timed(step, 1)}
  if cuda:
    first['peak_bytes'] = torch.cuda.max_memory_allocated()
  print(json.dumps(first), file=answers, flush=True)
  for line in requests:
    print(json.dumps(timed(step, json.loads(line))), file=answers, flush=True)


if __name__ == '__main__':
  answers, sys.stdout = sys.stdout, sys.stderr  # Libraries print too.
  main(sys.stdin, answers)
