"""What a command costs on a machine that others use too: processor time, and the best of several runs."""

from __future__ import annotations

import resource
import subprocess
import sys


def of_python(*arguments: str, runs: int) -> float:
    """Seconds of user and system time that this Python takes with these arguments."""
    times = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)
