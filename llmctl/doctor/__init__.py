"""The checks of `llmctl doctor`: a cluster, its hosts and its software."""
