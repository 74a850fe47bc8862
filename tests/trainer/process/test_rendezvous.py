"""Port for the rendezvous, as job.sh requests it."""

import socket
import subprocess
import sys

import pytest

from trainer.process.launch_environment import port_of_job
from trainer.process.rendezvous import RendezvousError, find_address, find_port


def _free_range():
    # A range whose first candidate the kernel has just reported as free.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_taken_port_is_moved_on_from():
    port = _free_range()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert find_port("job", port, port) is None
        found = find_port("job", port, port + 5)
        assert found is not None
        assert port < found <= port + 5


def test_wildcard_listener_counts_for_a_host():
    port = _free_range()
    with socket.socket() as listener:
        listener.bind(("", port))
        listener.listen()
        assert find_port("job", port, port, "127.0.0.1") is None


def test_free_port_is_the_derived_one():
    port = port_of_job("run-1", 21000, 21999)
    assert find_port("run-1", 21000, 21999) in range(port, port + 20)


def test_command_is_quick_and_torch_free():
    script = (
        "import sys, trainer.__main__ as m; code = m.main(['rendezvous', '--job-id', '7', '--ports', '21000-21999']);"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 21000 <= int(done.stdout) <= 21999


def test_bad_answers():
    def ask(*arguments):
        command = [sys.executable, "-m", "trainer", "rendezvous", "--job-id", "7", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ask("--ports", "9-1").returncode == 2
    other = ask("--ports", "21000-21999", "--host", "192.0.2.1")
    assert other.returncode == 1
    assert "192.0.2.1" in other.stderr


def test_the_sites_own_port_comes_first():
    port = _free_range()
    assert find_port("job", 21000, 21999, start=port) == port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert find_port("job", 21000, 21999, "127.0.0.1", start=port) in range(21000, 22000)


def test_one_node_meets_on_the_loopback_and_several_never_do():
    assert find_address(None, None) == "127.0.0.1"
    assert find_address("lo", None) == "127.0.0.1"
    for interface, peer in (("lo", "192.0.2.1"), (None, "127.0.0.1"), ("nosuch0", "192.0.2.1")):
        with pytest.raises(RendezvousError, match=r"rendezvous\.interface .* one of .*lo"):
            find_address(interface, peer)
