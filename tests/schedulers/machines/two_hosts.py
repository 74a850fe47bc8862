"""Two addresses in a network of its own, one connection between them, and a heartbeat. Run by ``unshare --net``.

Reads one command a line, and answers each with one line of JSON: the bytes that wait to be acknowledged, and the
doublings of the kernel's timer. The far end of the connection belongs to a process that never reads.
"""

import fcntl
import json
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path

from trainer.process.heartbeat import CollectivesEntered, Heartbeat

HERE, THERE = "10.9.0.1", "10.9.0.2"


def main(path):
    """Obey the commands until their end."""
    call("ip", "link", "set", "lo", "up")
    for address in (HERE, THERE):
        call("ip", "address", "add", f"{address}/32", "dev", "lo")
    with socket.create_server((THERE, 0)) as server:
        own = socket.create_connection(server.getsockname(), source_address=(HERE, 0))
        far, _ = server.accept()
    own.setblocking(False)
    with own, far, subprocess.Popen(["sleep", "infinity"], stdin=far) as reader:
        far.close()
        try:
            with Heartbeat(path, 0) as heartbeat:
                obey(own, heartbeat)
        finally:
            reader.kill()


def obey(own, heartbeat):
    """Do what each line says, and answer."""
    for line in sys.stdin:
        command = line.strip()
        if command == "enter":
            heartbeat.follow(lambda: CollectivesEntered({"world": (0, 1)}, "all_reduce", "world"))
        if command.startswith("cut"):
            call("iptables", "-I", command.split()[1], "-d", THERE, "-j", "DROP")
        if command == "heal":
            call("iptables", "-F")
        if command == "send":
            own.send(bytes(1000))
        if command == "fill":
            fill(own)
        waiting = struct.unpack("i", fcntl.ioctl(own, termios.TIOCOUTQ, bytes(4)))[0]
        doublings = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[4]
        print(json.dumps([waiting, doublings]), flush=True)


def fill(own):
    """Send until nothing more fits."""
    try:
        while True:
            own.send(bytes(65536))
    except BlockingIOError:
        pass


def call(*argv):
    """Run a program that must succeed."""
    subprocess.run(argv, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
