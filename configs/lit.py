r"""Tunes a text tower to a locked image tower: LiT, on any images with texts.

  vit_jax train --config=configs/lit.py:b16b,/path/to/pairs \
    --workdir=/tmp/lit
  vit_jax train --config=configs/lit.py:l16s,coco_captions,siglip \
    --config.pretrained="{'img': '/data/ViT-L_16.npz'}" --workdir=/tmp/lit

The argument is MODEL,DATA, optionally followed by LOSS. MODEL is b16b, b16b_2,
l16l, l16s or l16ti: an image tower B/16 or L/16 with BERT-base, BERT-large, or a
small Transformer. DATA is a TFDS name or a folder, see docs/image_text.md. LOSS is
lit (softmax over the batch, by default) or siglip (a sigmoid per pair).

The image tower starts from the published ImageNet-21k weights and is frozen;
the text tower starts from scratch, or from BERT's weights, with
{'img': PATH, 'txt': 'hf://google-bert/bert-base-uncased'}.

The recipe follows the released training code (big_vision, lit_coco). The paper's
models saw CC12M and YFCC100M (batch 16,384); expected of them: B16B_2 73.9 %
zero-shot on ImageNet, L16L 75.7 %.
"""

import ml_collections

from vit_jax.configs import common, models

LOSSES = ('lit', 'siglip')
# Name on the command line -> model.
MODELS = {name.removeprefix('LiT-').lower(): name for name in models.LITS}
# Published vocabularies of BERT and of SentencePiece.
_VOCABULARIES = {
  'bert': 'hf://google-bert/bert-base-uncased/vocab.txt',
  'sentencepiece': 'gs://vit_models/lit/LiT-L16S.model',
}


def get_config(arg: str = 'b16b_2,coco_captions') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA' or 'MODEL,DATA,LOSS'."""
  example = 'lit.py:b16b,/path/to/pairs'
  name, dataset, settings = common.choose(arg, {'loss': LOSSES}, example)
  if name not in MODELS:
    raise ValueError(
      f"model '{name}' is unknown: use one of {', '.join(MODELS)}, as in "
      f'--config=configs/{example}'
    )
  config = common.set_dataset(common.get_config(), dataset)
  config.task = 'image_text'
  config.model = models.get_config(MODELS[name])
  image = config.model.image.model_name
  config.model.image.transformer.dropout_rate = 0.0
  config.model.pp.vocab_path = _VOCABULARIES[config.model.pp.tokenizer_name]
  config.pretrained = {
    'img': f'gs://vit_models/imagenet21k/{image}.npz',
  }
  config.pretrained_dir = None
  # The head of the image tower, which LiT-B16B has, is trained.
  config.lr_multipliers = (('img/head/', 1.0), ('img/', 0.0))
  if config.model.out_dim[0] is None:
    config.lr_multipliers = (('img/', 0.0),)
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  config.model.temperature_init = models.Lit.temperature_init
  config.pp.update(crop=224, crop_area=None, flip=True, match_pretrained=True)
  if settings['loss'] == 'siglip':
    config.loss = 'sigmoid'
    config.model.bias_init = -10.0  # arXiv 2303.15343, section 3.2.
  config.update(optimizer='adam', optim_dtype='float32', base_lr=1e-3)
  config.update(weight_decay=0.01, grad_norm_clip=1.0, decay_type='cosine')
  config.update(batch=4096, batch_eval=1024, total_steps=5_000)
  config.update(warmup_steps=150, eval_every=500, checkpoint_every=500)
  return config
