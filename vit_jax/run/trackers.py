"""Writes the metrics, pictures and config of a run to Weights & Biases or MLflow.

`--config.trackers="('wandb', 'mlflow')"` adds them to TensorBoard. Servers, projects
and keys are set by the trackers' own environment variables, such as WANDB_PROJECT,
WANDB_MODE=offline, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. `trackers.json` in
the workdir has the id of each tracker's run, which a resumed run continues.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from clu import metric_writers
from etils import epath
import msgspec

from vit_jax.distributed import files


class _Tracker(metric_writers.MetricWriter):
  """Leaves out what runs do not write: all but scalars, images and the config."""

  def _ignore(self, *args: Any, **kwargs: Any) -> None:
    pass

  write_summaries = write_videos = write_audios = _ignore
  write_texts = write_histograms = flush = _ignore


class Wandb(_Tracker):
  """Writes to a run of Weights & Biases, a new one if `run_id` is None."""

  def __init__(self, workdir: epath.PathLike, run_id: str | None):
    import wandb

    self._wandb = wandb
    folder = None if files.is_remote(workdir) else str(workdir)
    name = epath.Path(workdir).name
    self._run = self._wandb.init(id=run_id, resume='allow', dir=folder, name=name)
    # A metric of its own: W&B drops steps that a resumed run repeats.
    self._run.define_metric('*', step_metric='step')
    self.run_id = self._run.id

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._run.log({'step': step, **scalars})

  def write_images(self, step: int, images: Mapping[str, Any]) -> None:
    values: dict[str, Any] = {'step': step}
    for key, batch in images.items():
      values[key] = [self._wandb.Image(image) for image in batch]
    self._run.log(values)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    self._run.config.update(hparams, allow_val_change=True)

  def close(self) -> None:
    self._run.finish()


class Mlflow(_Tracker):
  """Writes to a run of MLflow, a new one if `run_id` is None."""

  def __init__(self, workdir: epath.PathLike, run_id: str | None):
    import mlflow

    self._mlflow = mlflow
    name = epath.Path(workdir).name
    run = self._mlflow.start_run(run_id=run_id, run_name=name)
    self.run_id = run.info.run_id
    self._client = self._mlflow.MlflowClient()

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._mlflow.log_metrics(scalars, step=step, run_id=self.run_id)

  def write_images(self, step: int, images: Mapping[str, Any]) -> None:
    for key, batch in images.items():
      for image in batch:
        self._client.log_image(self.run_id, image, key=key, step=step)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    # Parameters of a run cannot change in MLflow.
    logged = self._client.get_run(self.run_id).data.params
    for key in hparams.keys() - logged.keys():
      self._client.log_param(self.run_id, key, hparams[key])

  def close(self) -> None:
    self._mlflow.end_run()


def start(
  names: Sequence[str], workdir: epath.PathLike
) -> list[metric_writers.MetricWriter]:
  """Starts or resumes the runs of trackers, by name, and stores their ids.

  Raises ValueError if the file of ids is damaged.
  """
  path = epath.Path(workdir) / 'trackers.json'
  try:
    ids = msgspec.json.decode(files.read(path), type=dict[str, str])
  except FileNotFoundError:
    ids = {}
  except msgspec.DecodeError as e:
    raise ValueError(
      f"'{path}' is damaged: {e}: delete it to start new runs in {', '.join(names)}"
    ) from e
  classes = {'wandb': Wandb, 'mlflow': Mlflow}
  trackers = []
  for name in names:
    tracker = classes[name](workdir, ids.get(name))
    trackers.append(tracker)
    ids[name] = tracker.run_id
    files.write(path, msgspec.json.encode(ids))
  return trackers
