"""What a killed group costs: stall and rejoin over at least KILLS kills of a real run.

    python bench/recovery.py [--kills 20] [--every 8] [--groups 3] [--config configs/demo.toml]

Runs `everstep run` with random kills until enough of them have been recovered from, and prints a line for each kill
and the medians. Stall: from the kill to the next commit, less a healthy step. Rejoin: from the kill to the killed
group's next commit with slots of its own. The definitions are those of `everstep report` (docs/report.md).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from everstep.report.score import load_events, measure, score, verdict

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between kills")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--run-dir", type=Path, help="kept; a temporary folder otherwise")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = args.run_dir or Path(folder) / "run"
        # A step takes about a second and a half here: enough of them for all kills, and some to start with.
        steps = round((args.kills + 6) * args.every / 1.5)
        command = [sys.executable, "-m", "everstep.cli", "run", str(args.config)]
        command += ["--groups", str(args.groups), "--steps", str(steps), "--chaos-every", str(args.every)]
        status = subprocess.run([*command, "--run-dir", str(run_dir)], check=False).returncode
        kills = [
            kill
            for kill in measure(load_events(run_dir)).rows
            if kill["stall_s"] is not None and kill["rejoin_s"] is not None
        ]
        for kill in kills:
            print(f"{kill['at_s']:8.1f} s  group {kill['group']}  ", end="")
            print(f"stall {kill['stall_s']:5.2f} s  rejoin {kill['rejoin_s']:5.2f} s")
        found = score(run_dir)
        stalls, rejoins = [kill["stall_s"] for kill in kills], [kill["rejoin_s"] for kill in kills]
        result = {
            "kills": len(kills),
            "stall_s_median": round(median(stalls), 2),
            "stall_s_max": round(max(stalls), 2),
            "delay_s_median": found["delay_s_median"],
            "rejoin_s_median": round(median(rejoins), 2),
            "rejoin_s_max": round(max(rejoins), 2),
            "step_s_median": found["step_s_median"],
            "attempts_thrown_away": found["attempts_thrown_away"],
            "samples_lost": found["samples_lost"],
            "samples_repeated": found["samples_repeated"],
        }
        print(json.dumps(result, indent=2))
        broken = verdict(found)
        print("\n".join(broken))
    return status or int(bool(broken)) or int(len(kills) < args.kills)


if __name__ == "__main__":
    sys.exit(main())
