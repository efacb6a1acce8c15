"""A worker of a fleet in a process of its own, with the toy op on a device that takes a little time for each candidate.

`python -m tests.tuning.fleet.fleet_worker [stuck]`, with the storage in $MGPU_OPS_STORAGE. Prints JSON for each job it ends.
"stuck": says so at its third candidate, which it never ends, and passes for a process of another machine.
"""

from __future__ import annotations

import json
import os
import sys
import time

from mgpu_ops.tuning import ledger, storage
from mgpu_ops.tuning.fleet import queue as fleet_queue
from tests.tuning import toy

HEARTBEAT, GRACE = 1, 6  # seconds
SLOTS = 3


def main(stuck: bool) -> None:
    judged: list[toy.Config] = []

    def judge(config: toy.Config) -> float:
        judged.append(config)
        if stuck and len(judged) == 3:
            print("stuck", flush=True)
            time.sleep(600)
        time.sleep(0.02)
        return toy.slope(config)

    fleet_queue.POLL = 0.2
    if stuck:
        ledger._machine = lambda: "another machine"  # type: ignore[assignment]
    device = toy.FakeDevice(judge, toy_final, slots=SLOTS)
    with storage.opened(os.environ[storage.VARIABLE], heartbeat=HEARTBEAT, grace=GRACE) as backend:
        for ended in fleet_queue.Worker(backend, device, lambda op: toy.SPEC, lambda text: print(text, file=sys.stderr)).work():
            assert ended.entry is not None
            print(json.dumps([ended.job.problem, ended.entry.config]), flush=True)


def toy_final(config: toy.Config) -> list[float]:
    return [toy.slope(config) + noise for noise in (-0.1, 0.0, 0.1)]


if __name__ == "__main__":
    main("stuck" in sys.argv)
