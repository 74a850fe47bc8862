"""The state of runs: records, attempts, scheduler answers, metrics and logs."""
