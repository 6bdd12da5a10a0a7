"""Attacks from inside: each one fails, and earns nothing from the hidden tests that follow.

A probe is the body of a function that returns 42 if the attack has worked; the hidden tests ask for 42.
"""

from __future__ import annotations

import ast
import os
import pathlib
import socket
import textwrap

import pytest
from toys import sandboxes
from toys.paths import REPOSITORY
from toys.sandbox_cheats import CHEATS, HEAD

from sao_jax.sandbox import graded_run

TESTS = "assert call('solution', 'answer', timeout={timeout}) == 42  # hidden-7f3a9c"
TOGETHER = "worked = call('solution', 'attempt', timeout=60.0)\nprint(worked)\nassert worked"

READS = {
  "the host's users": "if 'root:' in open('/etc/passwd').read(): return 42",
  "shadow": "open('/etc/shadow').read(); return 42",
  "a file of the host": "open(SECRET).read(); return 42",
  "the project": "open(PROJECT + '/README.md').read(); return 42",
  "home folders": "if [name for home in ('/root', '/home') for name in os.listdir(home)]: return 42",
  "the host by process 1": "os.listdir('/proc/1/root/'); return 42",
  "the host's processes": "if len(glob.glob('/proc/[0-9]*')) > 8: return 42",
  "a symlink to the host": "os.symlink(SECRET, 'link'); open('link').read(); return 42",
  "a disk": "if glob.glob('/dev/sd*') + glob.glob('/dev/vd*') + glob.glob('/dev/nvme*'): return 42",
  "variables of processes": """
    for path in glob.glob('/proc/[0-9]*/environ'):
      if b'SECRET_TOKEN' in open(path, 'rb').read(): return 42
  """,
}
WRITES = {
  path: f"open({path!r}, 'w').write('x'); return 42"
  for path in ("/x", "/usr/x", "/etc/passwd", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/1/oom_score_adj")
} | {
  "a device": "os.mknod('device', 0o20666, os.makedev(1, 1)); return 42",
  "a file beside the secret": "open(SECRET + '2', 'w').write('x'); return 42",
}
NETWORK = {
  "a server of the host": "socket.create_connection(('127.0.0.1', PORT), 2); return 42",
  "an abstract socket": "socket.socket(socket.AF_UNIX).connect(ABSTRACT); return 42",
  "a socket file": "socket.socket(socket.AF_UNIX).connect(SOCKET); return 42",
  "another machine": "socket.create_connection(('1.1.1.1', 53), 2); return 42",
  "a name server": "socket.getaddrinfo('example.com', 80); return 42",
  "the host of a virtual machine": "socket.socket(40, socket.SOCK_STREAM); return 42",
  "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); return 42",
}
SYSTEM_CALLS = {
  "root": "os.setuid(0); return 42",
  "a mount": "return 42 if libc.mount(b'none', b'/workspace', b'tmpfs', 0, None) == 0 else 0",
  "a user namespace": "return 42 if libc.unshare(0x10000000) == 0 else 0",
  "another namespace": "return 42 if libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0) == 0 else 0",
  "process 1": "os.kill(1, signal.SIGKILL); time.sleep(0.1); os.kill(1, signal.SIGSTOP); raise SystemExit",
  "process 1's handlers": """
    for number in range(1, 65):
      if number not in (32, 33): os.kill(1, number)
    time.sleep(0.1)
    raise SystemExit
  """,
  "a look into process 1": "return 42 if libc.ptrace(16, 1, None, None) == 0 else 0",
  "memory without a limit": "os.memfd_create('x'); return 42",
  "shared memory without a limit": "return 42 if libc.shmget(0, 2**30, 0o1600) >= 0 else 0",
  "memory that no process holds": "import mmap; mmap.mmap(-1, 2**20); return 42",
  "the same by a device": "import mmap; mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**20); return 42",
  "the kernel's keys": "return 42 if libc.syscall(ADD_KEY, b'user', b'k', b'v', 1, -3) >= 0 else 0",
  "io_uring": "return 42 if libc.syscall(425, 8, ctypes.create_string_buffer(200)) >= 0 else 0",
  "a name that ends process 1": "libc.prctl(15, b'\\rRssAnon: x'); time.sleep(0.2); raise SystemExit",
  "a larger limit": """
    import resource
    resource.setrlimit(resource.RLIMIT_NPROC, (10**4, 10**4))
    return 42
  """,
}
RESOURCES = {
  "10 GB of memory": "kept = bytearray(10**10); return 42",
  "a file of 1 GB": """
    with open('large', 'wb') as file:
      for _ in range(1000): file.write(bytes(10**6))
    return 42
  """,
  "1 GB of output": """
    for _ in range(1000): os.write(2, bytes(10**6))
    return 42
  """,
  "a fork bomb": """
    made = 0
    while made < 1000:
      if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
      made += 1
    return 42
  """,
  "threads": """
    import threading
    for _ in range(1000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 42
  """,
  "a hundred thousand files": """
    for index in range(10**5): open('/tmp/%d' % index, 'w')
    return 42
  """,
}
TRIED_TOGETHER = {"read": READS, "write": WRITES, "network": NETWORK, "system calls": SYSTEM_CALLS}
ATTEMPT = """
def attempt():
  worked = []
  for name, probe in PROBES.items():
    try:
      if probe() == 42:
        worked.append(name)
    except BaseException:
      pass
  return worked
"""


@pytest.fixture(scope="module")
def box():
  with sandboxes.open_box() as opened:
    yield opened


@pytest.fixture(scope="module")
def host(tmp_path_factory):
  """Things of the host that a probe may look for: a file, a server, an abstract socket, a socket file."""
  folder = tmp_path_factory.mktemp("host")
  folder.chmod(0o777)
  (folder / "secret").write_text("secret")
  (folder / "secret").chmod(0o666)
  abstract, path = f"\0sao-jax-{os.getpid()}", str(folder / "socket")
  with (
    socket.create_server(("127.0.0.1", 0)) as server,
    socket.socket(socket.AF_UNIX) as first,
    socket.socket(socket.AF_UNIX) as second,
  ):
    for listener, address in ((first, abstract), (second, path)):
      listener.bind(address)
      listener.listen()
    os.chmod(path, 0o777)
    add_key = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine, -1)
    values = {"SECRET": str(folder / "secret"), "PROJECT": str(REPOSITORY), "PORT": server.getsockname()[1]}
    yield values | {"ABSTRACT": abstract, "SOCKET": path, "ADD_KEY": add_key}


