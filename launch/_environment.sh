# Sourced by the scripts beside it: `use_environment EXTRAS` leaves `python` and `repository` set, the project installed.
# An active virtual environment is used; otherwise one is made in .venv of the repository.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# The first Python on the path that is new enough; shims that do not run are passed over.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed, found $(python3 --version 2>/dev/null || echo none).
  remedy: install one and put it on the PATH (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)."
}

make_environment() {
  local base version
  base="$(find_python)"
  version="$("$base" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
  echo "Making a virtual environment in $repository/.venv ($version) ..."
  if "$base" -m venv "$repository/.venv" >/dev/null 2>&1; then
    return
  fi
  rm -rf "$repository/.venv"
  # Debian and Ubuntu ship venv as a package of its own.
  if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "Installing $version-venv ..."
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$version-venv" >/dev/null
    "$base" -m venv "$repository/.venv"
  else
    fail "$version cannot make virtual environments.
  remedy: sudo apt-get install $version-venv"
  fi
}

use_environment() {
  local extras="$1" stamp wanted
  # What an outer shell may have set would mix its packages into ours.
  unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
  export PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
  # Large arrays in huge pages: first touches of small pages took a good part of a train step on CPU. Freed memory stays
  # with the process, up to 1 GiB of it: programs that give back and get their buffers for every call took a tenth longer
  # (measured with a threshold of 8 GB).
  local malloc="glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
  export GLIBC_TUNABLES="${GLIBC_TUNABLES:-$malloc}"
  if [[ -z "${VIRTUAL_ENV:-}" || ! -x "${VIRTUAL_ENV:-}/bin/python" ]]; then
    [[ -x "$repository/.venv/bin/python" ]] || make_environment
    export VIRTUAL_ENV="$repository/.venv"
  fi
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  python="$VIRTUAL_ENV/bin/python"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "the virtual environment $VIRTUAL_ENV has $("$python" --version), Python 3.11 or newer is needed.
  remedy: deactivate it, or remove it when it is this repository's .venv."

  # Nothing is installed twice: the stamp says for which setup.py and extras this was done.
  stamp="$VIRTUAL_ENV/.sao_jax-$extras"
  wanted="$repository $(cksum <"$repository/setup.py")"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    # Environments that uv made have no pip, nor one whose making was cut short.
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null 2>&1 ||
      fail "the virtual environment $VIRTUAL_ENV has no pip, and Python's own ensurepip could not install it.
  remedy: deactivate it, or remove it when it is this repository's .venv; one that uv made: uv pip install pip."
    echo "Installing sao_jax[$extras] ..."
    "$python" -m pip install --quiet --disable-pip-version-check --use-pep517 -e "$repository[$extras]"
    printf '%s\n' "$wanted" >"$stamp"
  fi
}
