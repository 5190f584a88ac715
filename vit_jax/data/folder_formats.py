"""The interface of a folder format: a way to store a data set in a folder.

`FORMATS` of vit_jax/data/sources.py lists the formats of this package; the first one
that recognizes a split opens it.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import ml_collections

from vit_jax.data import records
from vit_jax.data.images import index as index_lib, multichannel


class Request(NamedTuple):
  """The split to open, see sources.open_split for its fields."""

  config: ml_collections.ConfigDict
  root: str  # The folder.
  split: str
  features: Sequence[str]
  class_names: Sequence[str] | None
  workdir: str | None


@dataclasses.dataclass(frozen=True)
class Listing:
  """Images in files, to check before a run; `explain` is that of checking.usable."""

  index: index_lib.Index
  explain: Callable[[bytes, int], str] | None = None


class FolderFormat(abc.ABC):
  """A way to store a data set in a folder.

  Attributes:
    title: names the format in messages, 'Parquet files'.
    is_listed: whether images are files, which `vit_jax index` can check.
  """

  title = 'files'
  is_listed = False

  @abc.abstractmethod
  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    """Returns whether a folder has a split in this format.

    Args:
      root: the folder.
      split: in the notation of TFDS; it is recognized if any part of it exists, so
        that `open` can name a missing part.
      features: requested names of features, in case only some are in this format.
    """

  @abc.abstractmethod
  def open(self, request: Request) -> records.Source:
    """Opens a split; raises ValueError or FileNotFoundError if it is wrong."""

  def list_images(self, root: str, split: str) -> Listing | None:
    """Returns the images of a split; None if it has none in this format."""
    del root, split
    return None


class ListedFormat(FolderFormat):
  """A format whose images are files: a subclass reads their paths and features."""

  is_listed = True

  @abc.abstractmethod
  def read_split(
    self, request: Request, **checks: Any
  ) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Reads the requested features, see manifest.read_split for `checks` and results."""

  def open(self, request: Request) -> records.FolderSource:
    limit = request.config.max_image_pixels
    columns, names = self.read_split(
      request,
      broken=request.config.broken_images,
      max_pixels=limit,
      workdir=request.workdir,
      channels=multichannel.stored_channels(request.config.pp),
    )
    return records.FolderSource(columns, names, limit)
