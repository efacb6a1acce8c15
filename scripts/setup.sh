#!/usr/bin/env bash
# Makes a virtual environment with this project installed in it, editable.
# Usage: scripts/setup.sh VENV EXTRAS [pip requirement...]     e.g. scripts/setup.sh .venv dev,aot
#   PYTHON=/path/to/python3   use this interpreter instead of looking for one
#   WANT=3.12                 accept this version only
# A second run is a check of some milliseconds. An environment that is half made, broken, moved or asked for with other
# contents is made anew or brought up to date.
set -euo pipefail

venv=$1 extras=$2
shift 2
cd "$(dirname "$0")/.."
root=$PWD
python=$venv/bin/python
stamp=$venv/.mgpu-ops-stamp

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

case $venv in /* | *..*) die "VENV=$venv must be a path inside the project, such as .venv" ;; esac

# What leaks in from the caller's shell must not decide what is found or where pip installs.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV

# Prints "RANK EXECUTABLE" where an interpreter will do: 3.13 and 3.12 have wheels of everything, then newer ones.
probe='
import sys
v = sys.version_info
want = sys.argv[1]
if v < (3, 12) or v[3] != "final" or want not in ("", "%d.%d" % v[:2]):
    sys.exit(1)
import ensurepip, venv
print("%d %s" % ({(3, 13): 0, (3, 12): 1}.get(v[:2], v[1]), sys.executable))
'
try() { "$1" -I -c "$probe" "${WANT:-}" 2>/dev/null </dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && return
    die "PYTHON=$PYTHON does not run, is not Python ${WANT:->= 3.12}, or lacks the venv and ensurepip modules."
  fi
  # Each candidate is run: a pyenv shim on PATH exists for versions that it then refuses to start.
  local candidate found
  found=$(
    for candidate in python3.13 python3.12 python3.14 python3.15 python3 \
      "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3 \
      "${UV_PYTHON_INSTALL_DIR:-${HOME:-}/.local/share/uv/python}"/*/bin/python3; do
      try "$candidate" || true
    done | sort -n -s | head -n 1
  )
  [ -n "$found" ] && printf '%s\n' "$found" && return
  cat >&2 <<TEXT
setup: found no Python ${WANT:->= 3.12} (with its venv module) on PATH, under pyenv or under uv.
Install one and run make setup again:
  uv       uv python install ${WANT:-3.13}
  pyenv    pyenv install ${WANT:-3.13}
  apt      sudo apt-get install python3 python3-venv     (Ubuntu 24.04, Debian 13 or newer)
or name one that is somewhere else:  make setup PYTHON=/path/to/python${WANT:-3.13}
TEXT
  return 1
}

# Does the environment start, and does it find jax and this checkout's mgpu_ops?
healthy() {
  [ -x "$venv/bin/mgpu-tune" ] && "$python" -I - "$root" 2>/dev/null <<'PY'
import importlib.util, os, sys
jax, ours = (importlib.util.find_spec(name) for name in ("jax", "mgpu_ops"))
sys.exit(not (jax and ours and os.path.dirname(os.path.dirname(ours.origin)) == sys.argv[1]))
PY
}

# The root is part of it: the scripts in bin/ hold absolute paths, so an environment that moved is not the same one.
wanted=$(printf '%s\n' "$root" "$extras" "${WANT:-}" "$@" && cat pyproject.toml)
keep= base=
if [ -n "${PYTHON:-}" ]; then base=$(find_python); fi
if [ -f "$stamp" ] && healthy && { [ -z "$base" ] || [ "$python" -ef "${base#* }" ]; }; then
  [ "$wanted" = "$(cat "$stamp")" ] && exit 0
  [ "$(head -n 1 "$stamp")" = "$root" ] && keep=yes
fi
if [ -z "$keep" ]; then
  [ -n "$base" ] || base=$(find_python)
  base=${base#* }
  say "$venv: $("$base" -V) from $base"
  rm -rf "$venv"
  "$base" -m venv "$venv" || die "$base could not make $venv (see above)"
fi

# No stamp while pip works: a run that is cut off here starts afresh.
rm -f "$stamp"
say "installing mgpu_ops[$extras] $* (the first time takes a minute or more and, with aot, 2 GB of disk)"
"$python" -m pip install -qq --disable-pip-version-check --no-input -e ".[$extras]" "$@" </dev/null || {
  say "pip could not install what pyproject.toml names; its message is above."
  say "If that is about connections: this needs a Python package index (PyPI, or a mirror named by PIP_INDEX_URL)."
  exit 1
}
healthy || die "$venv was installed but does not find mgpu_ops: remove $venv and run make setup again"
printf '%s\n' "$wanted" >"$stamp"
say "$venv is ready: $("$python" -V), jax $("$python" -c 'from importlib.metadata import version; print(version("jax"))')"
