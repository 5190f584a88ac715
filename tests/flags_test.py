"""Tests of flag values that several commands share."""

import argparse

import pytest

from vit_jax.commands import flags


def test_size_is_a_side_or_height_and_width():
  assert flags.pixels('384') == 384
  assert flags.pixels('384,512') == flags.pixels('384x512') == (384, 512)
  assert flags.height_width('384') == (384, 384)
  assert flags.height_width('384,512') == (384, 512)
  for wrong in ('', '0', '-1', '1,2,3', '384,', '3e2', 'large'):
    for parse in (flags.pixels, flags.height_width):
      with pytest.raises(argparse.ArgumentTypeError, match='must be'):
        parse(wrong)
