"""Image-text models of other libraries: Hugging Face's CLIP and SigLIP, and open_clip.

The state dicts are `CLIPModel`, `SiglipModel` and open_clip's CLIP with a Vision
Transformer as image tower. An image tower alone is read as a classifier.
`Siglip2Model`, whose patch embedding is a linear layer, is read for the grid of its
position embeddings. CLIP lacks biases that this package has, in the patch embedding and
the heads; they are zero here. The published .npz files (arXiv 2111.07991) need no
conversion.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
import math
from typing import Any, Literal, NamedTuple

from absl import logging
from etils import epath
import jax
import ml_collections
import numpy as np

from vit_jax import models
from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import text_towers
from vit_jax.weights import arrays, descriptions, preparation
from vit_jax.weights.families import base, leaves, text, vit, vit_files

_IMAGE, _TEXT = 'img/', 'txt/'
_PARTS = {'img': 'image', 'txt': 'text'}
_ATTENTION = 'MultiHeadDotProductAttention_0'
_BIAS = 'logit_bias'
_POSEMB = 'Transformer/posembed_input/pos_embedding'
_EMBEDDING = 'Embed_0/embedding'
# Rows of vit_jax.weights.families.leaves: names of Hugging Face and of open_clip.
_BLOCK = (
  ('LayerNorm_0', 'norm', 'layer_norm1', 'ln_1'),
  *leaves.attention(_ATTENTION, 'self_attn', 'attn'),
  ('LayerNorm_1', 'norm', 'layer_norm2', 'ln_2'),
  ('MlpBlock_0/Dense_0', 'dense', 'mlp.fc1', 'mlp.c_fc'),
  ('MlpBlock_0/Dense_1', 'dense', 'mlp.fc2', 'mlp.c_proj'),
)
_IMAGE_ROWS = (
  ('cls', 'token', 'embeddings.class_embedding', 'class_embedding'),
  (
    _POSEMB, 'rows',
    'embeddings.position_embedding.weight', 'positional_embedding',
  ),
  ('embedding', 'conv', 'embeddings.patch_embedding', 'conv1'),
  ('Transformer/first_norm', 'norm', 'pre_layrnorm', 'ln_pre'),
  ('Transformer/encoder_norm', 'norm', 'post_layernorm', 'ln_post'),
)  # fmt: skip
_TEXT_ROWS = (
  (
    _EMBEDDING, 'table',
    'embeddings.token_embedding.weight', 'token_embedding.weight',
  ),
  (
    'pos_embedding', 'rows',
    'embeddings.position_embedding.weight', 'positional_embedding',
  ),
  ('Encoder_0/encoder_norm', 'norm', 'final_layer_norm', 'ln_final'),
)  # fmt: skip
# Layers in which the three differ.
_MAP = 'img/MAPHead_0/'
_POOLING = 'vision_model.head.'
_PATCHES = 'vision_model.embeddings.patch_embedding.weight'
_TOKENS = 'text_model.embeddings.token_embedding.weight'
_OWN = {
  'clip': (
    ('img/head', 'dense', 'visual_projection'),
    ('txt/head', 'dense', 'text_projection'),
    ('t', 'scalar', 'logit_scale'),
  ),
  'siglip': (
    *leaves.attention(f'{_MAP}{_ATTENTION}', f'{_POOLING}attention'),
    (f'{_MAP}LayerNorm_0', 'norm', f'{_POOLING}layernorm'),
    (f'{_MAP}MlpBlock_0/Dense_0', 'dense', f'{_POOLING}mlp.fc1'),
    (f'{_MAP}MlpBlock_0/Dense_1', 'dense', f'{_POOLING}mlp.fc2'),
    (f'{_MAP}probe', 'same', f'{_POOLING}probe'),
    ('txt/head', 'dense', 'text_model.head'),
    ('img/head', 'dense', 'classifier'),
    ('t', 'same', 'logit_scale'),
    ('b', 'same', _BIAS),
  ),
  'open_clip': (
    ('img/head/kernel', 'table', 'visual.proj'),
    ('txt/head/kernel', 'table', 'text_projection'),
    ('t', 'scalar', 'logit_scale'),
    ('b', 'scalar', _BIAS),
  ),
}
# Layers whose bias CLIP lacks.
_NO_BIAS = ('img/embedding', 'img/head', 'txt/head')
# Tokens of a text in published models, which the shapes of a BERT do not determine.
_MAX_LEN = 16
_CLIP_TEXT = {'causal': True, 'pool': 'eos'}
# Hugging Face's defaults of its config: GELU, epsilon, heads of image and text.
_DEFAULTS = {
  'clip': ('quick_gelu', 1e-5, 12, 8),
  'siglip': ('gelu_pytorch_tanh', 1e-6, 12, 12),
}
_WHOLE = 'CLIP or SigLIP of Vision Transformers'
# `model_type` of image towers without a text tower. Others have CLIP's.
_TOWERS = (
  'clip_vision_model', 'siglip_vision_model', 'metaclip_2_vision_model',
  'chinese_clip_vision_model', 'altclip_vision_model', 'clipseg_vision_model',
  'git_vision_model',
)  # fmt: skip
# Beginnings of names of towers that were saved alone.
_TOWER_NAMES = r'^(?=(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)'


class _Features(NamedTuple):
  """What distinguishes Hugging Face's image-text models."""

  classifier: str
  first_norm: bool
  causal: bool
  pool: str
  image_head: bool
  bias: bool


