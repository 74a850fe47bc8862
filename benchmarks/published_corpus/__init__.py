"""Published training scripts through the importer: which are read, and where the others stop.

    python -m benchmarks.published_corpus FOLDER      writes benchmarks/results/published_corpus.md

FOLDER has one folder per repository, named OWNER+NAME, with the file ``commits`` (a branch and its commit per line) and
one folder per branch. Only counts and reasons are written, no text of a script.
"""
