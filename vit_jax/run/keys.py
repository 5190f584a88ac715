"""Rules for the keys of a config: types, ranges, and how keys fit together.

KEYS has a rule (vit_jax/configs/rules.py) for each key of configs/common.py,
and MODELS has them for the fields of the package's own models. A task has the
rules of its own options (OPTION_RULES in vit_jax/tasks/base.py).

Configs are checked before TensorFlow is loaded, so this module must not import
it.
"""

import ml_collections

from vit_jax import models_bit
from vit_jax import models_detr
from vit_jax import models_resnet
from vit_jax import models_vit
from vit_jax.configs import models as model_configs
from vit_jax.configs import rules
from vit_jax.layers import attention
from vit_jax.layers import decoder
from vit_jax.layers import dtypes
from vit_jax.layers import encoder
from vit_jax.layers import loop
from vit_jax.layers import patches
from vit_jax.layers import positions
from vit_jax.layers import resnet
from vit_jax.layers import text_towers
from vit_jax.learning import losses
from vit_jax.learning import optim

# Greatest int64, for seeds of TensorFlow, and int32, for the number of a step.
_MAX_SEED, _MAX_STEPS = 2**63 - 1, 2**31 - 1
_STEPS, _EVERY = rules.whole(1, _MAX_STEPS), rules.whole(0)
_SHARE, _RATE = rules.number(0, 1), rules.number(0, 1, below=True)
_FLOATS = ('float32', 'bfloat16', 'float16', 'float64')
_ATTENTION = rules.one_of(*attention.NAMES)
_REMAT = rules.one_of(*loop.REMATS)

# Keys of configs/common.py, which describes them.
KEYS: dict[str, rules.Rule] = {
  'task': rules.text,
  'trainer': rules.one_of('train'),
  'seed': rules.whole(0, _MAX_SEED),
  'dataset': rules.optional(rules.dataset),
  'tfds_data_dir': rules.optional(rules.text),
  'tfds_manual_dir': rules.optional(rules.text),
  'batch': rules.whole(1),
  'batch_eval': rules.whole(1),
  'prefetch': rules.whole(0, 1_000),
  'max_image_pixels': rules.whole(1),
  'broken_images': rules.one_of('error', 'skip', 'trust'),
  'broken_boxes': rules.one_of('refuse', 'skip', 'clip'),
  'pp.train': rules.split,
  'pp.test': rules.split,
  'pp.crop': rules.size,
  'pp.resize': rules.optional(rules.size),
  'pp.channels': rules.one_of(1, 3),
  'pp.crop_area': rules.optional(rules.shares(1.0)),
  'pp.crop_ratio': rules.optional(rules.shares(None)),
  'pp.jpeg_shrink': rules.flag,
  'pp.flip': rules.flag,
  'pp.rotate': rules.number(0, 360),
  'pp.randaugment': rules.randaugment,
  'pp.color_jitter': _SHARE,
  'pp.random_erasing': _SHARE,
  'pp.sides': rules.wholes(1),
  'pp.eval_side': rules.whole(1),
  'pp.longest_side': rules.whole(1),
  'pp.crop_sides': rules.wholes(1),
  'pp.crop_range': rules.range_of_sizes,
  'pp.canvases': rules.whole(1),
  'pp.canvas_multiple': rules.whole(1),
  'pretrained': rules.optional(rules.weights),
  'pretrained_dir': rules.optional(rules.text),
  'model_or_filename': rules.optional(rules.text),
  'pretrained_grid': rules.optional(rules.pair_of_sizes),
  'loss': rules.one_of(*losses.LOSSES),
  'label_smoothing': _RATE,
  'total_steps': rules.optional(_STEPS),
  'total_epochs': rules.optional(rules.positive),
  'optimizer': rules.one_of(*optim.OPTIMIZERS),
  'momentum': _RATE,
  'b1': _RATE,
  'b2': _RATE,
  'optim_dtype': rules.one_of('float32', 'bfloat16'),
  'base_lr': rules.number(),
  'decay_type': rules.one_of(*optim.DECAY_TYPES),
  'decay_at': rules.moments,
  'warmup_steps': rules.optional(rules.whole(0, _MAX_STEPS)),
  'warmup_epochs': rules.optional(rules.number()),
  'weight_decay': rules.optional(rules.number()),
  'weight_decay_on': rules.one_of(*optim.DECAYING),
  'l2_decay': rules.number(),
  'independent_weight_decay': rules.flag,
  'lr_multipliers': rules.pairs(
    lambda factor: rules.is_number(factor) and factor >= 0,
    'must be pairs of a regular expression and a finite factor of at least 0 (0 '
    "freezes), as in (('head/', 1.0), ('', 0.0))",
    single=True,
  ),
  'grad_norm_clip': rules.optional(rules.number()),
  'accum_steps': rules.whole(1),
  'ema_decay': rules.optional(_RATE),
  'mesh': rules.mesh,
  'sharding_rules': rules.pairs(
    rules.is_spec,
    'must be pairs of a regular expression and a spec, the names of mesh axes or '
    "None, as in (('head/kernel', (None, 'model')),)",
  ),
  'evals': rules.sequence,
  'progress_every': _EVERY,
  'eval_every': _EVERY,
  'checkpoint_every': _EVERY,
  'keep_checkpoints': rules.whole(1),
  'best_metric': rules.text,
  'log_images': rules.whole(0, 1_000),
  'log_attention': rules.flag,
  'fewshot.shots': rules.wholes(1),
  'fewshot.dataset': rules.optional(rules.text),
  'fewshot.train': rules.optional(rules.split),
  'fewshot.test': rules.optional(rules.split),
  'fewshot.seeds': rules.wholes(0),
  'fewshot.l2': rules.positive,
  'fewshot.layer': rules.text,
  'fewshot.squeeze': rules.number(1, 8),
  'layer_probe': rules.whole(0),
  'real_labels': rules.optional(rules.text),
  'profile_steps': _EVERY,
}

