"""A seccomp filter for bubblewrap: refuses the system calls that reach around namespaces and limits.

Files in memory, queues of System V, and shared memory without a file would be memory that no limit counts: one page of
it keeps all, and belongs to no process. So would pages be that are given to a pipe. Keys of the kernel have no
namespace, nor has AF_VSOCK, by which a virtual machine talks with its host. The rest are large and rarely needed parts
of the kernel.
"""

from __future__ import annotations

import platform
import struct

# Numbers of the system calls, in the order of the names: from linux/arch/*/entry/syscalls and asm-generic/unistd.h.
NAMES = (
  *("vmsplice", "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),
  *("add_key", "request_key", "keyctl"),
  *("io_uring_setup", "bpf", "perf_event_open", "userfaultfd", "unshare", "setns", "mount"),
)
MACHINES = {
  "x86_64": (0xC000003E, (278, 319, 447, 29, 68, 64, 240, 248, 249, 250, 425, 321, 298, 323, 272, 308, 165), 41, 9),
  "aarch64": (0xC00000B7, (75, 279, 447, 194, 186, 190, 180, 217, 218, 219, 425, 280, 241, 282, 97, 268, 40), 198, 222),
}  # (architecture as the audit names it, numbers of NAMES, numbers of socket and mmap)
FAMILIES = (1, 2, 10)  # sockets that may be made: AF_UNIX, AF_INET, AF_INET6
COMPATIBLE = 0x40000000  # numbers from here on are the x32 calls of x86_64

SHARED_MEMORY = 0x21  # flags of mmap, MAP_SHARED | MAP_ANONYMOUS; MAP_PRIVATE is 2

LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # codes of classic BPF
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 40  # offsets in struct seccomp_data
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE fails with EPERM


def compile_filter(machine: str | None = None) -> bytes | None:
  """Compiles the filter to instructions of classic BPF; None for a machine whose numbers are not known here.

  Args:
    machine: as `platform.machine()` names it, by default this one.
  """
  known = MACHINES.get(machine or platform.machine())
  if known is None:
    return None
  architecture, numbers, socket, mmap = known

  # Calls of another architecture have other numbers: a program that makes them is killed.
  program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
  program += [(AT_LEAST, 0, 1, COMPATIBLE), (RETURN, 0, 0, REFUSE)]
  for number in numbers:
    program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]

  # Shared memory is refused by its flags.
  program += [(EQUAL, 0, 4, mmap), (LOAD, 0, 0, FOURTH_ARGUMENT), (AND, 0, 0, SHARED_MEMORY | 2)]
  program += [(EQUAL, 0, 1, SHARED_MEMORY), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, NUMBER)]

  # A socket is allowed by its family; the jumps lead to the last instruction but one.
  program += [(EQUAL, 1, 0, socket), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
  program += [(EQUAL, len(FAMILIES) - index, 0, family) for index, family in enumerate(FAMILIES)]
  program += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
  return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
