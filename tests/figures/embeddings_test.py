"""Tests of filters and position embeddings, beside scikit-learn's."""

import numpy as np
import pytest
from sklearn import decomposition
from sklearn.metrics import pairwise

from vit_jax.figures import embeddings


def test_filters_are_the_principal_components_up_to_sign():
  kernel = np.random.RandomState(0).randn(4, 3, 2, 40).astype(np.float32)
  found, shares = embeddings.principal_filters(kernel, 7)
  filters = kernel.reshape(24, 40).T
  pca = decomposition.PCA(7, svd_solver='full').fit(filters)
  assert found.shape == (7, 4, 3, 2)
  products = (found.reshape(7, 24) * pca.components_).sum(axis=1)
  np.testing.assert_allclose(np.abs(products), 1, atol=1e-5)
  np.testing.assert_allclose(shares, pca.explained_variance_ratio_, rtol=1e-5)


def test_similarity_is_the_cosine_without_the_class_token():
  table = np.random.RandomState(0).randn(1, 7, 5)
  found = embeddings.position_similarity(table, (2, 3))
  expected = pairwise.cosine_similarity(table[0, 1:])
  np.testing.assert_allclose(found.reshape(6, 6), expected, atol=1e-6)
  with pytest.raises(ValueError, match='8 patches, but there are 7'):
    embeddings.position_similarity(table, (2, 4))
