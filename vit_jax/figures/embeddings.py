"""Computes figure 7 (left and centre) of the paper, section 4.5.

The principal components of the filters of the patch embedding, and the cosine
similarity of the position embeddings.
"""

import numpy as np


def principal_filters(kernel, count: int = 28) -> tuple[np.ndarray, np.ndarray]:
  """Computes the principal components of filters.

  Args:
    kernel: D filters, [p, q, C, D].
    count: maximum number of components.

  Returns:
    Components, float32 [count, p, q, C], each of norm 1 and with its value of
    largest magnitude positive; and the share of the variance that each
    explains, float32 [count].
  """
  kernel = np.asarray(kernel, np.float64)
  filters = kernel.reshape(-1, kernel.shape[-1]).T  # [D, p*q*C]
  filters = filters - filters.mean(axis=0)
  _, scales, components = np.linalg.svd(filters, full_matrices=False)
  components, shares = components[:count], scales**2 / (scales**2).sum()
  rows = np.arange(len(components))
  largest = components[rows, np.abs(components).argmax(axis=1)]
  components = components * np.sign(largest)[:, None]
  components = components.reshape(-1, *kernel.shape[:-1])  # [count, p, q, C]
  return components.astype(np.float32), shares[:count].astype(np.float32)


def position_similarity(embeddings, grid: tuple[int, int]) -> np.ndarray:
  """Computes the cosine similarity of the position embeddings of patches.

  Args:
    embeddings: [N, D] or [1, N, D]; tokens before the patches are ignored.
    grid: number of patches (down, across), (h, w).

  Returns:
    float32 [h, w, h, w]; [i, j] compares the patch in row i, column j with all.

  Raises:
    ValueError: if there are fewer embeddings than patches.
  """
  count = grid[0] * grid[1]
  table = np.asarray(embeddings, np.float64)
  table = table.reshape(-1, table.shape[-1])
  if len(table) < count:
    raise ValueError(
      f'grid={tuple(grid)} has {count} patches, but there are {len(table)} '
      'position embeddings: give the grid of these embeddings'
    )
  table = table[-count:]  # [h*w, D]
  norms = np.linalg.norm(table, axis=1, keepdims=True)
  table = table / np.maximum(norms, np.finfo(np.float64).tiny)
  return (table @ table.T).reshape(*grid, *grid).astype(np.float32)
