"""The collectives from and into one tensor, under the names that torch 2.13 gave them.

That release warns on every use of the old names, and earlier ones have only those.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
