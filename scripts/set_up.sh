#!/usr/bin/env bash
# Makes the virtual environment .venv of this checkout: every package pinned by constraints.txt, llmctl itself editable.
# Does nothing when it is up to date. Safe to run twice at once, and to run again after an interruption.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "set-up: $*" >&2
  exit 1
}

# The first Python that answers and is new enough. A name on PATH proves nothing: it may be a version manager's stub.
find_python() {
  local name
  for name in "${PYTHON:-python3.11}" python3.11 python3 python3.12 python3.13 python3.10; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

install_debian() {
  command -v apt-get >/dev/null || fail "$1 is missing; install it with this system's package manager"
  [ "$(id -u)" = 0 ] || fail "$1 is missing; run: sudo apt-get install $1"
  echo "set-up: installing the Debian package $1"
  export DEBIAN_FRONTEND=noninteractive
  if ! apt-get -qq install -y "$1" >>"$log" 2>&1; then
    { apt-get -qq update && apt-get -qq install -y "$1"; } >>"$log" 2>&1 || fail "apt-get install $1 failed, see $log"
  fi
}

mkdir -p .make
log=$PWD/.make/set-up.log
exec 9>.make/set-up.lock
if ! flock -n 9; then
  echo "set-up: waiting for the set-up that another make has begun"
  flock 9
fi

mark=.venv/set-up
wanted=$(cat pyproject.toml constraints.txt scripts/set_up.sh | sha256sum | cut -d' ' -f1)
# Our own modules and templates compiled, as pip does for those it installs: where PYTHONDONTWRITEBYTECODE is set, every start of the
# command line would compile them anew. What is up to date is left alone.
compile_sources() {
  .venv/bin/python -m compileall -q llmctl trainer
  .venv/bin/python -c 'from llmctl.submit.render import compile_templates; compile_templates()'
}
if [ "$(cat $mark 2>/dev/null || true)" = "$wanted" ]; then
  compile_sources
  exit 0
fi
: >"$log"
begin=$SECONDS

python=$(find_python)
if [ -z "$python" ]; then
  install_debian python3
  python=$(find_python)
  [ -n "$python" ] || fail "no Python from 3.10 on was found; install python3.11, or name one with PYTHON=/path/to/python"
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || install_debian "python$version-venv"

# Training compiles csrc where it can and goes without where it cannot; its tests cannot go without.
if ! command -v g++ >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_debian g++
  else
    echo "set-up: there is no g++: training works without its own kernels, their tests do not; install it"
  fi
fi

# "unfinished" in the mark: an earlier set-up was interrupted inside pip, whose half-written packages cannot be trusted.
if [ "$(cat $mark 2>/dev/null || true)" = unfinished ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear .venv >>"$log" 2>&1 || fail "$python -m venv .venv failed, see $log"
fi
echo unfinished >$mark
echo "set-up: installing packages into .venv with Python $version (the first time takes a minute or two)"
pip() {
  .venv/bin/python -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 9>&- </dev/null || {
    { grep -i '^ *error' "$log" || tail -3 "$log"; } >&2
    fail "pip failed; the whole output is in $log"
  }
}
# The build backend comes first, so that the project can be installed without a second download of it.
pip install --constraint constraints.txt hatchling
pip install --constraint constraints.txt --no-build-isolation --editable '.[train,dev]'
compile_sources
echo "$wanted" >$mark
echo "set-up: done in $((SECONDS - begin)) s"
