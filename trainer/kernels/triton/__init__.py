"""Kernels in Triton, for GPUs: one file per operation, each imported when it is first called, because it needs triton.

Launches are ops of torch, torch.ops.llmctl_triton: torch.compile takes them whole, also in Triton's interpreter.
Triton: Tillet, Kung and Cox 2019 (doi:10.1145/3315508.3329973). Arithmetic is float32, for float64 tensors float64.
"""
