"""Checks that an installation without extras works; prints 'ok'.

  python -P tests/base_install.py

The workflow `wheel` runs it with the wheel in bare environments.
"""

import pathlib
import sys
import tempfile

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from vit_jax import checkpoint, console, models, predict, test_utils
from vit_jax.configs import models as model_configs
from vit_jax.weights import convert

with tempfile.TemporaryDirectory() as folder:
  npz, timm = pathlib.Path(folder, 'model.npz'), pathlib.Path(folder, 'timm')
  config = model_configs.get_config('testing')
  test_utils.create_checkpoint(config, str(npz))
  model = models.make_model(config, num_classes=1)
  shapes = jax.eval_shape(
    lambda: model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), train=False)
  )
  params = checkpoint.load_pretrained(
    pretrained_path=str(npz),
    init_params=jax.tree.map(lambda x: np.zeros(x.shape), shapes['params']),
    model_config=config,
  )
  convert.convert(str(npz), str(timm), 'timm')
  written = safetensors.numpy.load_file(timm / 'model.safetensors')
  served = pathlib.Path(folder, 'served')
  with console.muted():
    predict.load_weights(str(timm)).export(served, 'stablehlo')
  exported = jax.export.deserialize((served / 'model.stablehlo').read_bytes())

kernel = params['embedding']['kernel']  # [height, width, in, out]
assert np.any(kernel)
np.testing.assert_array_equal(
  written['patch_embed.proj.weight'], np.transpose(kernel, (3, 2, 0, 1))
)
assert exported.platforms == ('cpu', 'cuda', 'tpu')
assert 'tensorflow' not in sys.modules
print('ok')
