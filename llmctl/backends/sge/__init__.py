"""Grid Engine, in all its forks."""