def solution(values: dict, probes: dict[str, str]) -> bytes:
  """The agent's file: a function `answer` with the last probe, and `attempt` that tries all of them."""
  text = HEAD + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + "PROBES = {}\n"
  for name, body in probes.items():
    text += f"def answer():\n{textwrap.indent(textwrap.dedent(body).strip(), '  ')}\nPROBES[{name!r}] = answer\n"
  ast.parse(text)
  return (text + ATTEMPT).encode()


def judge(box, tests: str = TESTS.format(timeout=60.0), timeout: float = sandboxes.PATIENT):
  return box(graded_run(box.sandbox, tests, timeout=timeout))


@pytest.mark.parametrize("kind", TRIED_TOGETHER)
def test_no_probe_of_a_kind_works_or_earns_anything(box, host, kind):
  box(box.sandbox.write_file("solution.py", solution(host, TRIED_TOGETHER[kind])))
  verdict = judge(box, TOGETHER)
  assert not verdict.passed and verdict.result.stdout == b"[]\n", verdict.result

  # Tried in the same way, what is no attack works.
  box(box.sandbox.write_file("solution.py", solution(host, TRIED_TOGETHER[kind] | {"nothing": "return 42"})))
  assert judge(box, TOGETHER).passed


@pytest.mark.parametrize("name", RESOURCES | CHEATS)
def test_a_probe_fails_and_earns_nothing(box, host, name):
  box.run("sh", "-c", "rm -rf /workspace/* /tmp/* /dev/shm/*")
  box(box.sandbox.write_file("solution.py", solution(host, {name: (RESOURCES | CHEATS)[name]})))
  verdict = judge(box, TESTS.format(timeout=3.0 if name in RESOURCES else 60.0))
  assert not verdict.passed, verdict.result
  assert verdict.result.exit_status or verdict.result.killed_for


def test_what_the_probes_look_for_is_there(host):
  """Outside of the sandbox, the same attacks would work."""
  assert pathlib.Path(host["SECRET"]).read_text() == "secret"
  assert not pathlib.Path(host["SECRET"] + "2").exists()
  assert (REPOSITORY / "README.md").exists()
  socket.create_connection(("127.0.0.1", host["PORT"]), 5).close()
  for address in (host["ABSTRACT"], host["SOCKET"]):
    with socket.socket(socket.AF_UNIX) as client:
      client.connect(address)


def test_the_right_answer_passes(box):
  box(box.sandbox.write_file("solution.py", b"print('to whom it may concern')\ndef answer(): return 42\n"))
  assert judge(box).passed
  text = "assert program([sys.executable, '-c', 'print(input()[::-1])'], 'abc') == 'cba\\n'"
  assert judge(box, text).passed
  assert not judge(box, text.replace("cba", "abc")).passed


def test_an_exit_status_alone_proves_nothing(box):
  for tests in (
    "sys.exit(0)",
    "import os\nos._exit(0)",
    "print('passed')\nraise SystemExit",
    "print('0' * 32); exit()",
  ):
    verdict = judge(box, tests)
    assert verdict.result.exit_status == 0 and not verdict.passed


def test_files_in_the_work_folder_change_no_judge(box):
  """Modules of the standard library's names, start-up files, and files called as tests are called."""
  box.run("sh", "-c", "rm -rf /workspace/*")
  box(box.sandbox.write_file("solution.py", b"def answer(): return 41\n"))
  names = ("json", "subprocess", "ctypes", "sys", "importlib/__init__", "sitecustomize", "usercustomize", "conftest")
  for name in (*names, "tests_prelude", "tests"):
    box(box.sandbox.write_file(f"{name}.py", b"import os\nprint(42)\nos._exit(0)\n"))
  assert not judge(box).passed
  box(box.sandbox.write_file("solution.py", b"def answer(): return 42\n"))
  assert judge(box).passed


def test_a_judge_that_is_stopped_ends_in_time(box):
  box.run("sh", "-c", "rm -rf /workspace/*")
  body = "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)"
  box(box.sandbox.write_file("solution.py", solution({}, {"stop": body})))
  verdict = judge(box, timeout=0.7)
  assert verdict.result.timed_out and not verdict.passed


def test_tests_that_are_no_program_are_not_the_agents_fault(box):
  for tests in ("assert (", "from __future__ import annotations"):  # the second one stands behind the beginning
    with pytest.raises(ValueError, match="no Python program"):
      judge(box, tests)