_FEATURES = {
  'clip': _Features(
    classifier='token',
    first_norm=True,
    causal=True,
    pool='eos',
    image_head=True,
    bias=False,
  ),
  'siglip': _Features(
    classifier='map',
    first_norm=False,
    causal=False,
    pool='last',
    image_head=False,
    bias=True,
  ),
}


def _naming(style: str) -> leaves.Naming:
  """Returns the naming of a 'clip', 'siglip' or 'open_clip'."""
  if style == 'open_clip':
    kind, column = 'open_clip', 1
    image, texts = 'visual.', ''
    old_names = ((r'^text\.', ''),)  # Models with a class for text.
    blocks, attention = 'transformer.resblocks.{0}.', '.attn.'
  else:
    kind, column = 'hf', 0
    image, texts = 'vision_model.', 'text_model.'
    old_names = ((_TOWER_NAMES, image),)
    blocks, attention = 'encoder.layers.{0}.', '.attention.'
  image_rows = leaves.column(_IMAGE_ROWS, column)
  text_rows = leaves.column(_TEXT_ROWS, column)
  block_rows = leaves.column(_BLOCK, column)
  return leaves.Naming(
    kind,
    _WHOLE,
    (
      ('img/', image, image_rows),
      ('img/Transformer/encoderblock_{0}/', image + blocks, block_rows),
      ('txt/', texts, text_rows),
      ('txt/Encoder_0/encoderblock_{0}/', texts + blocks, block_rows),
      ('', '', _OWN[style]),
    ),
    marks=(image + _name(image_rows, _POSEMB), texts + _name(text_rows, _EMBEDDING)),
    old_names=old_names,
    joined={f'{attention}in_proj_': tuple(f'{attention}{x}_proj.' for x in 'qkv')},
    program=f"Hugging Face's {style}",
  )


def _name(rows: Iterable[leaves.Row], path: str) -> str:
  """Returns the name elsewhere of a path in rows."""
  return next(row[2] for row in rows if row[0] == path)


