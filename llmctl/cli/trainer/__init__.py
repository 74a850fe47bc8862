"""Commands that run a program of the trainer, here or as a job."""
