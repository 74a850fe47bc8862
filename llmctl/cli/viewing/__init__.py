"""Commands that show what a run did: pages, plots and screens."""
