"""Installs vit_jax; `pip install -e '.[test]'` for work on it.

pyproject.toml has the metadata, except for what depends on the address of the
repository, which `REPOSITORY_URL` states when a release is built.
"""

import os
import pathlib
import re

import setuptools


def read_description(repository: str) -> str:
  """Returns the README, whose links work outside the repository if it has an address."""
  text = pathlib.Path(__file__).with_name('README.md').read_text()
  if not repository:
    return text
  text = re.sub(r'\]\((?=docs/pictures/)', f']({repository}/raw/main/', text)
  return re.sub(r'\]\((?!https?:|#)', f']({repository}/blob/main/', text)


repository = os.environ.get('REPOSITORY_URL', '')
urls = {
  'Source': '',
  'Documentation': '/blob/main/docs/README.md',
  'Changelog': '/blob/main/CHANGELOG.md',
  'Issues': '/issues',
}
setuptools.setup(
  long_description=read_description(repository),
  long_description_content_type='text/markdown',
  project_urls={name: repository + path for name, path in urls.items() if repository},
  packages=setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
  # The config files lie in the top-level folder.
  package_dir={'vit_jax.configs': 'configs'},
  package_data={'vit_jax': ['py.typed']},
)