class ImageTexts(base.Family):
  """LiT, CLIP and SigLIP."""

  noun = 'an image-text model'
  kind = 'lit'
  groups = (model_configs.Lit,)
  leaf = 'img/embedding/kernel'
  formats = ('npz', 'workdir')
  hf_types = ('clip', 'siglip', 'siglip2', 'siglip2_vision_model', *_TOWERS)
  computes = {  # noqa: RUF012
    **{f'image.{k}': v for k, v in vit.Classifiers.computes.items() if '.' in k},
    **{f'text.{k}': v for k, v in text.TextTransformers.computes.items()},
    'pp.tokenizer_name': None,
    'pp.max_len': None,
  }
  namings = {style: _naming(style) for style in _OWN}  # noqa: RUF012

  def naming(self, naming: str, names: Iterable[str]) -> leaves.Naming:
    """Returns the naming of CLIP, SigLIP or a tower that the names tell."""
    return self.namings[self._style(naming, names)]

  def _style(self, naming: str, names: Iterable[str]) -> str:
    """Returns the key in `namings`; Hugging Face has two with other names."""
    if naming != 'hf':
      return naming
    is_siglip = {'img/cls', 'vision_model.embeddings.class_embedding'}.isdisjoint(names)
    return 'siglip' if is_siglip else 'clip'

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: base.NumHeads
  ) -> dict[str, np.ndarray]:
    """A single number of heads is the image tower's."""
    if not isinstance(num_heads, tuple):
      num_heads = num_heads, None
    image_heads, text_heads = num_heads

    def heads_of(path: str) -> int | None:
      return image_heads if path.startswith(_IMAGE) else text_heads

    params = leaves.load(flat, self.naming(naming, flat), heads_of)
    for layer in _NO_BIAS:
      kernel = params.get(f'{layer}/kernel')
      if kernel is not None and f'{layer}/bias' not in params:
        params[f'{layer}/bias'] = np.zeros(kernel.shape[-1], kernel.dtype)
    return params if 'txt/pos_embedding' in params else _below(params, _IMAGE)

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    flat = dict(flat)
    is_clip = f'{_MAP}probe' not in flat
    for layer in _NO_BIAS if is_clip else ():
      if flat.pop(f'{layer}/bias').any():
        raise ValueError(
          f"'{layer}/bias' is not zero, and CLIP has no bias there: write this "
          'model as .npz or as a run (--to=npz, --to=workdir)'
        )
    return super().dump(flat, naming)

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    image_leaves, text_leaves = _below(flat, _IMAGE), _below(flat, _TEXT)
    image = vit.Classifiers().sizes(image_leaves, {})
    if text.Berts.leaf in text_leaves:
      tower = text.Berts().sizes(text_leaves, {})
      pp = {'max_len': min(_MAX_LEN, tower['num_positions'])}
    else:
      tower = text.TextTransformers().sizes(text_leaves, {})
      pp = {'max_len': text_leaves['pos_embedding'][1]}
    kind = tower.pop('kind')
    if posemb := image_leaves.get(_POSEMB):
      patches = posemb[1] - ('cls' in image_leaves)
      pp['size'] = vit_files.square(patches, ml_collections.ConfigDict(image))[0]
    fields = {
      'kind': 'lit',
      'image': image,
      'text_model': kind,
      'text': {'config': _published_bert(tower)} if kind == 'bert' else tower,
      'out_dim': (_head_width(image_leaves), _head_width(text_leaves)),
      'pp': pp,
    }
    if 'b' in flat:
      fields['bias_init'] = -10.0
    return fields

  def describe(self, fields: Mapping[str, Any]) -> str:
    image = vit.Classifiers().describe(fields['image'])
    if fields['text_model'] == 'bert':
      tower = text.Berts().describe(text.bert_fields(fields['text']['config']))
    else:
      tower = text.TextTransformers().describe(fields['text'])
    return f'{image}, with {tower}'

  def defaults(self, fields: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Taken from the published models with this text tower."""
    is_bert = fields['text_model'] == 'bert'
    config = model_configs.get_config('LiT-B16B' if is_bert else 'LiT-L16S')
    config.image.model_name = vit.Classifiers().describe(fields['image'])
    config.text = ml_collections.ConfigDict()
    return config

  def differences(
    self, config: Mapping[str, Any] | None, reference: Mapping[str, Any] | None
  ) -> Iterator[tuple[str, Any, Any]]:
    yield from super().differences(config, reference)
    tower, reference_tower = _bert_config(config), _bert_config(reference)
    if tower is None or reference_tower is None:
      return
    sizes = text.bert_fields(tower)
    reference_sizes = text.bert_fields(reference_tower)
    if sizes['num_heads'] != reference_sizes['num_heads']:
      yield 'text.config', sizes, reference_sizes

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    leaves.rename(flat, self.namings.get(naming, self.namings['clip']).old_names)
    style = self._style(naming, flat)
    is_naflex = style == 'siglip' and np.ndim(flat.get(_PATCHES)) == 2
    if is_naflex:
      flat[_PATCHES] = _as_convolution(flat[_PATCHES])
    is_tower = naming == 'hf' and not any(x.startswith('text_model.') for x in flat)
    if is_tower:
      description = _read_tower(sibling, flat, style)
    else:
      description = self._read_towers(sibling, flat, style)
      pp = _tokenizer_fields(sibling, style, is_naflex)
      description = description._replace(model={**description.model, 'pp': pp})
    return description._replace(image_size=None) if is_naflex else description

  def _read_towers(
    self, sibling: Callable[[str], epath.Path], flat: Mapping[str, Any], style: str
  ) -> descriptions.Description:
    """Returns what files say about both towers; ValueError if one is missing."""
    for name in self.namings[style].marks:
      if name not in flat:
        raise ValueError(f"it lacks '{name}': use the weights of a whole {_WHOLE}")
    if style == 'open_clip':
      return descriptions.read(sibling('open_clip_config.json'), _from_open_clip)
    rows = len(flat[_TOKENS])
    return descriptions.read(
      sibling('config.json'), lambda config: _from_hf(config, style, rows)
    )

  def stated_fields(self) -> dict[str, Any]:
    """Heads are not in the arrays of a BERT; its other sizes must agree with them."""
    return {**super().stated_fields(), 'text.config': dict[str, schema.Count]}

  def complete_npz(
    self, file: epath.Path, flat: Mapping[str, np.ndarray], fields: dict[str, Any]
  ) -> dict[str, Any]:
    """The vocabulary has the name of the weights."""
    tower = _below(flat, _TEXT)
    is_bert = text.Berts.leaf in tower
    if stated := fields.get('text', {}).get('config'):
      shapes = {path: x.shape for path, x in tower.items()}
      sizes = text.Berts().sizes(shapes, {}) if is_bert else {}
      sizes['num_heads'] = stated.get('num_heads')
      for key, value in stated.items():
        if value != sizes.get(key):
          raise ValueError(
            f'text.config.{key} is {value}, unlike the arrays: remove it'
          )
    pp = fields.get('pp', {})
    name = pp.get('tokenizer_name', 'bert' if is_bert else 'sentencepiece')
    vocabulary = file.with_suffix(f'.{text_towers.TOKENIZERS.get(name)}')
    if not vocabulary.exists():
      return fields
    return {**fields, 'pp': {'vocab_path': str(vocabulary), **pp}}

  def part(self, weights: Any, name: str) -> Any:
    if name not in _PARTS:
      return None
    model = weights.model.get(_PARTS[name]) or {}
    if name == 'txt' and 'config' in model:
      model = text.bert_fields(model['config'])
    return weights._replace(params=weights.params[name], model=model)

  def image_size(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    requested_size: tuple[int, int] | None,
  ) -> tuple[int, int]:
    height, width = vit_files.image_size(config.image, params['img'], requested_size)
    if height != width:
      raise ValueError(
        f'image_size={height},{width} must be a square for an image-text model '
        '(--image_size=SIZE)'
      )
    return height, width

  def shapes(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    num_classes: int,
    image_size: tuple[int, int] | None,
  ) -> dict[str, Any]:
    model = models.make_model(config)
    channels = leaves.channels(params['img'])
    images = jax.ShapeDtypeStruct((1, *(image_size or (224, 224)), channels), 'float32')
    tokens = jax.ShapeDtypeStruct((1, config.pp.max_len), 'int32')
    return jax.eval_shape(model.init, jax.random.key(0), images=images, tokens=tokens)

  def scaled_channels(self, flat: Mapping[str, np.ndarray]) -> int:
    """The image tower may be alone."""
    kernel = flat.get('img/embedding/kernel', flat.get('embedding/kernel'))
    return kernel.shape[2]

  def scaled(self, model: Any) -> Any:
    return vit_files.scaled(model, 'img')

  def npz_siblings(self, model: Any) -> dict[str, bytes]:
    vocabulary = model.metadata.get('vocabulary')
    if not vocabulary:
      return {}
    ending = text_towers.TOKENIZERS[model.config.pp.tokenizer_name]
    if ending == 'txt':
      return {'.txt': ''.join(f'{word}\n' for word in vocabulary).encode()}
    return {f'.{ending}': base64.b64decode(vocabulary[0])}

  def run(self, model: Any) -> dict[str, Any]:
    pp = {'channels': leaves.channels(model.params['img'])}
    is_clip = model.config.image.transformer.get('first_norm')
    if is_clip and not model.preparation.source:
      # CLIP resizes the short side, and crops the centre.
      pp['resize'] = model.image_size[0]
    return {
      'task': 'image_text',
      'pp': pp,
      'loss': 'softmax' if model.config.get('bias_init') is None else 'sigmoid',
      'task_options': {'unit_classes': _style_in_hf(model.config) is not None},
    }

  def metadata(self, model: Any) -> dict[str, Any]:
    return {'vocabulary': []}  # That of the model's file.

  def formats_of(self, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns 'hf' too for models that transformers computes."""
    return ('hf', *self.formats) if _style_in_hf(config) else self.formats

  def notes(self, model: Any, to: str) -> list[str]:
    """Warns that the vocabulary must be copied, unless it is written."""
    vocabulary = model.config.pp.get('vocab_path')
    is_written = to == 'npz' and model.metadata.get('vocabulary')
    if to == 'workdir' or is_written or not vocabulary:
      return []
    name = ' under their name, with its own ending' if to == 'npz' else ''
    return [
      f'the vocabulary is not in the weights: copy {vocabulary} to their folder{name}'
    ]

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    config = model.config
    image, tower = config.image, config.text
    style = _style_in_hf(config)
    width = _out_dims(config)[1]
    channels = leaves.channels(model.params['img'])
    text_fields = dict(
      model_type=f'{style}_text_model',
      **vit_files.hf_encoder(tower, tower.width),
      attention_dropout=0.0,
      vocab_size=tower.vocab_size,
      max_position_embeddings=model.params['txt']['pos_embedding'].shape[1],
      bos_token_id=max(tower.vocab_size - 2, 0),
      eos_token_id=tower.vocab_size - 1,
    )
    image_fields = dict(
      model_type=f'{style}_vision_model',
      **vit_files.hf_encoder(image.transformer, image.hidden_size),
      attention_dropout=0.0,
      image_size=model.image_size[0],
      patch_size=image.patches.size[0],
      num_channels=channels,
    )
    fields: dict[str, Any] = dict(
      model_type=style, text_config=text_fields, vision_config=image_fields
    )
    if style == 'clip':
      fields['architectures'] = ['CLIPModel']
      for group in (fields, text_fields, image_fields):
        group['projection_dim'] = width
    else:
      fields['architectures'] = ['SiglipModel']
      text_fields['projection_size'] = width
    processor = preparation.to_hf(model.preparation, model.image_size, channels)
    contents = {'config.json': fields, 'preprocessor_config.json': processor}
    return contents, ['the files of the tokenizer are not written']


def _published_bert(sizes: Mapping[str, int]) -> str | Mapping[str, int]:
  """Returns the name of a published BERT, or else the sizes."""
  for name in text_towers.BERTS:
    if text.bert_fields(name) == sizes:
      return name
  return sizes


def _tokenizer_fields(
  sibling: Callable[[str], epath.Path], style: str, is_naflex: bool
) -> dict[str, str]:
  """Returns the fields of `pp` that say which tokenizer a model has."""
  name = 'siglip' if style == 'siglip' else 'clip'
  kind = descriptions.read(sibling('tokenizer_config.json')).get('tokenizer_class')
  if style == 'siglip' and (is_naflex or str(kind).startswith(('Gemma', 'Siglip2'))):
    name = 'siglip2'
  pp = {'tokenizer_name': name}
  vocabulary = sibling('spiece.model' if name == 'siglip' else 'tokenizer.json')
  if vocabulary.exists():
    pp['vocab_path'] = str(vocabulary)
  return pp


def _head_width(shapes: leaves.Shapes) -> int | None:
  return shapes['head/kernel'][-1] if 'head/kernel' in shapes else None


def _read_tower(
  sibling: Callable[[str], epath.Path], flat: dict[str, np.ndarray], style: str
) -> descriptions.Description:
  """Returns what files say about an image tower alone; drops what it does not use."""
  has_classes = 'classifier.weight' in flat
  if has_classes and style == 'clip':
    raise ValueError(
      "its 'classifier' reads the mean of the patches before the last norm, unlike "
      'models of this package: load the tower without it'
    )
  unused = _POOLING if has_classes else 'visual_projection.'
  if names := [name for name in flat if name.startswith(unused)]:
    logging.warning('Ignored parameters: %s', arrays.join_names(sorted(names)))
  for name in names:
    del flat[name]
  gelu, eps, count, _ = _DEFAULTS[style]

  def describe(config: Mapping[str, Any]) -> descriptions.Description:
    image = descriptions.field(config, 'vision_config', dict, config)
    heads = descriptions.field(image, 'num_attention_heads', schema.Count, count)
    encoder = vit_files.from_hf_encoder(image, gelu if config else None, eps)
    return descriptions.Description(
      dict(transformer=encoder),
      descriptions.labels(config),
      _image_size(config, image),
      num_heads=heads if config else None,
    )

  return descriptions.read(sibling('config.json'), describe)


def _as_convolution(kernel: np.ndarray) -> np.ndarray:
  """Returns SigLIP 2's linear layer of patches [D, p * p * C] as [D, C, p, p]."""
  width, size = kernel.shape
  channels = 1 if math.isqrt(size) ** 2 == size else 3
  side = math.isqrt(size // channels)
  return kernel.reshape(width, side, side, channels).transpose(0, 3, 1, 2)


def _below(flat: Mapping[str, Any], start: str) -> dict[str, Any]:
  """Returns the entries whose path begins with `start`, without it."""
  return {k.removeprefix(start): x for k, x in flat.items() if k.startswith(start)}


def _bert_config(config: Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
  """Returns the `config` of a model's BERT; None if it has none."""
  tower = (config or {}).get('text') or {}
  return tower.get('config')


def _out_dims(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
  out = config.get('out_dim')
  return tuple(out) if isinstance(out, list | tuple) else (out, out)


def _style_in_hf(config: ml_collections.ConfigDict) -> str | None:
  """Returns which of Hugging Face's models has these fields, if any."""
  image = config.image
  tower = config.get('text') or {}
  encoder = image.get('transformer') or {}
  image_dim, text_dim = _out_dims(config)
  patch_height, patch_width = image.patches.size
  if (
    config.text_model != 'text_transformer'
    or image.get('resnet')
    or image.get('representation_size')
    or encoder.get('causal')
    or patch_height != patch_width
    or text_dim is None
    or not encoder.get('add_position_embedding', True)
    or vit.varied(encoder)
  ):
    return None
  features = _Features(
    classifier=image.get('classifier', 'token'),
    first_norm=bool(encoder.get('first_norm')),
    causal=bool(tower.get('causal')),
    pool=tower.get('pool', 'last'),
    image_head=image_dim is not None,
    bias=config.get('bias_init') is not None,
  )
  for style, style_features in _FEATURES.items():
    if features == style_features:
      return style
  return None


def _from_hf(
  config: Mapping[str, Any], style: str, rows: int
) -> descriptions.Description:
  """Returns what config.json of Hugging Face says."""
  kinds = (style, 'siglip2') if style == 'siglip' else (style,)
  descriptions.field(config, 'model_type', Literal[*kinds])
  gelu, eps, default_image_heads, default_text_heads = _DEFAULTS[style]
  image = _tower_config(config, 'vision')
  tower = _tower_config(config, 'text')
  stated_gelu = gelu if config else None
  encoder = vit_files.from_hf_encoder(image, stated_gelu, eps)
  text_fields = vit_files.from_hf_encoder(tower, stated_gelu, eps)
  image_heads = descriptions.field(
    image, 'num_attention_heads', schema.Count, default_image_heads
  )
  text_heads = descriptions.field(
    tower, 'num_attention_heads', schema.Count, default_text_heads
  )
  if style == 'siglip':
    descriptions.check_supported(image, vision_use_head=True)
  else:
    # Versions of transformers that wrote 2 look for the greatest number, too.
    end = descriptions.field(tower, 'eos_token_id', schema.Count, 49_407)
    if config and end not in (2, rows - 1):
      raise ValueError(
        f'eos_token_id is {end}, but in this package the end token is the greatest '
        f'number, here {rows - 1}'
      )
    text_fields |= _CLIP_TEXT
  return descriptions.Description(
    dict(image=dict(transformer=encoder), text=text_fields),
    image_size=_image_size(config, image),
    num_heads=(image_heads, text_heads) if config else None,
  )


def _tower_config(config: Mapping[str, Any], side: str) -> dict[str, Any]:
  """Returns the part of config.json about the 'vision' or the 'text' tower."""
  # Old files have NAME_dict, which replaces the other one.
  old_config = descriptions.field(config, f'{side}_config_dict', dict)
  return old_config or descriptions.field(config, f'{side}_config', dict, {})


def _image_size(
  config: Mapping[str, Any], image: Mapping[str, Any]
) -> tuple[int, int] | None:
  """Returns the size that a config's image tower has; without a config it is unknown."""
  default = 224 if config else None
  return vit_files.pair(descriptions.field(image, 'image_size', schema.Size, default))


def _from_open_clip(config: Mapping[str, Any]) -> descriptions.Description:
  """Returns what open_clip_config.json says."""
  model = descriptions.field(config, 'model_cfg', dict, {})
  image = descriptions.field(model, 'vision_cfg', dict, {})
  tower = descriptions.field(model, 'text_cfg', dict, {})
  descriptions.check_supported(
    image,
    pool_type='tok',
    global_average_pool=False,
    timm_model_name=None,
    attentional_pool=False,
    norm_kwargs=None,
    act_kwargs=None,
  )
  descriptions.check_supported(
    tower,
    pool_type='argmax',
    no_causal_mask=False,
    hf_model_name=None,
    norm_kwargs=None,
    act_kwargs=None,
  )
  is_quick = descriptions.field(model, 'quick_gelu', bool, False)
  gelu, num_heads = None, None
  if config:
    gelu = 'quick' if is_quick else 'erf'
    width = descriptions.field(image, 'width', schema.Count, 768)
    head_width = descriptions.field(image, 'head_width', schema.Count, 64)
    text_heads = descriptions.field(tower, 'heads', schema.Count, 8)
    num_heads = max(1, width // head_width), text_heads
  fields = dict(gelu=gelu, norm_eps=1e-5)
  return descriptions.Description(
    dict(image=dict(transformer=fields), text={**fields, **_CLIP_TEXT}),
    image_size=_image_size(config, image),
    num_heads=num_heads,
  )
