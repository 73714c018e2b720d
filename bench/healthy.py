"""Compare Everstep without failures, with ordinary and with exact sums, to torchtitan's own HSDP.

    python bench/healthy.py [--steps 30] [--rounds 3]

Trains the same config, seed, data and global batch in three ways, in turn: Everstep with two replica groups of one
rank each; the same with [fault_tolerance] exact = true; and torchtitan's trainer with two ranks and
data_parallel_replicate_degree = 2. Prints the largest loss difference and the ratios of the median step times.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from everstep.report.score import account_of, loss_by_step
from everstep.run.events import read_events

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "demo.toml"
TITAN_STEP = re.compile(r"bench step (\d+) loss ([-\d.e+]+) took ([\d.]+)")
WARM_STEPS = 3
"""Steps at the beginning whose time does not count: first uses of code, and groups that join."""


def everstep(steps: int, folder: Path, *flags: str) -> tuple[dict[int, float], list[float]]:
    """Train with Everstep. Returns step -> loss, and the seconds between commits."""
    run_dir = folder / "-".join(["everstep", *flags])
    command = [sys.executable, "-m", "everstep.cli", "run", str(CONFIG), "--groups", "2", "--steps", str(steps)]
    run([*command, "--run-dir", str(run_dir), "--checkpoint.no-enable", *flags])
    commits = {e["step"]: e["mono"] for e in read_events(run_dir) if e["kind"] == "commit" and e["group"] == 0}
    return loss_by_step(account_of(run_dir).lineage.final()), gaps(commits)


def titan(steps: int, folder: Path) -> tuple[dict[int, float], list[float]]:
    """Train with torchtitan's own trainer. Returns the same as `everstep`."""
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", str(Path(__file__).resolve())]
    flags = ["--module", "everstep", "--config", str(CONFIG), "--dump_folder", str(folder / "titan")]
    flags += ["--fault_tolerance.no-enable", "--attention_check.no-enable", "--snapshot.no-enable"]
    flags += ["--parallelism.data_parallel_replicate_degree", "2"]
    flags += ["--parallelism.data_parallel_shard_degree", "1", "--checkpoint.no-enable"]
    output = run([sys.executable, *command, "--as-titan", *flags, "--training.steps", str(steps)])
    rows = {int(step): (float(loss), float(at)) for step, loss, at in TITAN_STEP.findall(output)}
    return {step: loss for step, (loss, _) in rows.items()}, gaps({step: at for step, (_, at) in rows.items()})


def gaps(times: dict[int, float]) -> list[float]:
    return [times[step] - times[step - 1] for step in sorted(times) if step - 1 in times and step > WARM_STEPS]


def run(command: list[str]) -> str:
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def as_titan(argv: list[str]) -> None:
    """Run one rank of torchtitan's trainer; print each step's loss in full precision, and when the step ended."""
    from everstep.titan import cpu

    cpu.stand_in()
    import time

    from torchtitan.components.metrics import MetricsProcessor

    def log(self, step, global_avg_loss, *args, **kwargs):
        if int(os.environ["RANK"]) == 0:
            print(f"bench step {step} loss {global_avg_loss!r} took {time.monotonic()}", flush=True)

    MetricsProcessor.log = log
    from everstep import train

    sys.argv = ["healthy.py", *argv]
    train.main()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"everstep": [], "exact": [], "titan": []}
    worst = 0.0
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = {
                "everstep": everstep(args.steps, Path(folder)),
                "exact": everstep(args.steps, Path(folder), "--fault_tolerance.exact"),
                "titan": titan(args.steps, Path(folder)),
            }
        losses = {way: losses for way, (losses, _) in found.items()}
        for way in ("everstep", "exact"):
            if losses[way].keys() != losses["titan"].keys():
                raise SystemExit(f"steps differ: {sorted(losses[way].keys() ^ losses['titan'].keys())}")
            worst = max(worst, *(abs(loss - losses["titan"][step]) for step, loss in losses[way].items()))
        for way, (_, took) in found.items():
            times[way] += took
        print(", ".join(f"{way} {median(took):.3f} s" for way, (_, took) in found.items()), "a step", flush=True)
    medians = {way: median(took) for way, took in times.items()}
    result = {
        "steps": args.steps,
        "rounds": args.rounds,
        "loss_difference_max": worst,
        **{f"{way}_step_s_median": round(took, 4) for way, took in medians.items()},
        "ratio": round(medians["everstep"] / medians["titan"], 4),
        "exact_ratio": round(medians["exact"] / medians["everstep"], 4),
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    if "--as-titan" in sys.argv:
        as_titan(sys.argv[sys.argv.index("--as-titan") + 1 :])
    else:
        sys.exit(main())
