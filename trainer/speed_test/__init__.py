"""Speed test of a cluster: products, attention, memory and messages, measured by all ranks of a job."""
