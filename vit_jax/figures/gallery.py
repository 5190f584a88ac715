"""Lists the figures of any model: FIGURES, to which a task adds its own.

Each figure takes a Subject (a model and images), computes arrays, and draws them.
vit_jax/figures/visualize.py draws several.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models, models_resnet
from vit_jax.figures import (
  charts,
  drawing,
  explanations,
  internals,
  results,
)
from vit_jax.layers import position_kinds, positions

_A_ROW = 8  # Maximum number of images per figure; more make further figures.
_RANKS = 3  # Classes of an image that are explained.
_POSEMB = 'Transformer/posembed_input/pos_embedding'
# Kernels of the first layer of a BiT ResNet and a hybrid, which are standardised.
_STANDARDISED = ('root_block/conv_root/kernel', 'conv_root/kernel')
# Those, and the kernels of a detector, a detector with a ViT, a ViT and a Mixer.
_KERNELS = (
  *_STANDARDISED,
  'backbone/conv_root/kernel',
  'backbone/embedding/kernel',
  'embedding/kernel',
  'stem/kernel',
)


# --- Requirements: each returns what a figure lacks, or None ---


def _needs_posemb(subject: results.Subject) -> str | None:
  fields = getattr(subject.model.task.model, 'transformer', None) or {}
  if fields.get('position_embedding') in position_kinds.RELATIVE:
    return 'relative position embeddings belong to offsets, not to patches'
  if _position_table(subject) is None:
    return 'the model has no position embeddings'
  return None


def needs_images(subject: results.Subject) -> str | None:
  """Returns what a figure of images lacks, in words; None for nothing."""
  if subject.batch is not None:
    return None
  reason = f' ({subject.lacking})' if subject.lacking else ''
  return f'there are no images{reason}: pass --images a.jpg b.png'


def _needs_attention(subject: results.Subject) -> str | None:
  return internals.lacks(subject.model.task.model) or needs_images(subject)


def _needs_registers(subject: results.Subject) -> str | None:
  has = getattr(subject.model.task.model, 'registers', 0)
  return _needs_attention(subject) if has else 'the model has no registers'


def _needs_patches(subject: results.Subject) -> str | None:
  try:
    subject.model.task.features('patches')
  except ValueError as e:
    return str(e)
  return needs_images(subject)


def _needs_kernel(subject: results.Subject) -> str | None:
  if any(path in subject.params for path in _KERNELS):
    return None
  return f'the model has none of {", ".join(_KERNELS)}'


def _needs_run(subject: results.Subject) -> str | None:
  if not subject.model.workdir:
    return 'weights without a run have no learning curves'
  if not charts.curve_panels(results.learning_curves(subject.model.workdir)):
    return f"'{subject.model.workdir}' has no metrics.jsonl with curves"
  return None


def _needs_labels(subject: results.Subject) -> str | None:
  if not subject.model.class_names:
    return 'the model has no classes'
  if subject.source is None:
    return subject.lacking or 'there are no images with labels'
  return None


def _needs_explanations(subject: results.Subject) -> str | None:
  if not subject.model.class_names:
    return 'the model has no classes'
  for reason in subject.methods.values():
    if reason is not None:
      return reason
  return needs_images(subject)


def _needs_class_explanations(subject: results.Subject) -> str | None:
  if list(subject.methods) == ['rollout']:
    return "method='rollout' is the same for every class: use another one (--explain)"
  return _needs_explanations(subject)


# --- Drawing: each returns a list of matplotlib Figures ---


def _filters(subject: results.Subject) -> list:
  path = next(path for path in _KERNELS if path in subject.params)
  kernel = np.asarray(subject.params[path], np.float32)
  if path in _STANDARDISED:
    kernel = models_resnet.weight_standardize(kernel, (0, 1, 2), eps=1e-5)
  return [drawing.filters(*internals.principal_filters(kernel))]


def _position_table(subject: results.Subject) -> Any:
  model = subject.model.task.model
  if _POSEMB in subject.params or not isinstance(model, models.VisionTransformer):
    return subject.params.get(_POSEMB)
  fields = model.transformer or {'position_embedding': 'none'}
  return positions.first_table(subject.params, fields, subject.grid)


def _position_similarity(subject: results.Subject) -> list:
  similarity = internals.position_similarity(_position_table(subject), subject.grid)
  return [drawing.position_similarity(similarity)]


def _attention_distance(subject: results.Subject) -> list:
  grid = subject.grid
  count = math.prod(grid)
  size = subject.batch['image'].shape[1:3]
  patch = tuple(pixels / cells for pixels, cells in zip(size, grid))
  weights = np.full((1, 1, count, count), 1 / count, np.float32)
  uniform = internals.mean_distances([weights], grid, patch).item()
  distances = subject.attention.distances
  return [charts.attention_distances(distances, uniform, len(subject.names))]


def pages(subject: results.Subject, most: int = _A_ROW) -> Iterator[slice]:
  """Yields slices of the images of a Subject, `most` for each figure."""
  for start in range(0, len(subject.names), most):
    yield slice(start, start + most)


def _with_maps(draw: Callable, maps: np.ndarray, subject: results.Subject) -> list:
  """Draws images with maps [..., B, h, w] of them."""
  images = subject.pictures
  labels, title = subject.labels
  figures = []
  for page in pages(subject):
    figures.append(draw(images[page], maps[..., page, :, :], labels[page], title))
  return figures


def _register_attention(subject: results.Subject) -> list:
  model = subject.model.task.model
  names = []
  if model.has_class_token:
    names.append('class token')
  if model.distilled:
    names.append('distillation token')
  for i in range(model.registers):
    names.append(f'register {1 + i}')
  heading = 'Attention in the last layer, mean over the heads'
  draw = functools.partial(drawing.named_maps, heading, names)
  return _with_maps(draw, subject.attention.tokens, subject)


def _patch_components(subject: results.Subject) -> list:
  colours, explained = internals.patch_colours(subject.patches, subject.foreground)
  images, names = subject.pictures, subject.names
  figures = []
  for page in pages(subject):
    figures.append(
      drawing.patch_components(images[page], colours[page], explained, names[page])
    )
  return figures


def _explanations(subject: results.Subject) -> list:
  classes = subject.outputs.argmax(axis=-1)
  title = 'predicted class, probability'
  number = subject.named_class
  if number is not None:
    classes = np.full_like(classes, number)
    name = drawing.shorten(subject.model.class_names[number])
    title = f'predicted class, probability; explained: {name}'
  maps = np.stack([subject.relevance(method, classes) for method in subject.methods])
  names = [explanations.METHODS[method] for method in subject.methods]
  images, labels = subject.pictures, subject.predictions
  figures = []
  for page in pages(subject):
    figure = drawing.named_maps(
      'Explanations',
      names,
      images[page],
      maps[:, page],
      labels[page],
      title,
      bar='relevance',
    )
    figures.append(figure)
  return figures


def _class_explanations(subject: results.Subject) -> list:
  probabilities = subject.model.task.probabilities(subject.outputs)  # [B, classes]
  ranks = np.argsort(-probabilities, axis=-1, kind='stable')[:, :_RANKS]  # [B, n]
  method = next(m for m in subject.methods if m != 'rollout')
  names = subject.model.class_names
  maps, texts = [], []
  for classes in ranks.T:
    maps.append(subject.relevance(method, classes))
    row = []
    for image_probabilities, number in zip(probabilities, classes, strict=True):
      row.append(f'{names[number]} {100 * image_probabilities[number]:.0f} %')
    texts.append(row)
  images = subject.pictures
  stacked = np.stack(maps)
  name = explanations.METHODS[method]
  figures = []
  for page in pages(subject):
    figures.append(
      drawing.class_explanations(
        name,
        [row[page] for row in texts],
        images[page],
        stacked[:, page],
        subject.names[page],
      )
    )
  return figures


def _of_results(draw: Callable, subject: results.Subject) -> list:
  names = subject.model.class_names
  return [draw(subject.results, names, subject.split)]


class Entry(NamedTuple):
  """The description of a figure."""

  name: str  # Name of the figure and of its file.
  title: str  # The figure's content in a few words.
  caption: str  # An explanation in two or three sentences.
  source: str  # Sections and figures of the paper, or other sources.
  # From a Subject to what the figure lacks, in words, or None.
  lacks: Callable[[Any], str | None]
  # From a Subject to a list of matplotlib Figures, one for each 8 images.
  draw: Callable[[Any], list]
  # Flags of `vit_jax visualize` that few figures read, this one among them.
  flags: tuple[str, ...] = ()


FIGURES = (
  Entry(
    'attention_rollout',
    'Attention rollout',
    'The upper row shows the images below the predictions of the model. The '
    'lower row shows how much each patch contributes to the output when attention '
    'is followed through all layers, relative to the largest value of each map.',
    'arXiv 2010.11929, section 4.5, figures 6 and 14; rollout: arXiv 2005.00928',
    _needs_attention,
    lambda x: _with_maps(drawing.rollout, x.attention.rollout, x),
  ),
  Entry(
    'attention_maps',
    'Attention of each layer',
    'Each map shows how much the class token attends to each patch in a layer, '
    'averaged over the heads. In a model without a class token, the map is the '
    'mean over all patches as queries, weighted by attention pooling if the model has '
    'it. Each map is scaled to its largest value.',
    'arXiv 2010.11929, section 4.5 and appendix D.8',
    _needs_attention,
    lambda x: _with_maps(drawing.attention_maps, x.attention.maps, x),
  ),
  Entry(
    'register_attention',
    'Attention of class token and registers',
    'Each map shows how much the class token or a register attends to each patch in '
    'the last layer, averaged over the heads. Registers of trained models may attend '
    'to different parts of an image. Each map is scaled to its largest value.',
    'arXiv 2309.16588 ("Vision Transformers Need Registers"), figure 9',
    _needs_registers,
    _register_attention,
  ),
  Entry(
    'patch_components',
    'Principal components of patches',
    'The colours of a patch are the first three principal components of its token '
    'after the last layer, among the patches of all images. In models such as DINOv2, '
    'matching parts of objects have the same colour in all images. With --foreground, '
    'patches with the other sign of the first component are black.',
    'arXiv 2304.07193 (DINOv2), figure 1',
    _needs_patches,
    _patch_components,
    ('--foreground',),
  ),
  Entry(
    'attention_distance',
    'Mean attention distance',
    'Each dot is a head. Its height is the distance between a patch and the '
    'patches that it attends to, weighted by attention and averaged over patches '
    'and images. Low dots are heads that attend locally, as convolutions do; heads '
    'near the dashed line attend globally.',
    'arXiv 2010.11929, section 4.5 and appendix D.7, figures 7 (right) and 11',
    _needs_attention,
    _attention_distance,
  ),
  Entry(
    'filters',
    'Filters of the first layer',
    'The principal components of the filters of the first layer: the patch '
    'embedding of a ViT, or the first convolution of a hybrid. After training on '
    'many images they are smooth waves and colour edges; after little training '
    'they look like noise.',
    'arXiv 2010.11929, section 4.5, figure 7 (left)',
    _needs_kernel,
    _filters,
  ),
  Entry(
    'position_similarity',
    'Similarity of position embeddings',
    'The map at row i and column j compares the position embedding of the patch '
    'at row i and column j with the embeddings of all patches. Trained embeddings are '
    'most similar near the patch and along its row and column.',
    'arXiv 2010.11929, section 4.5 and appendix D.4, figures 7 (centre) and 10',
    _needs_posemb,
    _position_similarity,
  ),
  Entry(
    'learning_curves',
    'Learning curves',
    'The losses, other measures and the learning rate that the run has logged, by '
    'step. Training images are augmented, and their labels may be smoothed, so '
    'the training loss can be higher than the test loss.',
    'metrics.jsonl of the run',
    _needs_run,
    lambda x: [charts.learning_curves(results.learning_curves(x.model.workdir))],
  ),
)
# Further figures of a classifier, see Task.FIGURES in vit_jax/tasks/base.py.
OF_CLASSES = (
  Entry(
    'explanations',
    'Explanations',
    'Each map shows how much the patches speak for the predicted class, or for the class '
    'that --class names. Rollout, which is the same for every class, is attention '
    'followed through all layers; the other methods use gradients of the class. Each '
    'map is scaled to its smallest and its largest value.',
    'arXiv 2404.03214 (LeGrad), 2012.09838 and 2103.15679 (gradient-weighted rollout), '
    '1610.02391 (Grad-CAM), 2005.00928 (rollout)',
    _needs_explanations,
    _explanations,
    ('--explain', '--class'),
  ),
  Entry(
    'class_explanations',
    'Explanations of several classes',
    'Each map shows how much the patches speak for one of the most probable classes of '
    'an image. Maps that differ show where the model sees which class; maps that are '
    'alike show that the method, or the model, does not tell the classes apart.',
    'the first method of --explain that depends on the class, by default LeGrad',
    _needs_class_explanations,
    _class_explanations,
    ('--explain',),
  ),
  Entry(
    'confusion',
    'Confusion matrix',
    'Rows are true classes and columns are predicted classes, so correct '
    'predictions lie on the diagonal. The bars show which classes are confused '
    'most often.',
    'the test split of the run, or the one that --split names',
    _needs_labels,
    functools.partial(_of_results, charts.confusion),
  ),
  Entry(
    'mistakes',
    'Worst mistakes',
    'The images that were predicted wrongly with the highest probability. They '
    'show which classes look alike to the model, and sometimes wrong labels.',
    'the test split of the run, or the one that --split names',
    _needs_labels,
    functools.partial(_of_results, charts.mistakes),
  ),
)


def entries_of(task: Any) -> tuple[Entry, ...]:
  """Returns the figures of any model and of a task."""
  return (*FIGURES, *task.FIGURES)


def choose(
  subject: results.Subject, names: Sequence[str] | None = None
) -> tuple[list[Entry], dict[str, str]]:
  """Returns Entries that can be drawn, and {name: what others lack}.

  `names` are names of figures of the model's task, see `entries_of`; None for all. Raises
  ValueError if a name is unknown, or if a named figure or no figure can be drawn.
  """
  entries = entries_of(subject.model.task)
  known_names = [entry.name for entry in entries]
  unknown = sorted(set(names or ()) - set(known_names))
  if unknown:
    raise ValueError(
      f'figures={unknown} are not among the figures of this model: choose among '
      f'{", ".join(known_names)} (--figures)'
    )
  requested = [e for e in entries if names is None or e.name in names]
  lacking = {}
  for entry in requested:
    reason = entry.lacks(subject)
    if reason:
      lacking[entry.name] = reason
  if names and lacking:
    name, reason = next(iter(lacking.items()))
    raise ValueError(f"figure '{name}' cannot be drawn: {reason} (--figures)")
  if len(lacking) == len(requested):
    raise ValueError(f'no figure can be drawn: {lacking}')
  return [e for e in requested if e.name not in lacking], lacking


def draw(entry: Entry, subject: results.Subject) -> dict[str, Any]:
  """Returns the matplotlib Figures of an entry by name: NAME, NAME_2, ..."""
  figures = {}
  for number, figure in enumerate(entry.draw(subject), 1):
    name = entry.name if number == 1 else f'{entry.name}_{number}'
    figures[name] = figure
  return figures
