"""Programs for those who work on llmctl."""
