"""The end of a run as the ranks of one group see it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

from everstep.step import finish

STEP, DEADLINE_S = 14, 10.0


class Group:
    """Two ranks whose quorums and collectives wait for each other, as the real ones do."""

    def __init__(self):
        self._meeting = threading.Barrier(2, timeout=DEADLINE_S)
        self._flags = {}

    def join(self, **_):
        self._meeting.wait()
        return SimpleNamespace(leads=False)

    def all_in_group(self, flag):
        place = self._meeting.wait()
        self._flags[place] = flag
        self._meeting.wait()
        together = all(self._flags.values())
        self._meeting.wait()
        return together


def ended(run_dir, group):
    def _rank(rank):
        finish.finish(
            run_dir,
            step=STEP,
            membership=group,
            save=lambda: None,
            beat=lambda phase, step: None,
            all_in_group=group.all_in_group,
            timeout=timedelta(seconds=DEADLINE_S),
            give_up=timedelta(seconds=DEADLINE_S),
        )

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(_rank, range(2)))


def test_a_marker_that_only_one_rank_has_seen_leaves_no_rank_behind(tmp_path, monkeypatch):
    looks, lock, look = [], threading.Lock(), finish.finished_step

    def _looked(run_dir):
        with lock:
            looks.append(None)
            if len(looks) == 2:  # another group writes it after the first rank has looked
                finish._mark(run_dir, STEP)
            return look(run_dir)

    monkeypatch.setattr(finish, "finished_step", _looked)
    ended(tmp_path, Group())
    assert len(looks) == 4, "both looked twice"
