"""Counts the bytes that a compiled program moves to and from main memory.

The compiler's own count, `bytes accessed`, includes arrays that stay in the vector memory
of a core, whose layouts say S(1): on a v5e, half of the bytes of a ViT-B/16. Here, each
operation reads its operands and writes its results in main memory once, but of
slices only the part that is read or written. The body of a loop counts once.
"""

from collections.abc import Mapping
import math
import re
from typing import NamedTuple

# Bytes of an element -> names of types.
_TYPES = {
  1: ('pred', 's8', 'u8', 'f8e4m3fn', 'f8e5m2'),
  2: ('bf16', 'f16', 's16', 'u16'),
  4: ('f32', 's32', 'u32'),
  8: ('f64', 's64', 'u64'),
}
_SIZES = {name: size for size, names in _TYPES.items() for name in names}
_COMPUTATION = re.compile(r'(?P<entry>ENTRY )?(?P<name>%[\w.-]+) .*\{$')
# Name, shape, opcode, operands and attributes.
_INSTRUCTION = re.compile(r' +(?:ROOT )?(%[\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)(.*)')
_NAME = re.compile(r'%[\w.-]+')
_OPERAND = re.compile(r'%[\w.-]+|\d+$')
_ARRAY = re.compile(r'(?P<type>\w+)\[(?P<lengths>[\d,]*)\](?P<layout>\{[^}]*\})?')
# Computations of loops, branches and calls.
_STEPS = re.compile(
  r'(?:body|branch_computations|true_computation|false_computation|to_apply)=([^=]*)'
)
_CONTROL_FLOW = ('call', 'conditional', 'while')
_SLICES = ('dynamic-slice', 'slice')
# The scratch memory of a GPU's library, the last result of a call, most of it unused.
_SCRATCH = re.compile(r', [su]8\[\d+\]\{0\}\)$')
# Instructions that neither read nor write, or whose steps are counted themselves.
_FREE = {
  *_CONTROL_FLOW, 'after-all', 'bitcast', 'constant', 'get-tuple-element',
  'opt-barrier', 'parameter', 'partition-id', 'tuple',
}  # fmt: skip


class _Array(NamedTuple):
  size: int  # Bytes.
  padded_size: int  # Bytes with the padding to whole tiles.
  in_main_memory: bool


class _Instruction(NamedTuple):
  name: str
  shape: str  # Text, such as '(bf16[2,3]{1,0:T(8,128)S(1)}, u32[])'.
  opcode: str
  operands: list[str]  # Names; of a parameter, its number.
  attributes: str


# Instructions by name, the last one is the result.
_Computation = dict[str, _Instruction]


def num_bytes(hlo: str) -> int:
  """Returns the bytes that one execution reads from and writes to main memory.

  `hlo` is the text of a compiled program, `jax.stages.Compiled.as_text()`.
  """
  computations, entry = _parse(hlo)
  total = 0
  waiting, counted = [entry], set()
  while waiting:
    name = waiting.pop()
    if name in counted:
      continue
    counted.add(name)
    for instruction in computations[name].values():
      if instruction.opcode in _CONTROL_FLOW:
        steps = _NAME.findall(' '.join(_STEPS.findall(instruction.attributes)))
        waiting += [step for step in steps if step in computations]
      total += _traffic(instruction, computations[name], computations)
  return total


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
  """Returns the computations by name, and the name of the one that is run."""
  computations: dict[str, _Computation] = {}
  entry = ''
  instructions: _Computation = {}
  for line in hlo.splitlines():
    if match := _COMPUTATION.match(line):
      instructions = computations[match['name']] = {}
      entry = match['name'] if match['entry'] else entry
    elif match := _INSTRUCTION.match(line):
      name, shape, opcode, operands, attributes = match.groups()
      if opcode == 'custom-call':
        shape = _SCRATCH.sub(')', shape)
      instructions[name] = _Instruction(
        name, shape, opcode, _OPERAND.findall(operands), attributes
      )
  return computations, entry


