"""Time of one of our optimizer steps on a GPU by kinds of kernels, and the longest kernels, as lines of JSON.

python -m benchmarks.gpu.profile 1b --micro-batches 2 [--trace trace.json.gz]
"""

import argparse
import json
import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.speed import OURS, SHAPES, TRAINERS, WARM_UP, step_of
from trainer.training.profile.kinds import kind_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--trainer", choices=TRAINERS, default=OURS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--trace", help="file for Perfetto, .json.gz")
    flags = parser.parse_args()
    device = torch.device(flags.device)
    step = step_of(flags.trainer, SHAPES[flags.model], device, flags.micro_batches)
    for _ in range(WARM_UP):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        start = time.perf_counter()
        step()
        wall_ms = (time.perf_counter() - start) * 1e3
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA:
            by_name[event.name].append(event.self_device_time_total / 1e3)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for name, times in by_name.items():
        by_kind[kind_of(name)] += sum(times)
    busy = sum(by_kind.values())
    print(
        json.dumps(
            {
                "model": flags.model,
                "trainer": flags.trainer,
                "wall_ms": wall_ms,
                "busy_ms": busy,
                "kernels": sum(map(len, by_name.values())),
                "ms_by_kind": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
            }
        )
    )
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]:
        print(json.dumps({"kernel": name[:120], "kind": kind_of(name), "calls": len(times), "ms": sum(times)}))
    if flags.trace:
        recorded.export_chrome_trace(flags.trace)


if __name__ == "__main__":
    main()
