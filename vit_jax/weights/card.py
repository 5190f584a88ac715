"""Writes the card of a model for the Hugging Face Hub: README.md."""

import json
import re

from etils import epath

from vit_jax import console
from vit_jax.run import (
  config as run_config,
  metrics as metrics_lib,
  workdir as workdir_lib,
)
from vit_jax.weights import writing

# Task -> what the hub calls it.
_PIPELINES = {
  'classify': 'image-classification',
  'pixels_finetune': 'image-classification',
  'detect': 'object-detection',
  'segment': 'image-segmentation',
  'pixels': 'unconditional-image-generation',
  'image_text': 'zero-shot-image-classification',
}
_FEATURES = 'image-feature-extraction'


def make(model: writing.Model, src: str, folder: epath.Path, name: str) -> str:
  """Returns the card of a model that was written for timm or Hugging Face.

  Args:
    model: the model.
    src: what it was read from; the workdir of a run tells data and metrics.
    folder: the files that were written.
    name: OWNER/NAME on the hub.
  """
  hub = console.needed('huggingface_hub', 'interop', 'a model card')
  run, metadata = writing.as_run(model)
  lines = {}
  if model.source == 'workdir':
    run, metadata = workdir_lib.load(src)
    lines = _facts(run) | _metrics(src, run)
  task = run_config.get_task(run.task)
  words = task(run_config.complete(run), metadata).describe()
  lines = {'task': ', '.join(filter(None, (run.task, words)))} | lines
  lines['images'] = _preprocessing(run, model)
  fields = json.loads((folder / 'config.json').read_text())
  library = 'timm' if 'pretrained_cfg' in fields else 'transformers'
  has_head = run.task != 'classify' or model.num_classes
  data = hub.ModelCardData(
    library_name=library,
    pipeline_tag=_PIPELINES.get(run.task, _FEATURES) if has_head else _FEATURES,
    tags=['vit_jax', 'jax'],
  )
  return '\n'.join(
    [
      f'---\n{data.to_yaml()}\n---\n',
      f'# {name.rpartition("/")[2]}\n',
      f'{model.config.get("model_name", "A model")} of `vit_jax`, the Vision '
      f'Transformer in JAX, converted for {library}.\n',
      *(f'- {key}: {value}' for key, value in lines.items()),
      '\n## Load\n',
      _loading(library, name, fields, folder),
      'In `vit_jax`:\n',
      '```python\nfrom vit_jax import predict\n\n'
      f"model = predict.load_weights('hf://{name}')\n"
      "model.predict(['image.jpg'])\n```\n",
    ]
  )


def _facts(run) -> dict[str, str]:
  """Returns what a run was trained on. Folders are named without their path."""
  if run.dataset is None:  # Weights that were converted.
    return {}
  names = [run.dataset] if isinstance(run.dataset, str) else run.dataset
  return {
    'data': ', '.join(re.sub(r'^(/|~|\w+://).*/', '', name) for name in names),
    'training': f'{run.total_steps:,} steps of {run.batch:,} images',
  }


def _metrics(workdir, run) -> dict[str, str]:
  """Returns the last metrics of a run's evaluations."""
  names = run_config.get_task(run.task).metrics(run)
  found = {
    key: value
    for line in metrics_lib.read(workdir)
    for key, value in line.items()
    if key.startswith(tuple(f'{name}_' for name in names))
  }
  return {'metrics': metrics_lib.format_metrics(found)} if found else {}


def _preprocessing(run, model) -> str:
  """Describes how images are prepared."""
  if model.image_size is None:
    return (
      f'the shorter side is resized to {run.pp.eval_side} pixels, unless the '
      f'longer one would exceed {run.pp.longest_side}'
    )
  height, width = model.image_size
  how = 'as a whole, without regard to their shape'
  if model.resize is not None:
    resize = model.resize
    how = (
      f'to {resize if isinstance(resize, int) else "x".join(map(str, resize))} '
      f'pixels{" at the shorter side" if isinstance(resize, int) else ""}, and '
      'the centre is cropped'
    )
  return (
    f'{height}x{width} pixels, resized {how}, bilinearly and without averaging '
    'where they shrink; values from -1 to 1'
  )


def _loading(library, name, fields, folder) -> str:
  """Returns how to load a model in transformers and timm."""
  if library == 'timm':
    return (
      'In timm:\n\n```python\nimport timm\n\n'
      f"model = timm.create_model('hf-hub:{name}', pretrained=True).eval()\n"
      'config = timm.data.resolve_data_config({}, model=model)\n'
      'transform = timm.data.create_transform(**config)\n```\n\n'
      'In transformers, which needs timm for it:\n\n```python\n'
      'import transformers\n\nmodel = '
      'transformers.AutoModelForImageClassification.from_pretrained(\n'
      f"  '{name}'\n)\n```\n"
    )
  text = (
    'In transformers:\n\n```python\nimport transformers\n\n'
    f"model = transformers.{fields['architectures'][0]}.from_pretrained('{name}')\n"
  )
  if (folder / 'preprocessor_config.json').exists():
    text += f"processor = transformers.AutoImageProcessor.from_pretrained('{name}')\n"
  text += '```\n\n'
  if fields['model_type'] == 'vit':
    text += (
      'In timm, whose names of the arrays are others:\n\n```bash\n'
      f'vit_jax convert hf://{name} /tmp/model --to=timm\n```\n\n```python\n'
      "import timm\n\nmodel = timm.create_model('local-dir:/tmp/model', "
      'pretrained=True)\n```\n'
    )
  return text
