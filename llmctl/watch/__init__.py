"""The live screen of runs: sources of views, the threads that read them, and the screens."""
