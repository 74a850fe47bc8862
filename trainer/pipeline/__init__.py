"""Pipeline parallelism: the schedule as a table, the split into stages, and what runs the table."""
