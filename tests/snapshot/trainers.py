"""The trainers of a small run as one process, to be killed at any instant.

python trainers.py RUN_DIR HOME GROUPS SEED
"""

import random
import sys
import time
from pathlib import Path

from everstep.run.token import run_token
from everstep.snapshot.copier import Copier
from everstep.snapshot.layout import State
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from snapshot_cluster import state_of


def main(run_dir: Path, home: Path, groups: int, seed: int) -> None:
    chance, members = random.Random(seed), list(range(groups))
    scale, token = chance.choice((1, 4, 12)), run_token(run_dir)
    settings = [
        Snapshot(enable=True, interval=1, segment_dir=f"{home}/host-{g}", memory_reserve_gb=0.0, coding_timeout_s=4.0)
        for g in members
    ]
    segments = [Segment.of(settings[group], run_id(token), group) for group in members]
    copiers = [Copier(segments[g], 0, 1, settings[g], lambda *a, **k: None) for g in members]
    tensors = [{name: t.clone() for name, t in state_of(1, 0, scale).tensors.items()} for _ in members]
    print(f"scale {scale}", flush=True)
    step = 0
    while True:
        step += 1
        time.sleep(chance.expovariate(1 / chance.choice((0.01, 0.05, 0.3))))
        for copier in copiers:
            copier.wait()
        words = {group: copier.word() for group, copier in zip(members, copiers, strict=True)}
        taken = copiers[0].agreed.taken
        if taken is not None and all(word.coded and word.published for word in words.values()):
            print(f"coded {taken[0]}", flush=True)
        fresh = state_of(step, 0, scale)
        print(f"committed {step}", flush=True)
        for mine, copier in zip(tensors, copiers, strict=True):
            for name, tensor in fresh.tensors.items():  # the optimizer changes tensors in place
                mine[name].copy_(tensor)
            copier.committed(step, 1, members, words, lambda mine=mine: State(mine, fresh.meta, fresh.blobs))  # noqa: B023


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
