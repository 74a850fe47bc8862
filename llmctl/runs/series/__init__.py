"""The whole metrics of a run as curves of few points: rows -> history -> curves. Only ``reading`` does I/O."""
