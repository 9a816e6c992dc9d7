"""Ranks on hosts of their own: separate names, and no memory in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RANK = Path(__file__).parents[1] / "support" / "rank_on_host.py"
# Linux namespaces stand in for hosts; the network is the loopback device.
HOST = ["unshare", "--map-root-user", "--uts", "--mount", "sh", "-c"]
ENTER = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def test_naive_serves_ranks_of_two_hosts() -> None:
    try:
        tried = subprocess.run([*HOST, ENTER, "host", "true"], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no command unshare here: {error}")
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    run("cpu", [[*HOST, ENTER, f"host{rank}"] for rank in range(2)], [{}, {}])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_naive_serves_gpus_of_two_hosts() -> None:
    """NCCL takes them for hosts of their own, and uses its network transport."""
    apart = {"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}
    run("cuda", [[], []], [{"NCCL_HOSTID": f"host{rank}", **apart} for rank in range(2)])


def run(device: str, hosts: list[list[str]], variables: list[dict[str, str]]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*host, sys.executable, RANK, device, str(rank), str(len(hosts)), str(store.port)],
            env=os.environ | loopback | variables[rank],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        for process in ranks:
            out, err = process.communicate(timeout=120)
            assert out == "right\n", err
    finally:
        for process in ranks:
            process.kill()
