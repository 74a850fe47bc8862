"""A reader of bash scripts: syntax, values of variables, and the commands that would run. Runs nothing."""