# Groups of keys that belong to common.py alone.
GROUPS = ('pp', 'fewshot')

# Fields of the package's own models (config.model), by kind.
_ANY: dict[str, rules.Rule] = {
  'kind': rules.optional(rules.text),
  'model_name': rules.optional(rules.text),
  'dtype': rules.one_of(dtypes.AUTO, *_FLOATS),
  'param_dtype': rules.one_of(*_FLOATS),
}
_VIT = {
  **_ANY,
  'patches.size': rules.pair_of_sizes,
  'hidden_size': rules.whole(1),
  'transformer.num_layers': rules.whole(1),
  'transformer.mlp_dim': rules.whole(1),
  'transformer.num_heads': rules.whole(1),
  'transformer.dropout_rate': _RATE,
  'transformer.attention_dropout_rate': _RATE,
  'transformer.stochastic_depth': _RATE,
  'transformer.add_position_embedding': rules.flag,
  'transformer.position_embedding': rules.one_of(*positions.KINDS),
  'transformer.position_layers': rules.one_of(*positions.LAYERS),
  'transformer.attention': _ATTENTION,
  'transformer.gelu': rules.one_of(*encoder.GELUS),
  'transformer.norm_eps': rules.positive,
  'transformer.position_grid': rules.optional(rules.pair_of_sizes),
  'transformer.remat': _REMAT,
  'transformer.scan': rules.optional(rules.flag),
  'transformer.causal': rules.flag,
  'transformer.only_first': rules.flag,
  'resnet.num_layers': rules.units,
  'resnet.width_factor': rules.width_factor,
  'resnet.eps': rules.one_of(*models_resnet.EPSILONS),
  'representation_size': rules.optional(rules.whole(1)),
  'classifier': rules.one_of(*models_vit.CLASSIFIERS),
  'transformer.first_norm': rules.flag,
  'head_bias_init': rules.finite,
  'head_init': rules.one_of(*patches.HEAD_INITS),
}
# Kind of model -> the rules of its fields; other kinds have none.
MODELS: dict[str, dict[str, rules.Rule]] = {
  'vit': _VIT,
  'mixer': {
    **_ANY,
    'patches.size': rules.pair_of_sizes,
    'hidden_dim': rules.whole(1),
    'num_blocks': rules.whole(1),
    'tokens_mlp_dim': rules.whole(1),
    'channels_mlp_dim': rules.whole(1),
  },
  'bit': {
    **_ANY,
    'num_layers': rules.units,
    'width_factor': rules.width_factor,
    'eps': rules.one_of(*models_bit.EPSILONS),
    'remat': rules.one_of(*models_bit.REMATS),
    'head_bias_init': rules.finite,
  },
  'detr': {
    **_ANY,
    'backbone': rules.one_of(*models_detr.BACKBONES),
    **{f'vit.{name}': rule for name, rule in _VIT.items()},
    'units': rules.units,
    'dilate_last': rules.flag,
    'norm': rules.one_of(*resnet.NORMS),
    'backbone_width': rules.whole(1),
    'hidden_size': rules.whole(1),
    'num_queries': rules.whole(1),
    'mask_head': rules.flag,
    'masks_at_a_time': rules.whole(0),
    'num_encoder_layers': rules.whole(0),
    'num_decoder_layers': rules.whole(1),
    'num_heads': rules.whole(1),
    'mlp_dim': rules.whole(1),
    'dropout_rate': _RATE,
    'attention_dropout_rate': _RATE,
  },
  'igpt': {
    **_ANY,
    'hidden_size': rules.whole(1),
    'num_layers': rules.whole(1),
    'num_heads': rules.whole(1),
    'num_colors': rules.whole(2),
    'num_positions': rules.whole(1),
    'causal': rules.flag,
    'attention': _ATTENTION,
    'attention_scale': rules.one_of(*decoder.SCALES),
    'remat': _REMAT,
    'scan': rules.optional(rules.flag),
  },
  'lit': {
    **_ANY,
    **{f'image.{name}': rule for name, rule in _VIT.items()},
    'text_model': rules.one_of(*text_towers.TEXT_MODELS),
    'text.config': rules.no_nan,
    'text.width': rules.whole(1),
    'text.num_layers': rules.whole(1),
    'text.mlp_dim': rules.whole(1),
    'text.num_heads': rules.whole(1),
    'text.vocab_size': rules.whole(2),
    'text.dropout_rate': _RATE,
    'text.causal': rules.flag,
    'text.pool': rules.one_of(*text_towers.POOLS),
    'text.gelu': rules.one_of(*encoder.GELUS),
    'text.norm_eps': rules.positive,
    'pp.tokenizer_name': rules.one_of(*text_towers.TOKENIZERS),
    'pp.vocab_path': rules.optional(rules.text),
    'pp.size': rules.whole(1),
    'pp.max_len': rules.whole(2),
    'out_dim': rules.no_nan,
    'temperature_init': rules.positive,
    'bias_init': rules.optional(rules.finite),
  },
}


