"""Checks of a decided job before anything is written, queued or started; the table is in ../check_job.py."""
