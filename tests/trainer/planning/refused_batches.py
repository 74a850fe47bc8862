"""Refused batches that grow or have steps, and chunks of a batch's loss, for refused_combinations."""

from __future__ import annotations

from typing import Any

# As in refused_combinations.
REFUSED_BATCHES: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    *(
        (
            {"training": {"global_batch_size": 16, "rampup_batch_size": ramp}},
            "training.rampup_batch_size",
            says,
            {"training": {"global_batch_size": 16, "rampup_batch_size": [4, 4, 100]}},
        )
        for ramp, says in (
            ([4, 4], "give three numbers from 1 to 1,000,000,000,000: the first batch size, the increment"),
            ([4, 0, 100], "give three numbers"),
            ([4, 4, 10**13], "give three numbers"),
            ([16, 4, 100], "the first batch size 16 is not below global_batch_size 16"),
            (
                [4, 5, 100],
                "the difference 12 of the first batch size 4 and global_batch_size 16; use 4",
            ),
        )
    ),
    (
        {"training": {"rampup_batch_size": [4, 4, 100]}},
        "training.rampup_batch_size",
        "needs training.global_batch_size",
        {"training": {"rampup_batch_size": [4, 4, 100], "global_batch_size": 8}},
    ),
    (
        {"training": {"rampup_batch_size": [1, 1, 100], "global_batch_size": 100_002}},
        "training.rampup_batch_size",
        "has 100,001 increments; use at most 100,000",
        {"training": {"rampup_batch_size": [1, 1, 100], "global_batch_size": 100_001}},
    ),
    *(
        (
            {"training": {"step_batch_size_schedule": steps}},
            "training.step_batch_size_schedule",
            says,
            {"training": {"step_batch_size_schedule": "0:4 1K:8"}},
        )
        for steps, says in (
            ("", "'' has no step that begins at 0 tokens; begin it with 0:SIZE"),
            ("1K:8", "has no step that begins at 0 tokens"),
            ("0:4 1K", "'1K' is not a valid step; write TOKENS:SIZE"),
            ("0:4 x:8", "'x:8' is not a valid step"),
            ("0:0", "'0:0' is not a valid step"),
            ("0:4 inf:8", "'inf:8' is not a valid step"),
            ("0:4 -1K:8", "'-1K:8' is not a valid step"),
            ("0:4 1e30:8", "'1e30:8' is not a valid step"),
            ("0:4 128:8 130:16", "two steps of '0:4 128:8 130:16' begin at sample 2, at 64 tokens a sample"),
        )
    ),
    *(
        (
            {"training": {"step_batch_size_schedule": "0:4 1K:8", **other}},
            "training.step_batch_size_schedule",
            f"cannot be combined with training.{named}, because the steps name all sizes; set only one",
            {"training": {"step_batch_size_schedule": None}},
        )
        for other, named in (
            ({"global_batch_size": 16}, "global_batch_size"),
            ({"global_batch_size": 16, "rampup_batch_size": [4, 4, 100]}, "rampup_batch_size"),
        )
    ),
    (
        {"training": {"loss_chunk_size": 256}},
        "training.loss_chunk_size",
        "needs cross_entropy_fusion_impl linear; set that, or leave this key out",
        {"training": {"cross_entropy_fusion_impl": "linear"}},
    ),
    (
        {
            "training": {"cross_entropy_fusion_impl": "linear"},
            "parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        },
        "training.cross_entropy_fusion_impl",
        "linear cannot be combined with pipeline_schedule zb-h1 or zb-v",
        {"parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}},
    ),
]
