"""One file per scheduler: pure answers about argv to run and text to parse. No input, no output."""
