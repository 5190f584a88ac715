"""Captions of images in COCO's format: annotations/captions_<split>.json.

  {"images": [{"id": 7, "file_name": "a.jpg"}],
   "annotations": [{"image_id": 7, "caption": "A cat on a mat."}]}

The feature `captions` of an image has all of its captions, in the order of the file.
Images without a caption are left out. For the folders of images see layout.py.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from vit_jax import console
from vit_jax.data import folder_formats, manifest, manifest_files, slices
from vit_jax.data.coco import annotation_files, layout

FEATURE = 'captions'


class _Caption(msgspec.Struct, gc=False):
  image_id: int
  caption: str


class _File(msgspec.Struct):
  images: list[annotation_files.Image]
  annotations: list[_Caption]


class Format(folder_formats.ListedFormat):
  """The folder format of this module, for data whose captions are requested."""

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    is_requested = any(name.rstrip('?') == FEATURE for name in features)
    return is_requested and exists(root, split)

  def read_split(
    self, request: folder_formats.Request, **checks: Any
  ) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    return manifest.read_split(
      request.root,
      request.split,
      request.features,
      request.class_names,
      lines,
      **checks,
    )


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has captions for all parts of a split."""
  return all(layout.has(root, base, FEATURE) for base in slices.bases(split))


def lines(root: str, base: str) -> list[manifest_files.Line]:
  """Returns the images of a split with their captions, as lines of a manifest."""
  place = layout.find(root, base, FEATURE)
  content = annotation_files.parse(place.path, _File, 'captions')
  texts: dict[int, list[str]] = {image.id: [] for image in content.images}
  for annotation in content.annotations:
    if annotation.image_id not in texts:
      raise ValueError(
        f"'{place.path}': image_id {annotation.image_id} of the caption "
        f"'{annotation.caption[:40]}' is not in 'images': add the image, or remove "
        'the caption'
      )
    texts[annotation.image_id].append(annotation.caption.strip())
  images = [image for image in content.images if texts[image.id]]
  if not images:
    raise ValueError(f"'{place.path}' has no captions: add some")
  if len(images) < len(content.images):
    without_caption = console.pluralize(len(content.images) - len(images), 'image')
    console.log(f"Left out {without_caption} of '{place.path}' without a caption.")
  files = [image.file_name for image in images]
  folder = layout.folder_of(place.path, place.folders, files)
  lines = []
  for image in images:
    values = {'image': image.file_name, FEATURE: texts[image.id]}
    origin = f' image {image.id}'
    lines.append(manifest_files.Line(place.path, origin, folder, values))
  return lines
