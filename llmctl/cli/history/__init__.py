"""Commands about runs that have been: their list, and the removal of their files."""
