"""Short runs of several layouts inside one job, of which the slower half is left out again and again."""
