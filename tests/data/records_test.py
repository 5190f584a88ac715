"""Tests of the classes of two splits."""

import pytest

from vit_jax.data import records


def test_classes_are_matched_by_place_or_else_by_name():
  match = records.class_numbers
  assert match('test', 'abc', 'abc').tolist() == [0, 1, 2]
  assert match('test', 'cab', 'abc').tolist() == [2, 0, 1]
  names = ('crane', 'cat', 'crane')
  assert match('test', names, names).tolist() == [0, 1, 2]
  with pytest.raises(ValueError, match="another order .*named 'crane'"):
    match('test', ('crane', 'crane', 'cat'), names)
  with pytest.raises(ValueError, match=r"it lacks \['crane'\]"):
    match('test', ('crane', 'cat'), names)
