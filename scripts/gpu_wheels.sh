#!/usr/bin/env bash
# gpu_wheels.sh FOLDER [PYTHON_VERSION]: the pinned wheels that the trainer needs beside torch and numpy, for a machine with a
# GPU, Linux on x86-64 and no network. There:
#   python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
set -euo pipefail
folder=${1:?usage: gpu_wheels.sh FOLDER [PYTHON_VERSION]} version=${2:-3.12}
cd "$(dirname "$0")/.."
packages=(pydantic pydantic_core annotated-types typing_extensions typing-inspection zstandard)
wanted=()
for package in "${packages[@]}"; do
  wanted+=("$(grep -m 1 -E "^$package==" constraints.txt | cut -d ';' -f 1)")
done
platforms=()
for glibc in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" \
  --dest "$folder" "${wanted[@]}"
ls -l "$folder"
