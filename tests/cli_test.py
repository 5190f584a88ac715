"""Tests of what the commands share: values of flags."""

import argparse

import pytest

from vit_jax import cli


def test_a_size_is_a_side_or_height_and_width():
  assert cli.pixels('384') == 384
  assert cli.pixels('384,512') == cli.pixels('384x512') == (384, 512)
  assert cli.height_width('384') == (384, 384)
  assert cli.height_width('384,512') == (384, 512)
  for wrong in ('', '0', '-1', '1,2,3', '384,', '3e2', 'large'):
    for parse in (cli.pixels, cli.height_width):
      with pytest.raises(
        argparse.ArgumentTypeError, match='is no size in pixels: give SIDE or'
      ):
        parse(wrong)
