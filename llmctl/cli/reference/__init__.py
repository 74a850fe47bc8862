"""Commands that look things up: keys, flags and examples. They read only what comes with llmctl."""
