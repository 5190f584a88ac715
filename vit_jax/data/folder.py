"""A folder of images as a data set: `root/<split>/<class>/<image>`.

Everything that can be wrong with such a folder is found here, before training.
"""

from collections.abc import Sequence
import concurrent.futures
import hashlib
import os

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
import tqdm

from vit_jax.data import images

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif')
BROKEN_IMAGES = ('error', 'skip', 'trust')
_LAYOUT = 'a folder must hold train/<class>/* and test/<class>/*'


def is_folder(dataset: str) -> bool:
  """Tells a folder from the name of a TFDS data set.

  Raises:
    FileNotFoundError: if it is written as a path, but there is no such folder.
  """
  if tf.io.gfile.isdir(dataset):
    return True
  if dataset.startswith(('/', '.', '~')) or '://' in dataset:
    raise FileNotFoundError(
      f"dataset='{dataset}' is not a folder that exists: {_LAYOUT} "
      '(config.dataset)'
    )
  return False


def list_split(
  root: str,
  split: str,
  class_names: Sequence[str] | None = None,
  broken: str = 'error',
):
  """Lists the images of a split.

  Args:
    root: the folder, local or gs://.
    split: name of a folder in it, or a slice of one: 'train[:90%]'.
    class_names: names that the classes must have; None takes those found.
    broken: what to do about images that cannot be decoded: 'error', 'skip', or
      'trust' (do not look).

  Returns:
    paths: list of n paths, ordered by a hash of their names.
    labels: int64 [n], index into the class names.
    class_names: tuple of them, sorted.

  Raises:
    FileNotFoundError: if there is no such split or no image in it.
    ValueError: on missing, unknown or empty classes, and on broken images.
  """
  if broken not in BROKEN_IMAGES:
    raise ValueError(
      f"broken_images='{broken}' is unknown: use one of {BROKEN_IMAGES} "
      '(config.broken_images)'
    )
  paths, labels = [], []
  for part in split.split('+'):
    base, _, instruction = part.strip().partition('[')
    found, names = _list_classes(root, base)
    class_names = names if class_names is None else tuple(class_names)
    _check_classes(f'{root}/{base}', names, class_names)
    found = _slice(found, base, f'[{instruction}' if instruction else '')
    paths += [path for path, _ in found]
    labels += [class_names.index(name) for _, name in found]
  if not paths:
    raise ValueError(f"split '{split}' of folder '{root}' is empty")
  labels = np.array(labels, np.int64)
  bad = [] if broken == 'trust' else _find_broken(paths, deep=broken == 'skip')
  if bad and broken == 'error':
    shown = '\n  '.join(f'{path}: {why}' for path, why in bad[:10])
    raise ValueError(
      f'{len(bad)} of {len(paths)} images cannot be read:\n  {shown}\n'
      'Mend or delete them, or leave them out with '
      '--config.broken_images=skip'
    )
  if bad:
    skipped = {path for path, _ in bad}
    keep = [i for i, path in enumerate(paths) if path not in skipped]
    logging.warning(
      'Skipped %d of %d images of %s/%s that cannot be read, the first: %s',
      len(bad),
      len(paths),
      root,
      split,
      ': '.join(bad[0]),
    )
    if not keep:
      raise ValueError(f"no image of split '{split}' of '{root}' can be read")
    paths, labels = [paths[i] for i in keep], labels[keep]
  return paths, labels, class_names


