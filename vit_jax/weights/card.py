"""Writes the card of a model for the Hugging Face Hub: README.md."""

import json
import re
from typing import Any

from etils import epath
import ml_collections

from vit_jax import console
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  metrics as metrics_lib,
  workdir as workdir_lib,
)
from vit_jax.weights import preparation, writing

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
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ name.rpartition('/')[2] }}

{{ model_name }} of `vit_jax`, the Vision Transformer in JAX, converted for
{{ library }}.

{% for key, value in facts.items() -%}
- {{ key }}: {{ value }}
{% endfor %}
## Load

```python
import {{ library }}
{% if library == 'timm' %}
model = timm.create_model('hf-hub:{{ name }}', pretrained=True).eval()
config = timm.data.resolve_data_config({}, model=model)
transform = timm.data.create_transform(**config)
{%- else %}
model = transformers.{{ fields['architectures'][0] }}.from_pretrained('{{ name }}')
{%- if has_processor %}
processor = transformers.AutoImageProcessor.from_pretrained('{{ name }}')
{%- endif %}
{%- endif %}
```

or in `vit_jax`:

```python
from vit_jax import predict

model = predict.load_weights('hf://{{ name }}')
model.predict(['image.jpg'])
```
"""


def make(model: writing.Model, src: str, folder: epath.Path, name: str) -> str:
  """Returns the card of a model of `src` that was written to `folder`.

  A workdir also has data and metrics. `name` is OWNER/NAME on the hub.
  """
  hub = console.require('huggingface_hub', 'interop', 'a model card')
  console.require('jinja2', 'interop', 'a model card')
  run, metadata = writing.as_run(model)
  run_facts = {}
  if model.source == 'workdir':
    run, metadata = workdir_lib.load(src)
    run_facts = _facts(run, src)
  task = run_config.get_task(run.task)
  description = task(run_config.complete(run), metadata).describe()
  fields = json.loads((folder / 'config.json').read_text())
  library = 'timm' if 'pretrained_cfg' in fields else 'transformers'
  pipeline = _PIPELINES.get(run.task, _FEATURES)
  if run.task == 'classify' and not model.num_classes:
    pipeline = _FEATURES
  data = hub.ModelCardData(
    library_name=library, pipeline_tag=pipeline, tags=['vit_jax', 'jax']
  )
  return hub.ModelCard.from_template(
    data,
    template_str=_TEMPLATE,
    name=name,
    model_name=model.config.get('model_name', 'A model'),
    library=library,
    facts={
      'task': ', '.join(filter(None, (run.task, description))),
      **run_facts,
      'images': _preprocessing(run, model),
    },
    fields=fields,
    has_processor=(folder / 'preprocessor_config.json').exists(),
  ).content


def _facts(run: ml_collections.ConfigDict, workdir: str) -> dict[str, str]:
  """Returns data, training and last metrics of a run, without paths of folders."""
  facts = {}
  if run.dataset is not None:  # Else its weights were converted.
    names = [run.dataset] if isinstance(run.dataset, str) else run.dataset
    facts['data'] = ', '.join(re.sub(r'^(/|~|\w+://).*/', '', x) for x in names)
    steps = console.pluralize(run.total_steps, 'step')
    facts['training'] = f'{steps} of {console.pluralize(run.batch, "image")}'
  kinds = run_evaluators.metrics_of(run, run_evaluators.task_entries(run))
  last_metrics: dict[str, Any] = {}
  for record in metrics_lib.read(workdir):
    last_metrics |= {key: value for key, value in record.items() if key in kinds}
  if last_metrics:
    facts['metrics'] = metrics_lib.format_metrics(last_metrics, kinds)
  return facts


def _preprocessing(run: ml_collections.ConfigDict, model: writing.Model) -> str:
  """Describes how images are prepared."""
  description = preparation.from_pp(run.pp)
  values = 'from -1 to 1'
  if model.preparation.is_scaled:
    values = f'mean {model.preparation.mean} and std {model.preparation.std}'
  return f'{description}; values {values}'
