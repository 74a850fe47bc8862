"""Peak speeds of known GPUs, for MFU. Torch-free.

Dense matrix products with 16-bit inputs and 32-bit accumulation, without sparsity, in TFLOP/s, from NVIDIA's data
sheets (https://www.nvidia.com/en-us/data-center/ -> product -> data sheet; sheets that print only the figure "with
sparsity" are halved here). V100 has no bf16: its figure is fp16's.

The rows were compared with published tables that reproduce these sheets, not with the sheets themselves. Rows marked
"unconfirmed" were in none of these tables: check the sheet before you publish an MFU, or set logging.peak_tflops.
"""

from __future__ import annotations

import re

# (whole words of the device name that CUDA reports, TFLOP/s). The first match counts, so variants precede families.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),  # HGX B200 in the data sheet of Blackwell: 4.5 PFLOP/s with sparsity
    ("GH200", 989.4),  # GH200 data sheet: 1,979 with sparsity
    ("H200 NVL", 835.5),  # H200 data sheet: 1,671 with sparsity; unconfirmed
    ("H200", 989.4),  # H200 data sheet, SXM: 1,979 with sparsity
    ("H100 PCIe", 756.5),  # H100 data sheet, PCIe: 1,513 with sparsity
    ("H100 NVL", 835.5),  # H100 data sheet, NVL: 1,671 with sparsity
    ("H100", 989.4),  # H100 data sheet, SXM: 1,979 with sparsity
    ("A100", 312.0),  # A100 data sheet
    ("A40", 149.7),  # A40 data sheet
    ("A30", 165.0),  # A30 data sheet
    ("A10", 125.0),  # A10 data sheet
    ("RTX A6000", 154.8),  # RTX A6000 data sheet: 309.7 with sparsity; unconfirmed
    ("L40S", 362.05),  # L40S data sheet
    ("L40", 181.05),  # L40 data sheet
    ("L4", 121.0),  # L4 data sheet: 242 with sparsity
    ("V100-PCIE", 112.0),  # V100 data sheet, PCIe
    ("V100", 125.0),  # V100 data sheet, SXM2
)


def known_peak_tflops(device_name: str) -> float | None:
    """Dense 16-bit peak in TFLOP/s of the GPU named ``device_name``; None: unknown."""
    return next((peak for words, peak in _PEAKS if re.search(rf"\b{words}\b", device_name)), None)
