"""What reading, writing and identifying weights ask a family of models."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
import functools
import math
from typing import Any

from etils import epath
import flax.traverse_util
import jax
import numpy as np

from vit_jax import models
from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves


class Family(abc.ABC):
  """A family of models: their names elsewhere, and the files beside weights.

  `flat` are arrays by name, or by '/'-joined path in this package. A naming is
  one that `detect` returns: 'timm', 'hf', ... A `model` is a
  vit_jax.weights.writing.Model, and `to` a format of vit_jax.weights.convert.

  Attributes:
    words: one of its models, in words.
    kind: `config.model.kind`; None for the family of all other models.
    leaf: a leaf of a model's parameters that no other family has; likewise.
    formats: formats that hold its models.
    computes: fields that change what a model computes, but no shapes, by dotted
      key, and their defaults; None if those of weights are unknown.
    hf_types: `model_type` of its models in Hugging Face's config.json.
    head: a leaf whose last dimension are the classes.
  """

  words: str
  kind: str | None = None
  leaf: str | None = None
  formats: tuple[str, ...]
  computes: Mapping[str, Any]
  hf_types: tuple[str, ...] = ()
  head: str = 'head/bias'

  @abc.abstractmethod
  def detect(self, names: Iterable[str]) -> str | None:
    """Returns the naming of a state dict, or None if it is of no such model."""

  @abc.abstractmethod
  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads
  ) -> dict[str, np.ndarray]:
    """Converts a state dict, which it empties, to arrays by path.

    `num_heads` is that of vit_jax.weights.descriptions.Description. ValueError
    for arrays that no such model has, or if the number does not suit them.
    """

  @abc.abstractmethod
  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """Converts arrays by path to a state dict; ValueError if there is none."""

  @abc.abstractmethod
  def sizes(
    self, flat: Mapping[str, tuple[int, ...]], told: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the fields of the model that has leaves of these shapes.

    `told` are fields that shapes do not tell. Raises KeyError, IndexError or
    ValueError if leaves are missing, or have other numbers of dimensions.
    """

  @abc.abstractmethod
  def describe(self, fields: Mapping[str, Any]) -> str:
    """Names a model by the fields that `sizes` returns."""

  def defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns further fields of a model that is in no table of sizes."""
    return {}

  def num_classes(self, flat: Mapping[str, Any]) -> int:
    """Returns the number of classes that leaves tell apart; 0 for no head."""
    return math.prod(flat[self.head].shape[-1:]) if self.head in flat else 0

  def differences(self, config, other) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value, other value) where two models compute differently."""
    for key, default in self.computes.items():
      group, _, name = key.rpartition('.')
      ours, theirs = config, other
      for part in filter(None, group.split('.')):
        ours, theirs = ((c or {}).get(part) for c in (ours, theirs))
      if ours is not None and theirs is not None:
        here, there = ours.get(name, default), theirs.get(name, default)
        if here != there and None not in (here, there):
          yield key, here, there

  @abc.abstractmethod
  def read_beside(
    self,
    beside: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    """Returns what other files tell about the weights in `file`, arrays `flat`.

    It may rename and split arrays as `load` does, which is called next.

    `beside` returns the path of the file of a name beside the weights, which
    need not exist. ValueError if a field has a wrong value, or one that no
    model here has.
    """

  def image_size(
    self, config, params, given: tuple[int, int] | None
  ) -> tuple[int, int] | None:
    """Returns (height, width) of a model's images; None for any size.

    ValueError if the size given does not suit the parameters, or none is given
    and they tell none.
    """
    return given

  def inputs(self, config, params, image_size) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a model's input, one image."""
    flat = flax.traverse_util.flatten_dict(params, sep='/')
    shape = (1, *image_size, leaves.channels(flat))
    return jax.ShapeDtypeStruct(shape, np.dtype('float32'))

  def shapes(self, config, params, num_classes, image_size) -> dict[str, Any]:
    """Returns the shapes of a model's variables."""
    model = models.make_model(config, num_classes=num_classes)
    inputs = self.inputs(config, params, image_size or (224, 224))
    init = functools.partial(model.init, train=False)
    return jax.eval_shape(init, jax.random.key(0), inputs)

  def part(self, weights, name: str):
    """Returns the weights of a part of a model alone, by its parameters' name.

    `weights` and the result are a vit_jax.weights.reading.Weights. None if
    models of this family have no such part.
    """
    return None

  def beside_npz(
    self,
    file: epath.Path,
    flat: Mapping[str, np.ndarray],
    told: dict[str, Any],
  ) -> dict[str, Any]:
    """Adds what other files beside an .npz tell to `told`, fields of the model."""
    return told

  def scaled(self, model):
    """Returns a model that reads pixels from -1 to 1, as runs have them."""
    return model

  def beside(self, model) -> dict[str, bytes]:
    """Returns files to write beside an .npz by their endings, such as '.txt'."""
    return {}

  def run(self, model) -> dict[str, Any]:
    """Returns what a model determines of the config of its run."""
    return {}

  def metadata(self, model) -> dict[str, Any]:
    """Returns metadata of a run that weights do not bring along."""
    return {}

  def check(self, model) -> None:
    """Raises ValueError if a model's metadata do not fit its weights."""
    return None

  def formats_of(self, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the formats that hold a model."""
    return self.formats

  def notes(self, model, to: str) -> list[str]:
    """Returns what a user should know of a model in a format."""
    return []

  @abc.abstractmethod
  def files(self, model, to: str) -> tuple[dict[str, dict], list[str]]:
    """Returns JSON files to write beside the weights by name, and notes.

    ValueError if the other program has no such model.
    """
