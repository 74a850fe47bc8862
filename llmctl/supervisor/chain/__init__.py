"""Chains: a job that ends before its run is done hands the run's next job to the scheduler."""
