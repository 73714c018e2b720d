"""Check that a long run with hundreds of kills loses nothing, and that its processes do not grow.

    python bench/endurance.py [--kills 300] [--every 6] [--groups 3] [--config configs/demo.toml] [--run-dir DIR]

Starts `everstep run`, breaks it with a campaign of `everstep chaos` and stops it cleanly after the last kill. The first
half of the kills spares group 0, so that one trainer lives through all of them; the second half hits every group. Every
few seconds it reads memory, file descriptors and threads of the run's processes, and the bytes in shared memory. Each
of these series is flat if the median of its last quarter is within GROWTH of the median of its second quarter, because
the first quarter is start-up. Shared memory is compared to its third quarter: a group's buffers grow to its largest
part, which is the whole state if the group was once alone. Prints one JSON object, which is also written to
DIR/endurance.json, beside the run's report. The exit status is 1 if the promise was broken or something grew.
"""

import argparse
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from statistics import median

import psutil

from everstep.report.score import broken_promises, score
from everstep.run.events import EventTail, read_events
from everstep.snapshot.peers import read_records

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 5.0
GROWTH = 0.1
ENOUGH = 50
"""Kills from which on growth is judged: what a trainer opens on first use does not count as growth."""
TRAINER = "trainer of group 0"
SLACK = {"rss_mib": 8.0, "fds": 4.0, "threads": 4.0, "bytes_mib": 8.0}
"""Quantity -> difference that never counts as growth."""


class Samples:
    """Series of one run, by process role and quantity over time, read from outside the run."""

    def __init__(self, run_dir: Path, supervisor: psutil.Process):
        self._run_dir, self._supervisor = run_dir, supervisor
        self._roles: dict[int, str] = {}
        self._tail = EventTail(run_dir)
        self.series: dict[str, list[tuple[float, float]]] = {}
        self.kills = 0
        """Kills so far."""

    def take(self, spared: int) -> None:
        """Take one sample of everything. The trainer of group 0 is only sampled during the first `spared` kills, which
        spare it."""
        self._follow()
        now = time.monotonic()
        by_role: dict[str, list[dict[str, float]]] = {}
        for process in [self._supervisor, *self._supervisor.children(recursive=True)]:
            role = "supervisor" if process == self._supervisor else self._roles.get(process.pid, "")
            if role and (self.kills < spared or role != TRAINER) and (found := _read(process)):
                by_role.setdefault(role, []).append(found)
        for role, processes in by_role.items():
            for quantity in ("rss_mib", "fds", "threads"):
                largest = max(found[quantity] for found in processes)
                self.series.setdefault(f"{role} {quantity}", []).append((now, largest))
        self.series.setdefault("shared memory bytes_mib", []).append((now, _shared_bytes(self._run_dir) / 2**20))

    def _follow(self) -> None:
        for event in self._tail.new():
            if event["kind"] == "lighthouse_started":
                self._roles[event["pid"]] = "lighthouse"
            elif event["kind"] == "workers_started" and event["group"] == 0:
                self._roles.update(dict.fromkeys(event["pids"], TRAINER))
            elif event["kind"] == "fault":
                self.kills += 1

    def growth(self) -> dict[str, dict[str, float | bool]]:
        """Return, for each series, the medians of an earlier and of the last quarter, and whether it is flat."""
        found = {}
        for name, points in sorted(self.series.items()):
            values = [value for _, value in points]
            quarter = len(values) // 4
            if quarter == 0:
                continue
            first = 2 * quarter if name.startswith("shared") else quarter
            early, late = median(values[first : first + quarter]), median(values[-quarter:])
            slack = SLACK[name.rpartition(" ")[2]]
            flat = late <= early + max(GROWTH * early, slack)
            found[name] = {"earlier": round(early, 1), "last_quarter": round(late, 1), "flat": flat}
        return found


def _read(process: psutil.Process) -> dict[str, float] | None:
    try:
        return {
            "rss_mib": process.memory_info().rss / 2**20,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
        }
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _shared_bytes(run_dir: Path) -> int:
    """Return the bytes of the run's snapshots in shared memory."""
    segments = {place.segment for place in read_records(run_dir)}
    return sum(_size(path) for segment in segments for path in Path(segment).rglob("*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def campaign(kills: int, every_s: float, groups: int) -> str:
    """Return a campaign that kills a drawn group every `every_s` seconds, group 0 only in the second half. A kill that
    waits for its group to take part does not delay the next."""
    draw, rows = random.Random(kills), []
    for number in range(kills):
        group = draw.randrange(int(number < kills // 2), groups)
        at = f"at_s = {every_s * (number + 1)}\npatience_s = 600.0"
        rows.append(f'[[fault]]\nname = "kill-group"\ngroup = {group}\n{at}\n')
    return "\n".join(rows)


def break_it(run_dir: Path, plan: Path, samples: Samples, spared: int) -> None:
    """Run a campaign, and take samples meanwhile."""
    command = [sys.executable, "-m", "everstep.cli", "chaos", str(run_dir), "--campaign", str(plan)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as injector:
        try:
            while injector.poll() is None:
                samples.take(spared)
                time.sleep(SAMPLE_S)
        finally:
            injector.send_signal(signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between kills")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--run-dir", type=Path, help="a folder to keep; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (args.run_dir or Path(folder) / "run").resolve()
        command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir)]
        command += ["--groups", str(args.groups), "--steps", "1000000", "--lr_scheduler.total_steps", "1000000"]
        begin = time.monotonic()
        with subprocess.Popen([*command, "--snapshot.enable"], stdout=subprocess.DEVNULL) as run:
            try:
                samples = Samples(run_dir, psutil.Process(run.pid))
                while run.poll() is None and not any(e["kind"] == "commit" for e in read_events(run_dir)):
                    time.sleep(0.5)
                plan = Path(folder) / "kills.toml"
                plan.write_text(campaign(args.kills, args.every, args.groups))
                break_it(run_dir, plan, samples, args.kills // 2)
                time.sleep(2 * args.every)  # the last killed group rejoins
            finally:
                run.send_signal(signal.SIGINT)
        found = score(run_dir)
        growth = samples.growth()
        fields = "kills steps attempts attempts_thrown_away samples_lost samples_repeated goodput "
        fields += "stall_s_median stall_s_max rejoin_s_median rejoin_s_max step_s_median groups_mean replicas_diverged"
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, "
            f"{platform.system()} {platform.machine()}",
            "config": tomllib.loads(args.config.read_text())["job"],
            "took_s": round(time.monotonic() - begin),
            **{field: found[field] for field in fields.split()},
            "growth": growth,
        }
        (run_dir / "endurance.json").write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
        broken = broken_promises(found)
        if args.kills >= ENOUGH:
            broken += [f"{name} grew" for name, series in growth.items() if not series["flat"]]
        print("\n".join(broken), file=sys.stderr)
    return run.returncode or int(bool(broken)) or int(found["kills"] < args.kills)


if __name__ == "__main__":
    sys.exit(main())
