#!/bin/sh
# set_up.sh [FOLDER]: the environments of the peers, outside the checkout (about 6 GB). plain and ours run in .venv.
# megatron-core needs Python 3.12; name one with PYTHON312 where python3.12 is not on PATH. Left out when there is none.
set -eu
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/llmctl-benchmarks}
mkdir -p "$folder"

# make NAME PYTHON PACKAGE...
make() {
  name=$1 python=$2
  shift 2
  if [ -e "$folder/$name/ready" ]; then return; fi
  "$python" -m venv --clear "$folder/$name"
  "$folder/$name/bin/python" -m pip --disable-pip-version-check -q install "$@"
  touch "$folder/$name/ready"
  echo "$name is ready in $folder"
}

# NeMo-Run cannot be imported with the leptonai that its own requirements get.
make torchx "${PYTHON:-python3.11}" torchx==0.7.0
make nemo-run "${PYTHON:-python3.11}" nemo-run==0.11.1 leptonai==0.26.7

python312=${PYTHON312:-python3.12}
if "$python312" --version >/dev/null 2>&1; then
  make megatron-core "$python312" torch==2.13.0 numpy==2.4.6 megatron-core==0.19.2 einops psutil
else
  echo "no Python 3.12 found, so megatron-core is left out; name one with PYTHON312=/path/to/python3.12"
fi
