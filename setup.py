"""Installs vit_jax; `pip install -e '.[test]'` for work on it."""

import pathlib

import setuptools

# PyPI has a small TensorFlow without CUDA for these machines only. It reads and
# augments images here; nothing of the models runs in it.
_SMALL = "platform_system == 'Linux' and platform_machine == 'x86_64'"
_OTHER = "platform_system != 'Linux' or platform_machine != 'x86_64'"

_TRAIN = [
  'array-record',
  'clu',
  'faster-coco-eval>=1.8',  # Checks run lengths.
  'importlib_resources',  # Imported by tensorflow-datasets, not declared.
  'matplotlib',  # Pictures in TensorBoard and in workdirs.
  'orbax-checkpoint',
  'scikit-learn',
  'tensorboard',  # Imported by clu.metric_writers, not declared.
  f'tensorflow-cpu; {_SMALL}',
  f'tensorflow; {_OTHER}',
  'tensorflow-datasets',
]

_DOCS = ['mkdocs-material', 'mkdocstrings[python]']

setuptools.setup(
  name='vit_jax',
  version='0.1.0',
  description='The Vision Transformer in JAX and Flax: train, fine-tune, inspect',
  long_description=pathlib.Path(__file__).with_name('README.md').read_text(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  packages=[
    'vit_jax',
    'vit_jax.data.augmentation',
    'vit_jax.commands',
    'vit_jax.configs',
    'vit_jax.data',
    'vit_jax.data.coco',
    'vit_jax.data.images',
    'vit_jax.data.tfds',
    'vit_jax.distributed',
    'vit_jax.evaluators',
    'vit_jax.figures',
    'vit_jax.inference',
    'vit_jax.layers',
    'vit_jax.learning',
    'vit_jax.planning',
    'vit_jax.run',
    'vit_jax.studies',
    'vit_jax.tasks',
    'vit_jax.tasks.detection',
    'vit_jax.tasks.image_text',
    'vit_jax.tasks.pixels',
    'vit_jax.data.texts',
    'vit_jax.weights',
    'vit_jax.weights.families',
  ],
  # The config files lie in the top-level folder. find_packages would not see
  # them, and a wheel would silently lack them.
  package_dir={'vit_jax.configs': 'configs'},
  package_data={'vit_jax': ['py.typed']},
  # What the models, their weights, conversion and export need.
  install_requires=[
    'absl-py',
    'etils[epath]',
    'flax',
    'google-crc32c',  # Checksums of checkpoints and tables.
    'jax>=0.10',
    'ml-collections',
    'msgspec',
    'numpy',
    'optax>=0.2.7',
    'Pillow',
    'safetensors',
    'scipy',
    'threadpoolctl',
    'tqdm',
  ],
  entry_points={'console_scripts': ['vit_jax = vit_jax.__main__:main']},
  extras_require={
    'train': _TRAIN,
    'test': [
      *_TRAIN,
      *_DOCS,
      'fastapi',
      'gradio>=6',
      'huggingface_hub>=1.31',  # parse_hf_uri for URLs too.
      'ipykernel',
      'ipywidgets',
      'jupytext',
      'libtpu',
      'nbclient',
      'nbformat',
      'mypy',
      'onnx',
      'onnxruntime',
      'pandas',
      'pillow-heif',
      'playwright',
      'pyarrow',
      'pycocotools',
      'pytest',
      'pytest-xdist',
      'ruff',
      'sentencepiece',
      'tokenizers',
      # The other implementations, to compare with. This version of PyTorch, for
      # which its CPU build is at hand where this project is tested.
      'timm',
      'torch==2.13.0',
      'transformers',
      'uvicorn',
    ],
    'onnx': ['onnx', 'onnxruntime'],
    'docs': _DOCS,
    'demo': ['gradio>=6', 'matplotlib'],
    'plots': ['matplotlib'],
    'heif': ['pillow-heif'],  # Reads the photos of iPhones.
    'interop': ['huggingface_hub>=1.31', 'jinja2'],
    'tables': ['pyarrow'],
    'text': ['sentencepiece', 'tokenizers'],
    'torch': ['torch>=2.6'],  # Before, a .bin could run code of its own.
    'plan': ['libtpu'],
    'wandb': ['wandb'],
    # The part of MLflow that writes to servers, and to SQLite, its default.
    'mlflow': ['mlflow-skinny', 'alembic', 'sqlalchemy'],
    'colab': [*_TRAIN, 'huggingface_hub>=1.31', 'matplotlib', 'pandas'],
    'tpu': ['jax[tpu]'],
    # NVIDIA's driver decides: from 580 on for CUDA 13, from 525 on for CUDA 12.
    'cuda': ['jax[cuda13]'],
    'cuda12': ['jax[cuda12]'],
    'cuda13': ['jax[cuda13]'],
  },
  classifiers=[
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
