"""Tests of the traffic to and from main memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.planning import hbm

# An image is read and written in a loop, after a copy to the vector memory and back. Tiles
# of 8 x 128 numbers pad its 8 x 500 numbers to 8 x 512.
PROGRAM = """
HloModule update, is_scheduled=true

%write_image (stack: f32[3,8,500], image: f32[1,8,500], i: s32[]) -> f32[3,8,500] {
  %stack = f32[3,8,500]{2,1,0:T(8,128)} parameter(0)
  %image = f32[1,8,500]{2,1,0:T(8,128)S(1)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[3,8,500]{2,1,0:T(8,128)} dynamic-update-slice(%stack, %image, %i, %zero, %zero)
}

%slice_image (i.2: s32[], stack.2: f32[3,8,500]) -> f32[1,8,500] {
  %i.2 = s32[]{:T(128)S(6)} parameter(0)
  %stack.2 = f32[3,8,500]{2,1,0:T(8,128)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %image.1 = f32[1,8,500]{2,1,0:T(8,128)} dynamic-slice(%stack.2, %i.2, %zero.1, %zero.1), sizes={1,8,500}
}

%read_image (stack: f32[3,8,500], i: s32[]) -> f32[1,8,500] {
  %stack.1 = f32[3,8,500]{2,1,0:T(8,128)} parameter(0)
  %i.1 = s32[]{:T(128)S(6)} parameter(1)
  %slice = f32[1,8,500]{2,1,0:T(8,128)} fusion(%i.1, %stack.1), kind=kLoop, calls=%slice_image
  ROOT %minus = f32[1,8,500]{2,1,0:T(8,128)S(1)} negate(%slice)
}

%body (state: (f32[3,8,500], s32[])) -> (f32[3,8,500], s32[]) {
  %state = (f32[3,8,500]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) parameter(0)
  %s = f32[3,8,500]{2,1,0:T(8,128)} get-tuple-element(%state), index=0
  %n = s32[]{:T(128)S(6)} get-tuple-element(%state), index=1
  %f = f32[1,8,500]{2,1,0:T(8,128)S(1)} fusion(%s, %n), kind=kLoop, calls=%read_image
  %g = f32[3,8,500]{2,1,0:T(8,128)} fusion(%s, %f, %n), kind=kLoop, calls=%write_image
  ROOT %next = (f32[3,8,500]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) tuple(%g, %n)
}

%condition (state.2: (f32[3,8,500], s32[])) -> pred[] {
  %state.2 = (f32[3,8,500]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) parameter(0)
  ROOT %true = pred[]{:T(128)} constant(true)
}

ENTRY %main (a: f32[3,8,500], n: s32[]) -> f32[3,8,500] {
  %a = f32[3,8,500]{2,1,0:T(8,128)} parameter(0)
  %m = s32[]{:T(128)S(6)} parameter(1)
  %new = f32[3,8,500]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %cs = (f32[3,8,500]{2,1,0:T(8,128)S(1)}, f32[3,8,500]{2,1,0:T(8,128)}, u32[]) copy-start(%a)
  %fast = f32[3,8,500]{2,1,0:T(8,128)S(1)} copy-done(%cs)
  %twice = f32[3,8,500]{2,1,0:T(8,128)S(1)} add(%fast, %fast)
  %slow = f32[3,8,500]{2,1,0:T(8,128)} add(%twice, %twice)
  %start = (f32[3,8,500]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) tuple(%slow, %m)
  %loop = (f32[3,8,500]{2,1,0:T(8,128)}, s32[]) while(%start), condition=%condition, body=%body
  ROOT %out = f32[3,8,500]{2,1,0:T(8,128)} get-tuple-element(%loop), index=0
}
"""


def test_vector_memory_and_unused_images_do_not_count():
  image = 8 * 512 * 4
  to_vector_memory = from_vector_memory = 3 * image
  total = to_vector_memory + from_vector_memory + 2 * image
  assert hbm.num_bytes(PROGRAM) == total


def test_scratch_memory_of_a_library_does_not_count():
  program = """
ENTRY %main (a: bf16[10,20]) -> bf16[10,10] {
  %a = bf16[10,20]{1,0} parameter(0)
  %mm = (bf16[10,10]{1,0}, s8[33554432]{0}) custom-call(%a, %a), custom_call_target="gemm"
  ROOT %out = bf16[10,10]{1,0} get-tuple-element(%mm), index=0
}
"""
  assert hbm.num_bytes(program) == 2 * (200 + 200 + 100)


@pytest.mark.parametrize(
  'shape, size',
  [
    ('f32[3,5]', 60),
    ('f32[3,5]{0,1:T(8,128)}', 8 * 128 * 4),
    ('bf16[2,3,200]{2,1,0:T(8,128)(2,1)}', 2 * 8 * 256 * 2),
    ('bf16[2,200,3]{1,2,0:T(8,128)(2,1)}', 2 * 8 * 256 * 2),
    ('s32[]{:T(128)}', 4),
    ('(pred[7]{0:T(512)}, u32[]{:S(2)})', 512 + 4),
  ],
)
def test_tiles_pad_arrays(shape, size):
  assert sum(array.padded_size for array in hbm.arrays(shape)) == size


@pytest.mark.parametrize(
  'function',
  [
    lambda x, y: x @ y,
    lambda x, y: jnp.tanh(x) @ y.T + 1,
    lambda x, y: jax.lax.dynamic_slice(x, (y[0, 0].astype(int), 0), (1, 24)) * 2,
    lambda x, y: (x.sum(0), y.max(1)),
  ],
)
def test_without_a_vector_memory_the_compiler_counts_as_many(function):
  x = jax.ShapeDtypeStruct((24, 24), np.float32)
  compiled = jax.jit(function).lower(x, x).compile()
  want = compiled.cost_analysis()['bytes accessed']
  assert hbm.num_bytes(compiled.as_text()) == pytest.approx(want, rel=0.02)
