"""The user's list of bad nodes, and the nodes that a job leaves out because of it."""