def _list_classes(root, split):
  """Returns [(path, class)] of a split in their order, and the class names."""
  top = os.path.join(root, split)
  if not tf.io.gfile.isdir(top):
    there = [d for d in _listdir(root) if tf.io.gfile.isdir(f'{root}/{d}')]
    raise FileNotFoundError(
      f"folder '{root}' has no split '{split}': {_LAYOUT}; it holds "
      f'{there[:10]} (config.pp.train, config.pp.test)'
    )
  names, found, ignored = [], [], []
  for name in _listdir(top):
    if not tf.io.gfile.isdir(os.path.join(top, name)):
      ignored.append(os.path.join(top, name))
      continue
    files = [os.path.join(top, name, f) for f in _listdir(f'{top}/{name}')]
    images = [f for f in files if f.lower().endswith(EXTENSIONS)]
    ignored += [f for f in files if not f.lower().endswith(EXTENSIONS)]
    if files and not images:
      raise ValueError(
        f"class folder '{top}/{name}' holds no image: known are the endings "
        f'{", ".join(EXTENSIONS)}, in any case'
      )
    if images:
      names.append(name)
      found += [(image, name) for image in images]
  if not found:
    raise FileNotFoundError(
      f"no images in '{top}/<class>/': {_LAYOUT}, with files that end in "
      f'{", ".join(EXTENSIONS)}'
    )
  if ignored:
    logging.warning(
      'Ignored %d files of %s that are no images, the first: %s',
      len(ignored),
      top,
      ignored[0],
    )
  found.sort(key=lambda pair: _hash(pair[0][len(top) :]))
  return found, tuple(names)


def _listdir(path):
  """Names in a folder, sorted, without hidden ones."""
  names = (name.rstrip('/') for name in tf.io.gfile.listdir(path))
  return sorted(name for name in names if not name.startswith('.'))


def _hash(name):
  return hashlib.md5(name.encode(), usedforsecurity=False).digest()


def _check_classes(top, names, expected):
  missing = sorted(set(expected) - set(names))
  unknown = sorted(set(names) - set(expected))
  if unknown:
    raise ValueError(
      f"'{top}' has classes that the training split lacks: {unknown[:10]}; add "
      'them there or take them away here'
    )
  if missing:
    raise ValueError(
      f"'{top}' has no images of the classes {missing[:10]} of the training "
      'split; add some, or take these classes away there'
    )


def _slice(found, name, instruction):
  """Takes a slice like '[:90%]' of a list, with TFDS's own arithmetic."""
  info = tfds.core.SplitInfo(
    name=name, shard_lengths=[len(found)], num_bytes=0, filename_template=None
  )
  try:
    spec = tfds.core.ReadInstruction.from_spec(name + instruction)
    [absolute] = spec.to_absolute({name: info})
  except (ValueError, AssertionError) as e:
    raise ValueError(
      f"split '{name}{instruction}' cannot be read: {e} (config.pp.train, "
      'config.pp.test)'
    ) from e
  return found[absolute.from_ : absolute.to]


def _find_broken(paths, deep):
  """Returns [(path, why)] of the images that cannot be decoded.

  Looks at both ends of each file, and decodes those that do not begin and end
  as they should; all of them if `deep`.
  """
  bad = []
  with concurrent.futures.ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
    whys = pool.map(lambda path: _why_broken(path, deep), paths)
    for path, why in zip(
      paths,
      tqdm.tqdm(
        whys,
        'Checking images',
        len(paths),
        delay=3,
        leave=False,
        unit=' images',
      ),
    ):
      if why:
        bad.append((path, why))
  return bad


# Format: how a file begins, how it ends.
_MAGIC = (
  (b'\xff\xd8\xff', b'\xff\xd9'),
  (b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'),
)


def _why_broken(path, deep):
  """Returns why a file cannot be decoded, or '' if it can."""
  try:
    with tf.io.gfile.GFile(path, 'rb') as file:
      size = file.size()
      if not size:
        return 'zero bytes'
      begin = file.read(16)
      file.seek(max(0, size - 64))
      end = file.read(64).rstrip(b'\0')
      whole = any(begin.startswith(b) and end.endswith(e) for b, e in _MAGIC)
      if whole and not deep:
        return ''
      file.seek(0)
      images.decode(tf.constant(file.read()))
  except images.DECODE_ERRORS as e:
    return images.first_line(e)
  return ''