def arrays(shape: str) -> list[_Array]:
  """Returns the arrays of a shape, text such as '(f32[2,3]{1,0:T(8,128)}, u32[])'."""
  parsed = []
  for match in _ARRAY.finditer(shape):
    if match['type'] in _SIZES:
      itemsize, lengths = _SIZES[match['type']], _numbers(match['lengths'])
      layout = match['layout'] or ''
      size = itemsize * math.prod(lengths)
      padded_size = itemsize * math.prod(_padded(lengths, layout))
      parsed.append(_Array(size, padded_size, 'S(' not in layout))
  return parsed


def _padded(lengths: list[int], layout: str) -> list[int]:
  """Returns the lengths of the axes from minor to major, padded to whole tiles."""
  order, _, tiles = layout.strip('{}').partition(':')
  lengths = [lengths[axis] for axis in _numbers(order)] or lengths
  if tile := re.match(r'T\(([\d,]*)\)', tiles):
    for i, side in enumerate(reversed(_numbers(tile[1]))):
      if i < len(lengths):
        lengths[i] = -(-lengths[i] // side) * side
  return lengths


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(',') if n]


def _size(shape: str) -> int:
  """Returns the bytes of the arrays of a shape that are in main memory."""
  return sum(array.padded_size for array in arrays(shape) if array.in_main_memory)


def _traffic(
  instruction: _Instruction,
  computation: _Computation,
  computations: Mapping[str, _Computation],
) -> int:
  """Returns the bytes that an instruction reads from and writes to main memory."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith('-done'):
    return 0
  if opcode in ('copy-start', 'slice-start'):
    ends = arrays(instruction.shape)[:2]  # Source and target, in either order.
    copied = min(array.padded_size for array in ends)
    return copied * sum(array.in_main_memory for array in ends)
  if opcode.endswith('-start'):  # A collective: the shape has the operands too.
    return _size(instruction.shape)
  if opcode == 'custom-call' and not instruction.operands:
    return 0  # It allocates memory.
  if opcode == 'fusion':
    inner = computations[_called(instruction)]
    parameters = [x for x in inner.values() if x.opcode == 'parameter']
    read = sum(_bytes_read(x, inner, computations) for x in parameters)
    return read + _bytes_written(list(inner.values())[-1], inner)
  operands = [computation[x] for x in instruction.operands if x in computation]
  alone = {instruction.name: instruction}
  read = sum(_bytes_read(x, alone, computations) for x in operands)
  return read + _bytes_written(instruction, computation)


def _called(fusion: _Instruction) -> str:
  """Returns the name of the computation of a fusion."""
  [name] = re.findall(r'calls=(%[\w.-]+)', fusion.attributes)
  return name


def _bytes_read(
  array: _Instruction,
  computation: _Computation,
  computations: Mapping[str, _Computation],
) -> int:
  """Returns how many bytes of an array a computation reads from main memory."""
  size = _size(array.shape)
  parts = 0
  for user in computation.values():
    if array.name not in user.operands:
      continue
    number = user.operands.index(array.name)
    if user.opcode == 'fusion':
      inner = computations[_called(user)]
      [parameter] = [
        x
        for x in inner.values()
        if x.opcode == 'parameter' and x.operands == [str(number)]
      ]
      parts += _bytes_read(parameter, inner, computations)
    elif user.opcode in _SLICES and number == 0:
      parts += sum(x.padded_size for x in arrays(user.shape))
    elif user.opcode != 'dynamic-update-slice' or number != 0:
      return size
  return min(size, parts)


def _bytes_written(written: _Instruction, computation: _Computation) -> int:
  """Returns how many bytes of a result are written to main memory."""
  if written.opcode == 'tuple':
    elements = [computation[x] for x in written.operands]
    return sum(_bytes_written(x, computation) for x in elements)
  if written.opcode == 'bitcast':
    return _bytes_written(computation[written.operands[0]], computation)
  size = _size(written.shape)
  if written.opcode != 'dynamic-update-slice':
    return size
  update = computation[written.operands[1]]
  return min(size, sum(x.padded_size for x in arrays(update.shape)))
