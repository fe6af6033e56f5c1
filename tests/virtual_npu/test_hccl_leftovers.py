"""The virtual NPU's HCCL (arithmetic by the CPU) called directly: a rank is killed, the other ends, nothing stays."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import time

STARTS = 100  # groups of two ranks, of which every fifth is killed while its ranks may still be joining
INFO_BYTES = 4108
REMOTE, TIMEOUT = 21, 9  # codes of hccl_types.h


def _rank(hccl: ctypes.CDLL, rank: int, info_pipe: tuple[int, int], joined: int) -> int:
    """Join a group of two, say so, and add vectors until something fails; returns the code."""
    info = (ctypes.c_char * INFO_BYTES)()
    read, write = info_pipe
    if rank == 0:
        hccl.HcclGetRootInfo(info)
        os.write(write, info.raw)
    else:
        os.close(write)  # so that the end of rank 0 ends the read
        info.raw = os.read(read, INFO_BYTES)
    comm, values = ctypes.c_void_p(), (ctypes.c_float * 4)(1, 2, 3, 4)
    code = hccl.HcclCommInitRootInfo(2, info, rank, ctypes.byref(comm))
    os.write(joined, b".")
    while not code:
        code = hccl.HcclAllReduce(values, values, ctypes.c_uint64(4), 4, 0, comm, None)
    return code


def _kill_one_of_two(hccl: ctypes.CDLL, generator: random.Random, *, wait: bool) -> int:
    """The code that the other rank ends with; `wait`: both have joined before."""
    pipes = info, joined = os.pipe(), os.pipe()
    ranks = []
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _rank(hccl, rank, info, joined[1])
            finally:
                os._exit(code)
        ranks.append(pid)
    for _ in range(2 * wait):
        os.read(joined[0], 1)
    time.sleep(generator.random() * 0.02)
    for end in itertools.chain(*pipes):
        os.close(end)
    victim = generator.choice(ranks)
    os.kill(victim, signal.SIGKILL)
    codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks}
    return codes[sum(ranks) - victim]


def test_when_a_rank_is_killed_the_other_ends_and_nothing_stays(monkeypatch, nothing_left) -> None:
    hccl, generator = ctypes.CDLL("libhccl.so"), random.Random(0)
    for start in range(STARTS):
        wait = start % 5 != 0
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60" if wait else "1")  # seconds; who waits in vain waits so long
        code = _kill_one_of_two(hccl, generator, wait=wait)
        assert code == REMOTE or (code == TIMEOUT and not wait)
    assert not any("npu-backend-hccl" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
