"""What reading, writing and identifying weights require of a family of models.

A new family needs its namings (tables of layers, see leaves.py), `sizes`,
`describe`, `read_description` and `files`, and an entry in families.py.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import math
from typing import Any

from etils import epath
import jax
import ml_collections
import numpy as np

from vit_jax import models
from vit_jax.configs import schema
from vit_jax.weights import descriptions, preparation as preparation_lib
from vit_jax.weights.families import leaves

# A pair is for an image tower and a text tower; None: unknown.
NumHeads = int | tuple[int | None, int | None] | None


class Family(abc.ABC):
  """A family of models: their names elsewhere, and the files next to weights.

  `flat` are arrays by name, or by '/'-joined path in this package. A `naming` is
  the kind of a leaves.Naming: 'timm', 'hf', ... A `model` is a
  vit_jax.weights.writing.Model, and `to` a format of vit_jax.weights.convert.

  Attributes:
    noun: one of its models, in words.
    kind: `config.model.kind`; None for the family of all other models.
    leaf: a leaf of a model's parameters that no other family has; likewise.
    formats: formats that hold its models.
    computes: fields that change what a model computes, but no shapes, by dotted
      key, and their defaults; None if unknown for weights.
    hf_types: `model_type` of its models in Hugging Face's config.json.
    preparation: how images are prepared where no file says it.
    pads: whether images may be resized within a square, and padded.
    normalization: mean and deviation by which its models normalise pixels from 0 to 1.
    head: a leaf whose last dimension is the number of classes.
    modules: (regex, replacement) from names in Hugging Face's files to modules there;
      () for models that are not written as PEFT.
    groups: the groups of fields that its models have in configs/models.py.
    namings: other programs' names of its arrays, by kind or by variants of it.
  """

  noun: str
  kind: str | None = None
  leaf: str | None = None
  formats: tuple[str, ...]
  computes: Mapping[str, Any]
  hf_types: tuple[str, ...] = ()
  preparation = preparation_lib.Preparation()
  pads = False
  normalization: tuple[Any, Any] = (0.5, 0.5)
  head: str = 'head/bias'
  modules: tuple[tuple[str, str], ...] = ()
  groups: tuple[type, ...]
  namings: Mapping[str, leaves.Naming] = {}

  def detect(self, names: Iterable[str]) -> str | None:
    """Returns the naming of a state dict, or None if it is of no such model."""
    return next((n.kind for n in self.namings.values() if n.fits(names)), None)

  def naming(self, naming: str, names: Mapping[str, Any]) -> leaves.Naming:
    """Returns the variant of a naming for arrays by path, or by name elsewhere."""
    return self.namings[naming]

  def naming_of(self, config: Mapping[str, Any], to: str) -> str:
    """Returns the kind of the names that `dump` gives a model in a format."""
    return to

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: NumHeads
  ) -> dict[str, np.ndarray]:
    """Converts a state dict, which it empties, to arrays by path; see leaves.load."""
    if isinstance(num_heads, tuple):
      num_heads = num_heads[0]
    return leaves.load(flat, self.naming(naming, flat), num_heads)

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """Converts arrays by path to a state dict; ValueError if there is none."""
    return leaves.dump(flat, self.naming(naming, flat))

  @abc.abstractmethod
  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the fields of the model that has leaves of these shapes.

    Args:
      flat: shapes by path.
      known_fields: fields that cannot be inferred from shapes.

    Raises:
      KeyError, IndexError, ValueError: if leaves are missing, or have other ranks.
    """

  @abc.abstractmethod
  def describe(self, fields: Mapping[str, Any]) -> str:
    """Names a model by the fields that `sizes` returns."""

  def defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns further fields of a model that is not in the table of sizes."""
    return {}

  def stated_fields(self) -> dict[str, Any]:
    """Returns the types of the fields of `computes`, see schema."""
    kinds: dict[str, Any] = {}
    for group in self.groups:
      kinds |= schema.flat(group)
    return {key: kinds[key] for key in self.computes}

  def num_classes(self, flat: Mapping[str, Any]) -> int:
    """Returns the number of classes of a head; 0 without a head."""
    return math.prod(flat[self.head].shape[-1:]) if self.head in flat else 0

  def checked_names(self, names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Returns the names of the classes of a head; ValueError unless all have one."""
    if len(names) != num_classes:
      raise ValueError(
        f'the number of class names is {len(names)}, but the head has {num_classes} '
        'outputs: name each class, or none'
      )
    return tuple(names)

  def differences(
    self, config: Mapping[str, Any] | None, reference: Mapping[str, Any] | None
  ) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value, reference value) where two models compute differently."""
    for key, default in self.computes.items():
      *groups, name = key.split('.')
      fields = _subfields(config, groups)
      reference_fields = _subfields(reference, groups)
      if fields is None or reference_fields is None:
        continue
      value = fields.get(name, default)
      reference_value = reference_fields.get(name, default)
      if value != reference_value and None not in (value, reference_value):
        yield key, value, reference_value

  def difference_notes(
    self,
    subject: str,
    config: Mapping[str, Any] | None,
    reference: Mapping[str, Any] | None,
  ) -> list[str]:
    """Returns notes on `differences`.

    They begin with `subject`, such as 'timm computes', whose models are `reference`.
    """
    warnings = []
    for key, value, reference_value in self.differences(config, reference):
      warnings.append(
        f'{subject} with model.{key}={reference_value}, but these weights were made '
        f'for {value}: logits differ a little'
      )
    return warnings

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    """Returns what the files next to weights say about them.

    Args:
      sibling: returns the path of a file next to the weights by its name; the file
        need not exist.
      file: the weights.
      flat: their arrays; may be renamed and split as `load` does, which is called next.
      naming: the naming of these arrays.
    """
    return descriptions.Description({})

  def image_size(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    requested_size: tuple[int, int] | None,
  ) -> tuple[int, int] | None:
    """Returns (height, width) of a model's images; None for any size."""
    return requested_size

  def inputs(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    image_size: tuple[int, int],
  ) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a model's input, one image."""
    shape = (1, *image_size, leaves.channels(params))
    return jax.ShapeDtypeStruct(shape, np.dtype('float32'))

  def shapes(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    num_classes: int,
    image_size: tuple[int, int] | None,
  ) -> dict[str, Any]:
    """Returns the shapes of a model's variables."""
    model = models.make_model(config, num_classes=num_classes)
    inputs = self.inputs(config, params, image_size or (224, 224))
    init = functools.partial(model.init, train=False)
    return jax.eval_shape(init, jax.random.key(0), inputs)

  def part(self, weights: Any, name: str) -> Any:
    """Returns the weights of the part of a model with this key; None if there is none."""
    return None

  def complete_npz(
    self, file: epath.Path, flat: Mapping[str, np.ndarray], fields: dict[str, Any]
  ) -> dict[str, Any]:
    """Adds to `fields`, fields of a model, what files next to an .npz say."""
    return fields

  def scaled_channels(self, flat: Mapping[str, np.ndarray]) -> int:
    """Returns the channels whose scaling `scaled` absorbs; 0 for other models."""
    return 0

  def scaled(self, model: Any) -> Any:
    """Returns a model that reads pixels from -1 to 1, as runs have them."""
    return model

  def npz_siblings(self, model: Any) -> dict[str, bytes]:
    """Returns files to write next to an .npz by their endings, such as '.txt'."""
    return {}

  def run(self, model: Any) -> dict[str, Any]:
    """Returns the keys of a run's config that a model determines."""
    return {}

  def metadata(self, model: Any) -> dict[str, Any]:
    """Returns default metadata of a run, for what the weights lack."""
    return {}

  def check(self, model: Any) -> None:
    """Raises ValueError if a model's metadata do not fit its weights."""
    return None

  def missing(self, config: Mapping[str, Any], to: str) -> list[str]:
    """Returns the fields of a model, as 'key=value', that a format cannot hold."""
    return []

  def formats_of(self, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the formats that hold a model."""
    return tuple(to for to in self.formats if not self.missing(config, to))

  def notes(self, model: Any, to: str) -> list[str]:
    """Returns what a user should know about a model in a format."""
    return []

  def buffers(self, model: Any) -> dict[str, np.ndarray]:
    """Returns arrays of the other program that are not parameters, by name."""
    return {}

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    """Returns JSON files to write next to the weights by name, and notes.

    ValueError if the other program has no such model.
    """
    return {}, []


def _subfields(fields: Any, groups: Iterable[str]) -> Any:
  """Returns the fields of a nested group; None if there is no such group."""
  for group in groups:
    fields = (fields or {}).get(group)
  return fields
