"""Ages use the clock of the cluster's machine. A laptop's clock may be wrong."""

import time

import pytest

from tests.llmctl.transport.agents import PipeRoute, agent


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
def test_every_answer_has_the_time_of_the_cluster(monkeypatch, offset_s):
    true_time = time.time
    transport = agent(PipeRoute())
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: true_time() + offset_s)
        assert abs(transport.now() - true_time()) < 5
        transport.list_names(["/"])
        assert abs(transport.now() - true_time()) < 5
    transport.close()
