"""A cable that is pulled in the middle of training: every rank on both sides ends in time and says who is missing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import Network, network, why_not

LIMIT_S = 4.0
PROMISED_S = LIMIT_S + 5.0
END_S = 4.0  # for Python itself to end, on a loaded machine

RANK = """
import sys, time, torch, torch.distributed as dist, hsdp
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
hsdp.hybrid_shard(model, units="Linear", timeout_s=float(sys.argv[1]), announce=False)
print("rows", hsdp.describe(model).rows, flush=True)
for step in range(10_000):
    model(torch.ones(2, 300)).sum().backward()
    if step == 5:
        print("training", flush=True)
    time.sleep(0.02)
"""


def start(net: Network, folder: Path) -> list[subprocess.Popen[str]]:
    (folder / "rank.py").write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": net.hosts[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    common |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    argv = [sys.executable, str(folder / "rank.py"), str(LIMIT_S)]
    return [net.start(net.hosts[rank // 2], argv, {**common, "RANK": str(rank)}) for rank in range(4)]


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith(word):
            return text
    raise AssertionError(f"the process ended without a line {word!r}:\n{text}")


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("lost", [1, 0], ids=["other-host", "host-of-the-store"])
def test_a_cut_link(lost: int, tmp_path: Path) -> None:
    with network(2) as net:
        ranks = start(net, tmp_path)
        for process in ranks:
            assert "rows ((0, 1), (2, 3))" in read_until(process, "training")
        net.cut(net.hosts[lost])
        cut = time.monotonic()
        # torch's hook for exceptions writes the rank before every line.
        texts = [process.communicate(timeout=60)[0].replace(f"[rank{i}]: ", "") for i, process in enumerate(ranks)]
        seconds = time.monotonic() - cut
    assert seconds < PROMISED_S + END_S, texts
    for rank, text in enumerate(texts):
        assert ranks[rank].returncode == 1, text
        assert "\nRuntimeError: the cross-reduce of unit " in text
        assert f" did not complete on rank {rank}: waited {LIMIT_S:.1f} s, without what has to come from rank " in text
        assert "Traceback" in text
    for text in texts[:2]:  # the store is on this side
        assert "likely: ranks 2, 3: dead, stopped, or cut off from the store" in text
    for text in texts[2:]:
        assert "likely: the process that holds the store is dead, stopped or cut off from here (rank 0" in text
