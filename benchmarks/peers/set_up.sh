#!/bin/sh
# set_up.sh [FOLDER]: make the environments of the peers outside the checkout (about 8 GB). plain and ours run in .venv.
# megatron-core needs Python 3.12; set PYTHON312 if python3.12 is not on PATH. Without Python 3.12 it is skipped.
# picotron has no release and is cloned with git; PICOTRON names a source other than GitHub. It is skipped if the clone
# fails.
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

# NeMo-Run cannot be imported with the version of leptonai that its requirements select.
make torchx "${PYTHON:-python3.11}" torchx==0.7.0
make nemo-run "${PYTHON:-python3.11}" nemo-run==0.11.1 leptonai==0.26.7

# One environment for three trainers with compatible requirements. transformers needs accelerate for tensor parallelism.
# torchtitan imports triton without requiring it; torch determines the version.
make trainers "${PYTHON:-python3.11}" torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 \
  torchtitan==0.3.0 triton

picotron=$folder/picotron commit=59714b1bf25541dbeb6f5a721ed15f6d0768e786
if [ ! -e "$picotron/ready" ]; then
  rm -rf "$picotron"
  # Never prompt for a name or password: nobody would answer.
  if GIT_TERMINAL_PROMPT=0 git clone -q "${PICOTRON:-https://github.com/huggingface/picotron}" "$picotron" &&
    git -C "$picotron" checkout -q "$commit"; then
    touch "$picotron/ready"
    echo "picotron is ready in $folder"
  else
    rm -rf "$picotron"
    echo "picotron could not be cloned, so it is skipped; name a copy of its repository with PICOTRON=/path"
  fi
fi

python312=${PYTHON312:-python3.12}
if "$python312" --version >/dev/null 2>&1; then
  make megatron-core "$python312" torch==2.13.0 numpy==2.4.6 megatron-core==0.19.2 einops psutil
else
  echo "no Python 3.12 found, so megatron-core is skipped; name one with PYTHON312=/path/to/python3.12"
fi
