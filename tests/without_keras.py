"""Imports TensorFlow for processes that fork: none of its threads run yet."""

from vit_jax import console

console.import_tensorflow()
