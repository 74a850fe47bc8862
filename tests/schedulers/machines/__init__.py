"""Several machines behind ssh whose supervisors begin the next attempt together."""
