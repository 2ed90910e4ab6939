"""The hosts that the other tests run on: names, a cable that can be pulled, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Host, network, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LISTEN = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
peer, _ = server.accept()
for _ in range(2):
    print(peer.recv(9).decode(), flush=True)
"""
SEND = """
import socket
print(socket.gethostname(), flush=True)
peer = socket.create_connection(("host0", 5000), 10)
for _ in range(2):
    input()
    peer.send(b"hello")
input()
"""


def made(host: Host) -> list[str]:
    """What there is of a host."""
    lists = (["ip", "netns", "list"], ["ip", "-br", "link"])
    text = "".join(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in lists)
    found = [name for name in (host.namespace, host.port) if name in text]
    return found + [str(path) for path in [Path("/etc/netns") / host.namespace] if path.exists()]


def test_what_is_sent_over_a_cut_cable_arrives_when_it_is_mended() -> None:
    with network(2) as net:
        first, second = net.hosts
        listener = net.start(first, [sys.executable, "-c", LISTEN])
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        with subprocess.Popen(
            net.command(second, [sys.executable, "-c", SEND]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as sender:
            assert sender.stdin is not None
            assert sender.stdout is not None
            assert sender.stdout.readline() == "host1\n"
            print(file=sender.stdin, flush=True)
            assert listener.stdout.readline() == "hello\n"
            net.cut(second)
            print(file=sender.stdin, flush=True)
            with pytest.raises(subprocess.TimeoutExpired):
                listener.wait(1.5)
            net.mend(second)
            assert listener.stdout.readline() == "hello\n"
            assert listener.wait(10) == 0
            print(file=sender.stdin, flush=True)
        listener.stdout.close()


def test_nothing_is_left_after_an_error() -> None:
    hosts: list[Host] = []
    processes: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with network(1, own_address="127.0.1.1") as net:
            hosts.extend(net.hosts)
            assert len(made(net.hosts[0])) == 3
            processes.append(net.start(net.hosts[0], ["sh", "-c", "sleep 100 & sleep 100"]))
            raise KeyError("a test that fails")

    with pytest.raises(KeyError):
        fail()
    assert made(hosts[0]) == []
    text, _ = processes[0].communicate(timeout=5)  # its output is closed only when both have ended
    assert (text, processes[0].returncode) == ("", -9)
