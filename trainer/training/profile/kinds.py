"""Kinds of the operations and kernels of a step, by their names. Torch-free."""

from __future__ import annotations

import re

COMMUNICATION = "communication"
OTHER = "other"

KINDS = (
    (COMMUNICATION, r"nccl|gloo|c10d::|record_param_comms"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("optimizer", r"adamw|multi_tensor|l2_norm"),
    (
        "native kernels",
        r"^(llmctl::|rms_norm|add_rms|gated_activation|activation|cross_entropy|rope|rotary|column_sums|tensor_)",
    ),
    (
        "products",
        r"gemm|cutlass|nvjet|cublas|splitK|sm90_xmma|sm80_xmma|ampere_|"
        r"(::|: |^)_?(addmm|addbmm|baddbmm|bmm|mm|matmul|linear|grouped_mm|scaled_mm|mkldnn\w*)(backward\d*|_out)?$",
    ),
    ("copies", r"Memcpy|Memset|copy|clone|contiguous|aten::(to|cat)$"),
)
"""Kind and pattern of the names of torch's operations on the host and of kernels on a GPU; the first match counts."""


def kind_of(name: str) -> str:
    """Kind of an operation or kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)
