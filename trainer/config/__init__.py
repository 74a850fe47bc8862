"""Config keys and flags: values only. Free of torch; imports no other room."""
