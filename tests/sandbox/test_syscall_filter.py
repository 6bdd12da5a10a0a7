"""The filter of system calls: its instructions, run by a small machine of classic BPF."""

from __future__ import annotations

import struct

import pytest

from sao_jax.sandbox.syscall_filter import MACHINES, NAMES, compile_filter

ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def outcome(program: bytes, number: int, architecture: int, argument: int = 0, flags: int = 0) -> int:
  data = struct.pack(
    "<iIQ6Q", number if number < 2**31 else number - 2**32, architecture, 0, argument, 0, 0, flags, 0, 0
  )
  instructions = list(struct.iter_unpack("<HBBI", program))
  position, accumulator = 0, 0
  while True:
    code, true, false, value = instructions[position]
    position += 1
    if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
      (accumulator,) = struct.unpack_from("<I", data, value)
    elif code == 0x15:  # BPF_JMP | BPF_JEQ
      position += true if accumulator == value else false
    elif code == 0x35:  # BPF_JMP | BPF_JGE
      position += true if accumulator >= value else false
    elif code == 0x54:  # BPF_ALU | BPF_AND
      accumulator &= value
    else:
      assert code == 0x06  # BPF_RET
      return value


@pytest.mark.parametrize("machine", MACHINES)
def test_it_refuses_what_it_names_and_allows_the_rest(machine):
  architecture, numbers, socket, mmap = MACHINES[machine]
  program = compile_filter(machine)
  assert len(numbers) == len(set(numbers)) == len(NAMES)
  for number in range(500):
    if number != socket:
      assert outcome(program, number, architecture) == (EPERM if number in numbers else ALLOW)
  for family in range(50):
    assert outcome(program, socket, architecture, family) == (ALLOW if family in (1, 2, 10) else EPERM)
  shared, private, validated, anonymous, populate = 1, 2, 3, 0x20, 0x8000
  for kind, refused in ((shared, True), (private, False), (validated, False)):  # the kernel refuses the last one itself
    for more in (0, populate):
      assert outcome(program, mmap, architecture, 3, kind | anonymous | more) == (EPERM if refused else ALLOW)
      assert outcome(program, mmap, architecture, 3, kind | more) == ALLOW
  assert outcome(program, 0x40000000 + 1, architecture) == EPERM
  assert outcome(program, 1, architecture ^ 1) == KILL


def test_an_unknown_machine_has_none():
  assert compile_filter("riscv64") is None
