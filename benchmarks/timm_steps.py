"""Times updates and logits of timm's models, in a separate process.

JAX and PyTorch bring different versions of NVIDIA's libraries. This process reads
a line of JSON with the arguments of `_make_step` and answers with the cost of the
first call; then, for each line with a number of calls, with the seconds they took.
"""

from collections.abc import Callable, Iterable
import contextlib
import json
import subprocess
import sys
import time
from typing import Any, TextIO

# Name of a model here -> timm's name of the same architecture.
NAMES = {
  'ViT-Ti_16': 'vit_tiny_patch16_224',
  'ViT-S_16': 'vit_small_patch16_224',
  'ViT-S_32': 'vit_small_patch32_224',
  'ViT-B_16': 'vit_base_patch16_224',
  'ViT-B_32': 'vit_base_patch32_224',
  'ViT-L_16': 'vit_large_patch16_224',
  'ViT-L_32': 'vit_large_patch32_224',
  'ViT-H_14': 'vit_huge_patch14_224',
}
COMMAND = [sys.executable, '-m', 'benchmarks.timm_steps']


class Beside:
  """The process; takes the arguments of `_make_step`.

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


def _make_step(
  model: str, batch: int, image_size: int, dtype: str, train: bool, compiled: bool
) -> Callable[[], Any]:
  """Returns a function that makes an update by fused AdamW, or the logits.

  It does not wait for the device. 'bfloat16' is by torch.autocast.
  """
  import timm
  import torch

  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  torch.set_float32_matmul_precision('high')
  net = timm.create_model(NAMES[model], img_size=image_size, num_classes=1000)
  net = net.to(device)
  run = torch.compile(net) if compiled else net
  images = torch.randn(batch, 3, image_size, image_size, device=device)
  if dtype == 'float32':
    types = contextlib.nullcontext
  else:
    types = lambda: torch.autocast(device, torch.bfloat16)
  if not train:
    net.eval()

    @torch.inference_mode()
    def logits() -> Any:
      with types():
        run(images)

    return logits
  labels = torch.randint(1000, (batch,), device=device)
  tx = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

  def update() -> None:
    with types():
      loss = torch.nn.functional.cross_entropy(run(images), labels)
    loss.backward()
    tx.step()
    tx.zero_grad(set_to_none=True)

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

  step = _make_step(**json.loads(next(requests)))
  first = {'seconds': timed(step, 1)}
  if cuda:
    first['peak_bytes'] = torch.cuda.max_memory_allocated()
  print(json.dumps(first), file=answers, flush=True)
  for line in requests:
    print(json.dumps(timed(step, json.loads(line))), file=answers, flush=True)


if __name__ == '__main__':
  answers, sys.stdout = sys.stdout, sys.stderr  # Libraries print too.
  main(sys.stdin, answers)