def check(config, known=None):
  """Checks the value of every key in a config, which may lack keys.

  `known` is a config with all known keys; None allows unknown ones. ValueError
  names the key, its value and the valid values.
  """
  model = config.get('model')
  table = {}
  if isinstance(model, ml_collections.ConfigDict):
    table = MODELS.get(model_configs.kind_of(model), {})
  fields = {f'model.{name}': rule for name, rule in table.items()}
  _check_group(config, {'model': rules.group, **KEYS, **fields}, known)


def check_preprocessing(pp):
  """Checks the values of `config.pp`; raises ValueError as `check` does."""
  _check_group(pp, KEYS, prefix='pp.')
  _check_resize(pp)
  _check_canvases(pp)


def check_together(config):
  """Checks values that depend on each other, of a config that passed `check`."""
  _check_resize(config.pp)
  _check_canvases(config.pp)
  _check_model(config.model)
  if config.fewshot.shots and not config.fewshot.seeds:
    raise ValueError(
      f'fewshot.shots={config.fewshot.shots} needs seeds, and there are none: set '
      '--config.fewshot.seeds=(0,1,2)'
    )
  if config.log_attention and not config.log_images:
    raise ValueError(
      'log_attention=True needs images to draw attention maps of, and '
      'log_images=0: set --config.log_images=8 or --config.log_attention=False'
    )
  if (config.decay_type == 'staircase') != bool(config.decay_at):
    raise ValueError(
      f"decay_type='{config.decay_type}' and decay_at={config.decay_at}: a "
      'staircase needs the shares of the run at which it drops, as in '
      '--config.decay_at="(0.3, 0.6, 0.9)", and other decays take none'
    )
  if config.independent_weight_decay and not config.base_lr:
    raise ValueError(
      'independent_weight_decay=True divides by base_lr, which is 0: set '
      '--config.base_lr above 0 or --config.independent_weight_decay=False'
    )
  for name in ('total', 'warmup'):
    steps, epochs = config[f'{name}_steps'], config[f'{name}_epochs']
    if steps is not None and epochs is not None:
      raise ValueError(
        f'{name}_steps={steps} and {name}_epochs={epochs} are both given: set '
        f'one of them to None, --config.{name}_epochs=None or '
        f'--config.{name}_steps=None'
      )


