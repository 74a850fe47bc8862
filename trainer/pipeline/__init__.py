"""Pipeline parallelism: execution of a schedule table, its messages, and deferred weight gradients."""
