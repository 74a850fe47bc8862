"""Kernels of a run that are built at its start."""

from trainer.process.heartbeat import Heartbeat
from trainer.training.kernel_build import HeartbeatReport


def test_the_phase_of_the_rank_that_builds_has_the_share_of_the_compiled_files():
    with Heartbeat(None, 0) as heartbeat:
        report = HeartbeatReport(heartbeat)
        with report.building("with g++"):
            report.progress(0.409)
            assert heartbeat.phase == "building the kernels 40%"
        assert heartbeat.phase == "building the kernels"