def _check_model(model, name='model'):
  for part in model_configs.parts_of(model).values():
    _check_model(model[part], f'{name}.{part}')
  fields, width = model.get('transformer') or model, model.get('hidden_size')
  heads = fields.get('num_heads')
  if isinstance(heads, int) and isinstance(width, int) and width % heads:
    key = name if fields is model else f'{name}.transformer'
    raise ValueError(
      f'{key}.num_heads={heads} does not divide {name}.hidden_size={width}: '
      f'choose a divisor (config.{key}.num_heads)'
    )
  kind = positions.kind_of(
    fields.get('add_position_embedding', True),
    fields.get('position_embedding', 'learned_1d'),
    fields.get('position_layers', 'stem'),
    fields.get('position_grid'),
  )
  if isinstance(width, int):
    positions.check_width(kind, width)


def _check_resize(pp):
  """Checks that the centre can be cropped of what is resized."""
  crop = (pp.crop, pp.crop) if isinstance(pp.crop, int) else tuple(pp.crop)
  both = isinstance(pp.resize, tuple | list)
  given = tuple(pp.resize) if both else pp.resize
  least = tuple(map(max, given, crop)) if both else max(*crop, given or 0)
  if given not in (None, least):
    raise ValueError(
      f'resize={pp.resize} is smaller than crop={pp.crop}, so that the centre '
      f'cannot be cropped: use at least {least} or None '
      '(config.pp.resize)'
    )


def _check_canvases(pp):
  if not pp.sides:
    return
  for name in ('rotate', 'randaugment', 'random_erasing'):
    if pp[name]:
      raise ValueError(
        f'{name}={pp[name]} is not possible for images on canvases '
        f'(pp.sides={pp.sides}): leave out --config.pp.{name}'
      )
  longest = max(*pp.sides, pp.eval_side)
  if pp.longest_side < longest:
    raise ValueError(
      f'longest_side={pp.longest_side} is shorter than the shorter side, '
      f'{longest} (pp.sides, pp.eval_side): raise --config.pp.longest_side'
    )


def _check_group(config, table, known=None, prefix=''):
  for key, value in config.items():
    name = prefix + key
    if known is not None and key not in known:
      rules.raise_unknown(key, known, prefix)
    rule = table.get(name)
    if rule is None and any(other.startswith(f'{name}.') for other in table):
      rule = rules.group
    rules.check(name, value, rule or rules.no_nan)
    if isinstance(value, ml_collections.ConfigDict) and name != 'mesh':
      inside = known[key] if known is not None and name in GROUPS else None
      _check_group(value, table, inside, f'{name}.')
