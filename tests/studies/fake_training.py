"""Fake training, for tests of programs that train many runs."""

import pathlib

from vit_jax import train
from vit_jax.run import config as run_config, workdir as workdir_lib


class Fake:
  """Replaces train.train_and_evaluate.

  Args:
    monkeypatch: pytest's fixture.
    measure: a function from a complete config to metrics; may raise.

  Attributes:
    trained: folder names of all calls.
    configs: their configs, by name.
  """

  def __init__(self, monkeypatch, measure):
    self.measure, self.trained, self.configs = measure, [], {}
    monkeypatch.setattr(train, 'train_and_evaluate', self)

  def __call__(self, config, workdir, workdir_lock=None):
    name = pathlib.Path(workdir).name
    self.trained.append(name)
    self.configs[name] = config = run_config.complete(config)
    if (pathlib.Path(workdir) / 'config.json').exists():
      return None, self.measure(config)  # The caller has written a run.
    workdir_lib.create(workdir, config, {}, {})
    for step in (10, 20):  # Like checkpoints of Orbax.
      folder = pathlib.Path(workdir) / 'checkpoints' / str(step) / 'default'
      folder.mkdir(parents=True, exist_ok=True)
      (folder / '_METADATA').write_text('')
    return None, {'step': 20, **self.measure(config)}
