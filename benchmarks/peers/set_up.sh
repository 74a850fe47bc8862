#!/bin/sh
# set_up.sh [FOLDER]: the environments of the peers, outside the checkout (about 5 GB). plain and ours run in .venv.
# megatron-core needs Python 3.12; name one with PYTHON312 where python3.12 is not on PATH. Left out when there is none.
set -eu
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/llmctl-benchmarks}
python=${PYTHON312:-python3.12}
if ! "$python" --version >/dev/null 2>&1; then
  echo "no Python 3.12 found, so megatron-core is left out; name one with PYTHON312=/path/to/python3.12"
  exit 0
fi
mkdir -p "$folder"
"$python" -m venv "$folder/megatron-core"
"$folder/megatron-core/bin/python" -m pip --disable-pip-version-check -q install \
  torch==2.13.0 numpy==2.4.6 megatron-core==0.19.2 einops psutil
echo "megatron-core is ready in $folder"
