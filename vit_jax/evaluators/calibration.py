"""Temperature scaling: one number that calibrates the probabilities of a trained model.

"On Calibration of Modern Neural Networks" (arXiv 1706.04599, section 4.2): logits are
divided by the temperature with the least negative log-likelihood on images that the model
was not trained on. No prediction changes, only its probability.

  vit_jax evaluate --workdir=/tmp/run --split=test --calibrate='train[90%:]' --report

The temperature is stored in the workdir, and predict.load reads it.
"""

import json
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.distributed import files, processes

_FILE = 'calibration.json'
_LOWEST, _HIGHEST = 0.01, 100.0  # Range of temperatures.


class Calibration(NamedTuple):
  """The temperature of a checkpoint."""

  temperature: float
  step: int  # Step of the checkpoint.
  split: str  # The images that it was chosen on.
  num_examples: int

  def __str__(self) -> str:
    return f'temperature {self.temperature:.4g}, chosen on {self.split}'


def fit(logits: np.ndarray, labels: np.ndarray, exclusive: bool) -> float:
  """Returns the temperature with the least negative log-likelihood.

  Args:
    logits: float [n, C].
    labels: bool [n, C].
    exclusive: whether each image has one class; rows with none or several are left out.

  Raises:
    ValueError: without a labelled image, or if the best temperature is extreme.
  """
  from scipy import optimize, special  # Late: takes half a second.

  if exclusive:
    mask = labels.sum(axis=1) == 1
    logits, labels = logits[mask], labels[mask]
  if not len(logits):
    raise ValueError(
      'the split has no image with one label, so no temperature can be chosen: use a '
      'labelled split (--calibrate)'
    )
  logits = logits.astype(np.float64)

  def loss(log_temperature: float) -> float:
    scaled = logits / np.exp(log_temperature)
    if exclusive:
      return -special.log_softmax(scaled, axis=1)[labels].mean()
    return -special.log_expit(np.where(labels, scaled, -scaled)).mean()

  bounds = np.log([_LOWEST, _HIGHEST])
  result = optimize.minimize_scalar(
    loss, bounds=bounds, method='bounded', options={'xatol': 1e-8}
  )
  if min(map(loss, bounds)) <= result.fun + 1e-9:
    raise ValueError(
      f'no temperature from {_LOWEST} to {_HIGHEST} is the best: the model classifies the '
      'split without a mistake, or by chance; use more images that it was not trained on '
      '(--calibrate)'
    )
  return float(np.exp(result.x))


def _digest(calibration: Calibration) -> str:
  return files.digest([json.dumps(calibration).encode()])


@processes.by_first('writing the calibration')
def store(workdir: epath.PathLike, calibration: Calibration) -> None:
  """Writes the calibration of a run, and a hash of it, to its workdir."""
  facts = {**calibration._asdict(), 'digest': _digest(calibration)}
  files.write(epath.Path(workdir) / _FILE, json.dumps(facts, indent=1) + '\n')


def stored(workdir: epath.PathLike, step: int) -> Calibration | None:
  """Returns the calibration of a checkpoint of a run, or None; ValueError if damaged."""
  path = epath.Path(workdir) / _FILE
  if not path.exists():
    return None
  try:
    facts = files.read_json(path)
    digest = facts.pop('digest')
    calibration = Calibration(**facts)
    is_in_range = _LOWEST <= calibration.temperature <= _HIGHEST
    is_valid = is_in_range and digest == _digest(calibration)
  except (ValueError, TypeError, KeyError, AttributeError):
    is_valid = False
  if not is_valid:
    raise ValueError(
      f"'{path}' is damaged: delete it, and calibrate the run again "
      '(vit_jax evaluate --calibrate=SPLIT)'
    )
  if calibration.step != step:
    console.notify(
      f"Not using '{path}', which is for step {calibration.step}, not step {step}."
    )
    return None
  return calibration


def with_temperature(task: Any, temperature: float) -> Any:
  """Returns a task whose probabilities are computed at a temperature."""
  return type(task)(task.config, {**task.metadata, 'temperature': temperature})
