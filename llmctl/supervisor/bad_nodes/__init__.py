"""List of a user's bad nodes on a cluster, which the next submissions leave out."""
