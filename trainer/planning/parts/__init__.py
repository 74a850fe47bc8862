"""Parts of a model: each counts its own parameters, operations and bytes per token. Torch-free.

Units: parameters as numbers of elements; operations per token of forward and backward; bytes per token moved between
memory and processor in float32. trainer.planning.flops and trainer.planning.stage_costs only add up.
"""
