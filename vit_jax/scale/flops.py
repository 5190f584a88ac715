"""Counts the multiply-adds of a Vision Transformer and the FLOPs of a program.

The counts agree with the pre-training compute of arXiv 2010.11929, table 6,
which is 6 x multiply-adds of one forward pass x images.
"""

import math


def forward_multiply_adds(
  model,
  image_size: tuple[int, int],
  num_classes: int,
  channels: int = 3,
  as_run: bool = False,
) -> int:
  """Counts the multiply-adds of one forward pass on one image.

  Only matrix products count, as is usual: patches, attention, MLP and head.

  Args:
    model: a config of `vit_jax.configs.models`, without a ResNet in front.
    image_size: (height, width) in pixels.
    num_classes: width of the head.
    channels: channels of the image.
    as_run: whether to leave out what this implementation skips: in a model with
      a class token the last layer computes that token alone.

  Raises:
    ValueError: if the model is a hybrid.
  """
  if model.get('resnet') is not None:
    raise ValueError(
      f'model={model.get("model_name")} has a ResNet, whose multiply-adds cannot '
      'be counted: choose a model without one'
    )
  width, encoder = model.hidden_size, model.transformer
  patch_height, patch_width = model.patches.size
  patches = (image_size[0] // patch_height) * (image_size[1] // patch_width)
  tokens = patches + model.classifier.startswith('token')
  embedding = patches * patch_height * patch_width * channels * width
  dense = tokens * (4 * width * width + 2 * width * encoder.mlp_dim)
  attention = 2 * tokens * tokens * width
  head = width * num_classes
  if model.get('representation_size'):
    head = model.representation_size * (width + num_classes)
  total = embedding + encoder.num_layers * (dense + attention) + head
  if as_run and model.classifier == 'token':
    unread = tokens - 1
    total -= unread * (2 * width * (width + encoder.mlp_dim + tokens))
  return total


def training_flops(multiply_adds: int) -> int:
  """FLOPs of a forward and backward pass: 3 passes, 2 FLOPs a multiply-add."""
  return 6 * multiply_adds


def count_flops(jaxpr) -> int:
  """Counts the FLOPs of the matrix products in a program, as it is written.

  Recomputed products count again, and the body of a loop or kernel counts as
  often as it runs. A compiler's own count does neither reliably.

  Args:
    jaxpr: jax.core.Jaxpr or ClosedJaxpr, for example
      `jax.jit(f).trace(...).jaxpr`.
  """
  jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
  total = 0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      shape = eqn.invars[0].aval.shape
      depth = math.prod(shape[i] for i in contracted)
      total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    elif name == 'conv_general_dilated':
      kernel = eqn.invars[1].aval.shape
      features = kernel[eqn.params['dimension_numbers'].rhs_spec[0]]
      depth = math.prod(kernel) // features
      total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    times = 1
    if name == 'scan':
      times = eqn.params['length']
    elif name == 'pallas_call':
      times = math.prod(eqn.params['grid_mapping'].grid)
    for inner in _inner_jaxprs(eqn.params):
      total += times * count_flops(inner)
  return total


def _inner_jaxprs(params):
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(getattr(item, 'jaxpr', item), 'eqns'):
        yield item
