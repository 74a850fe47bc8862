"""Config keys and flags: values only. Torch-free; imports no other package of the trainer."""
