"""The virtual NPU's HCCL (arithmetic by the CPU) called directly: a rank is killed, the other ends, nothing stays."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time

STARTS = 100  # groups of two ranks
INFO_BYTES = 4108
REMOTE, TIMEOUT = 21, 9  # codes of hccl_types.h


def _rank(hccl: ctypes.CDLL, rank: int, read: int, write: int) -> int:
    """Join a group of two and add vectors until something fails; returns the code."""
    info = (ctypes.c_char * INFO_BYTES)()
    if rank == 0:
        hccl.HcclGetRootInfo(info)
        os.write(write, info.raw)
    else:
        os.close(write)  # so that the end of rank 0 ends the read
        info.raw = os.read(read, INFO_BYTES)
    comm, values = ctypes.c_void_p(), (ctypes.c_float * 4)(1, 2, 3, 4)
    code = hccl.HcclCommInitRootInfo(2, info, rank, ctypes.byref(comm))
    while not code:
        code = hccl.HcclAllReduce(values, values, ctypes.c_uint64(4), 4, 0, comm, None)
    return code


def test_when_a_rank_is_killed_the_other_ends_and_nothing_stays(monkeypatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    hccl, generator = ctypes.CDLL("libhccl.so"), random.Random(0)
    names, codes = sorted(os.listdir("/dev/shm")), []
    for _ in range(STARTS):
        read, write = os.pipe()
        ranks = []
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _rank(hccl, rank, read, write)
                finally:
                    os._exit(code)
            ranks.append(pid)
        os.close(read)
        os.close(write)
        time.sleep(0.02 + generator.random() * 0.02)
        victim = generator.choice(ranks)
        os.kill(victim, signal.SIGKILL)
        for pid in ranks:
            status = os.waitpid(pid, 0)[1]
            if pid != victim:
                codes.append(os.waitstatus_to_exitcode(status))
    assert set(codes) <= {REMOTE, TIMEOUT}  # TIMEOUT: it was killed before both had joined
    assert codes.count(REMOTE) > STARTS // 2
    assert sorted(os.listdir("/dev/shm")) == names
    assert not any("npu-backend-hccl" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
