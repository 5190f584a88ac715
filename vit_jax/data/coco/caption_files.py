"""Captions of images in COCO's format: annotations/captions_<split>.json.

  {"images": [{"id": 7, "file_name": "a.jpg"}],
   "annotations": [{"image_id": 7, "caption": "A cat on a mat."}]}

The feature `captions` of an image has all of its captions, in the order of the file.
Images without a caption are left out. For the folders of images see layout.py.
"""

import msgspec

from vit_jax import console
from vit_jax.data import manifest_files, slices
from vit_jax.data.coco import annotation_files, layout

FEATURE = 'captions'


class _Caption(msgspec.Struct, gc=False):
  image_id: int
  caption: str


class _File(msgspec.Struct):
  images: list[annotation_files.Image]
  annotations: list[_Caption]


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has captions for all parts of a split."""
  return all(layout.has(root, base, FEATURE) for base in slices.bases(split))


def lines(root: str, base: str) -> list[manifest_files.Line]:
  """Returns the images of a split with their captions, as lines of a manifest."""
  place = layout.find(root, base, FEATURE)
  found = annotation_files.parse(place.path, _File, 'captions')
  texts = {image.id: [] for image in found.images}
  for annotation in found.annotations:
    if annotation.image_id not in texts:
      raise ValueError(
        f"'{place.path}': image_id {annotation.image_id} of the caption "
        f"'{annotation.caption[:40]}' is not in 'images': add the image, or remove "
        'the caption'
      )
    texts[annotation.image_id].append(annotation.caption.strip())
  images = [image for image in found.images if texts[image.id]]
  if not images:
    raise ValueError(f"'{place.path}' has no captions: add some")
  if len(images) < len(found.images):
    lost = len(found.images) - len(images)
    images_ = console.counted(lost, 'image')
    console.say(f"Left out {images_} of '{place.path}' without a caption.")
  files = [image.file_name for image in images]
  where = layout.folder_of(place.path, place.folders, files)
  return [
    manifest_files.Line(
      place.path,
      f' image {image.id}',
      where,
      {'image': image.file_name, FEATURE: texts[image.id]},
    )
    for image in images
  ]
