"""Several hosts on one machine: Linux network namespaces, each with a hostname, an address and a link of its own.

    with network(2) as net:                              # host0 10.77.0.1 --+-- host1 10.77.0.2
        first, second = net.hosts
        process = net.start(second, ["python", "train.py"], env={"RANK": "1"})
        net.cut(second)                                  # pull its cable: packets vanish, nobody is told
        net.mend(second)

    bridge --- veth --- eth0 in namespace 0    programs there have hostname host0, and /etc/hosts knows all hosts
       `------ veth --- eth0 in namespace 1    hostname host1

The bridge has no address, so nothing outside can be reached, and several such networks never meet. Every port is free.
The kernel and so the boot id are shared; hostnames differ, which is enough to count as different hosts.
Needs root and the programs in `_PROGRAMS`; `why_not()` says what is missing. On leaving, whatever runs there is killed
and everything made is removed, also after an error. Should this process itself be killed, `ip netns` lists what is
left, as hsdp-PID..., and `ip -br link` the bridge, as hbPID...
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROGRAMS = ("ip", "unshare", "hostname")
_NETNS_FOLDER = Path("/etc/netns")  # `ip netns exec` mounts the files in its NAME/ over those in /etc
_serial = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host: its hostname, its address, and what `ip` calls its namespace and the bridge's end of its cable."""

    name: str
    address: str
    namespace: str
    port: str


@dataclass(frozen=True)
class Network:
    hosts: tuple[Host, ...]

    def command(self, host: Host, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on `host`, for whoever starts processes in another way than `start`."""
        enter = ["ip", "netns", "exec", host.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', host.name, *argv]

    def start(self, host: Host, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `argv` on `host`, with `env` added to this process's environment; both outputs come as one text."""
        return subprocess.Popen(
            self.command(host, argv), env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def cut(self, host: Host) -> None:
        """Pull the cable of `host`: what is sent to it or by it is lost without an error; its loopback goes on."""
        _ip("link", "set", host.port, "down")

    def mend(self, host: Host) -> None:
        """Plug it in again. TCP connections that did not time out go on, after a wait for their next retransmission."""
        _ip("link", "set", host.port, "up")


@cache
def why_not() -> str | None:
    """Why there can be no namespaces here, for a test to skip with; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with network(1):
            return None
    except RuntimeError as error:
        return f"no network namespaces here: {error}"


@contextlib.contextmanager
def network(
    num_hosts: int | None = None, *, names: Sequence[str] = (), own_address: str | None = None
) -> Iterator[Network]:
    """A network of `num_hosts` hosts host0, host1, ... with the addresses 10.77.0.1, 10.77.0.2, ... on their eth0.

    Args:
        names: other hostnames; there are as many hosts then.
        own_address: what a host resolves its own name to; default: its address. Debian writes 127.0.1.1 there.

    Raises:
        RuntimeError: something could not be made.
    """
    tag = f"{os.getpid()}n{next(_serial)}"  # names of interfaces have 15 characters at most
    bridge = f"hb{tag}"
    names = names or [f"host{i}" for i in range(num_hosts or 0)]
    hosts = tuple(Host(name, f"10.77.0.{i + 1}", f"hsdp-{tag}-{i}", f"h{tag}p{i}") for i, name in enumerate(names))
    with contextlib.ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _add(host, bridge, undo)
            _write_hosts_file(host, hosts, own_address, undo)
        yield Network(hosts)


def _add(host: Host, bridge: str, undo: contextlib.ExitStack) -> None:
    _ip("netns", "add", host.namespace)
    undo.callback(_ip, "netns", "del", host.namespace)
    undo.callback(_kill_all, host)
    _ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    undo.callback(_ip, "link", "del", host.port)  # with its other end
    _ip("link", "set", host.port, "master", bridge, "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")


def _write_hosts_file(host: Host, hosts: Sequence[Host], own_address: str | None, undo: contextlib.ExitStack) -> None:
    folder = _NETNS_FOLDER / host.namespace
    folder.mkdir(parents=True)
    undo.callback(_remove, folder)
    own = {host: own_address} if own_address else {}
    lines = ["127.0.0.1 localhost", *(f"{own.get(each, each.address)} {each.name}" for each in hosts)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # others' namespaces may have files there
        _NETNS_FOLDER.rmdir()


def _kill_all(host: Host) -> None:
    """Kill what runs in the namespace, which only whoever made it can have started."""
    deadline = time.monotonic() + 10
    while pids := _ip("netns", "pids", host.namespace).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {host.name} do not end: {', '.join(pids)}")
        time.sleep(0.05)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
