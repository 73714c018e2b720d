"""What a first run on a GPU machine has to show, check by check: pass, fail or skipped, and the figure.

    python bench/gpu/first_run.py [--only NAME ...] [--minutes 10] [--json RESULT.json]

Each check is a process of its own with a time limit, so that a hang is a failed check. Without a GPU those that need
one say so, and what has a stand-in on a CPU runs on that. Status 1 if a check failed.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path[:0] = [str(ROOT / "plugin"), str(ROOT / "bench")]
TOKEN, WAIT = bytes(range(32)), timedelta(seconds=60)
BUCKET = 8 << 20
"""Numbers in a bucket of 32 MiB."""


class Skipped(Exception):
    """Why a check does not apply to this machine."""


@dataclass
class Result:
    name: str
    outcome: str
    figure: str
    took_s: float


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs(count: int = 1) -> None:
    if gpus() < count:
        raise Skipped("no GPU" if not gpus() else f"{count} GPUs are needed, and here is {gpus()}")


def needs_titan() -> None:
    try:
        import torchtitan  # noqa: F401
    except ImportError:
        raise Skipped("no torchtitan") from None


def needs_reconfigure() -> None:
    from torch.distributed import distributed_c10d as c10d

    if not hasattr(c10d, "ReconfigureOptions"):
        raise Skipped("torch 2.15 is needed")


# Transport


def column(rank: int) -> tuple[Any, Any]:
    """This process's rank column and the device of its gradients: NCCL where each rank has a GPU, Gloo otherwise."""
    import torch

    from everstep.quorum.process_group import RankColumn
    from everstep.step.streams import streams_of

    device = torch.device("cuda", rank) if gpus() > rank else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    made = RankColumn(
        "nccl" if device.type == "cuda" else "gloo",
        column=0,
        host="127.0.0.1",
        connect_timeout=WAIT,
        reduce_timeout=WAIT,
        token=TOKEN,
        streams=streams_of(device),
    )
    return made, device


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.monotonic()
    found = call()
    return time.monotonic() - begin, found


def one_gpu() -> str:
    """Connect alone, the first time and again; sums; a broken communicator and the next one."""
    import torch
    import torch.distributed as dist

    needs_reconfigure()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, device = column(0)
    first_s, _ = timed(lambda: mine.warm(f"127.0.0.1:{store.port}", WAIT))
    rebuilds = []
    for number in range(20):
        place = {"key": str(number), "store": f"127.0.0.1:{store.port}", "host": 0, "rank": 0, "peers": [mine.address]}
        took_s, _ = timed(lambda given=place: mine.connect(**given))
        rebuilds.append(took_s)
        values = torch.full((BUCKET,), 2.0, device=device)
        mine.finish(mine.start(values, WAIT))
        assert float(values.sum()) == 2.0 * BUCKET
    mine.close()
    where = "NCCL" if device.type == "cuda" else "stand-in, Gloo on the CPU"
    return f"{where}: first use {first_s:.2f} s, again {1000 * sorted(rebuilds)[10]:.1f} ms (median of 20)"


def _member(rank: int, store: str, pipe: Any) -> None:
    import torch

    from everstep.quorum.process_group import reach
    from everstep.step.interfaces import SumsBroken

    mine, device = column(rank)
    mine.warm(store, WAIT)
    board = reach(store, WAIT)
    pipe.send("ready")
    while True:
        what, *given = pipe.recv()
        begin, answer = time.monotonic(), ""
        try:
            if what == "connect":
                key, place, size = given
                board.set(f"{key}/{place}", mine.address)
                peers = [board.get(f"{key}/{peer}").decode() for peer in range(size)]
                mine.connect(key=key, store=store, host=0, rank=place, peers=peers)
            elif what == "sum":
                values = torch.full((BUCKET,), rank + 1.0, device=device)
                mine.finish(mine.start(values, WAIT))
                answer = float(values[-1])
            elif what == "die":
                threading.Timer(given[0], os.kill, (os.getpid(), signal.SIGKILL)).start()
        except SumsBroken as error:
            answer = str(error)
        pipe.send((time.monotonic() - begin, answer))


def two_gpus() -> str:
    """Sums between two processes; one is killed while the other waits for it; a new one comes."""
    import torch.distributed as dist

    needs_reconfigure()
    if gpus() == 1:
        needs(2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")

    def begin(rank: int) -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_member, args=(rank, f"127.0.0.1:{store.port}", theirs), daemon=True)
        process.start()
        ours.recv()
        return ours, process

    def tell(pipes: list[Any], *what: Any) -> list[tuple[float, Any]]:
        for rank, pipe in enumerate(pipes):
            pipe.send((*what, rank, len(pipes)) if what[0] == "connect" else what)
        return [pipe.recv() for pipe in pipes]

    (first, one), (second, other) = begin(0), begin(1)
    tell([first, second], "connect", "a")
    sums = tell([first, second], "sum")
    assert [total for _, total in sums] == [3.0, 3.0], sums
    sums = tell([first, second], "sum")
    tell([second], "die", 0.5)
    ((noticed_s, answer),) = tell([first], "sum")
    assert isinstance(answer, str), answer
    assert noticed_s < 5, f"the death was noticed after {noticed_s:.1f} s"
    other.join()
    second, other = begin(1)
    answers = tell([first, second], "connect", "b")
    assert not any(error for _, error in answers), answers
    assert [total for _, total in tell([first, second], "sum")] == [3.0, 3.0]
    for process in (one, other):
        process.kill()
    where = "NCCL" if gpus() > 1 else "stand-in, Gloo on the CPU"
    speed = BUCKET * 4 / max(took for took, _ in sums) / 1e9
    again_ms = 1000 * max(took for took, _ in answers)
    return f"{where}: {speed:.2f} GB/s, death noticed after {noticed_s - 0.5:.2f} s, again in {again_ms:.0f} ms"


# The rest of a worker's life


def fork_before_cuda() -> str:
    """What is imported before workers are forked leaves CUDA alone, and a forked worker can use it."""
    import torch

    try:
        from everstep.launch.forking import preload

        preload()
        what = "the launcher's imports"
    except ImportError as error:
        what = f"torch alone ({error})"
    assert not torch.cuda.is_initialized(), "an import initialised CUDA"
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        device = "cuda" if gpus() else "cpu"
        os._exit(0 if float(torch.ones(4, 4, device=device).mm(torch.ones(4, 4, device=device)).sum()) == 64.0 else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked process ended with {status}"
    return f"{what}; forked and computed on {'the GPU' if gpus() else 'the CPU'} after {time.monotonic() - begin:.2f} s"


def pinned_copies() -> str:
    """From the device to pinned host memory beside a computation: the bytes are right, and it does not wait."""
    needs()
    import torch

    size = 256 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    plain, pinned, stream = torch.empty_like(source, device="cpu"), None, torch.cuda.Stream()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    plain_s, _ = timed(lambda: plain.copy_(source))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        issued_s, _ = timed(lambda: pinned.copy_(source, non_blocking=True))
        rest_s, _ = timed(stream.synchronize)
    assert torch.equal(plain, pinned), "the copies differ"
    assert issued_s < rest_s, f"the copy blocked the host for {issued_s:.3f} s"
    return f"pinned {size / (issued_s + rest_s) / 1e9:.1f} GB/s, pageable {size / plain_s / 1e9:.1f} GB/s"


def host_synchronisations() -> str:
    """None between the first gradient of the last slot and the last sum's begin."""
    needs()
    needs_reconfigure()
    import torch
    import torch.distributed as dist

    from everstep.step.reduction import GradientReducer

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, device = column(0)
    mine.connect(key="a", store=f"127.0.0.1:{store.port}", host=0, rank=0, peers=[mine.address])
    params = [torch.nn.Parameter(torch.ones(1 << 20, device=device)) for _ in range(32)]
    reducer = GradientReducer(params, 8 << 20, mine._streams)

    def slot(last: bool) -> None:
        reducer.begin_slot(last=last)
        torch.stack([(param * 2).sum() for param in params]).sum().backward()
        reducer.end_slot()

    reducer.begin(mine, WAIT)
    slot(last=False)
    for param in params:
        param.grad = None
    reducer.begin(mine, WAIT)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        slot(last=True)
        torch.cuda.set_sync_debug_mode("default")
    reducer.finish()
    reducer.assign(1.0)
    assert all(param.grad is not None and float(param.grad.max()) == 2.0 for param in params), "the sums are wrong"
    mine.close()
    assert not seen, f"{len(seen)} host synchronisations, the first: {seen[0].message}"
    return f"0 over {len(reducer._buckets)} buckets"


# Runs


def run(command: list[str], limit_s: float = 900) -> str:
    """A command's output; AssertionError with its end if it fails."""
    paths = [str(ROOT / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-800:]}"
    return done.stdout


def everstep(run_dir: Path, *flags: str, limit_s: float = 900) -> None:
    command = [sys.executable, "-m", "everstep.cli", "run", str(ROOT / "configs" / "demo.toml")]
    backend = "nccl" if gpus() > 1 else "gloo"
    flags = (*flags, "--fault_tolerance.process_group", backend, "--fault_tolerance.connect_timeout_s", "3.0")
    run([*command, "--run-dir", str(run_dir), *flags], limit_s)


def bitwise() -> str:
    """Two runs of one group end with the same losses, to the bit."""
    needs_titan()
    from everstep.report.score import curve

    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            everstep(Path(folder, name), "--groups", "1", "--steps", "8", "--checkpoint.no-enable")
        one, two = (curve(Path(folder, name)) for name in ("one", "two"))
    differing = [step for step in one if one[step] != two.get(step)]
    assert one, "no step was made"
    assert not differing, f"steps {differing} differ: {[(one[s], two.get(s)) for s in differing[:3]]}"
    return f"{len(one)} steps, losses equal to the bit ({'GPU' if gpus() else 'CPU'})"


MINUTES = 10.0


def kills() -> str:
    """A run with a kill every 10 s: every step made, every batch whole, nothing computed twice."""
    needs_titan()
    every_s = 10.0
    count = max(1, int(60 * MINUTES / every_s))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "bench" / "endurance.py"), "--kills", str(count), "--every", str(every_s)]
        said = run([*command, "--groups", str(max(2, gpus())), "--run-dir", f"{folder}/run"], 60 * MINUTES + 900)
        report = json.loads(Path(folder, "run", "report.json").read_text())
    assert said
    figures = {key: report[key] for key in sorted(report) if re.search("kill|lost|thrown|stall|duplic", key)}
    return json.dumps(figures)[:400]


CHECKS: dict[str, tuple[Callable[[], str], float]] = {
    "transport-one": (one_gpu, 300),
    "transport-two": (two_gpus, 300),
    "fork-before-cuda": (fork_before_cuda, 300),
    "pinned-copies": (pinned_copies, 120),
    "host-synchronisations": (host_synchronisations, 300),
    "bitwise": (bitwise, 1800),
    "kills": (kills, 60 * MINUTES + 1800),
}
"""By name: the check and its time limit in seconds."""


def check(name: str, minutes: float, answer: Any) -> None:
    """Run a check in this process, and say what came of it."""
    global MINUTES
    MINUTES = minutes
    try:
        answer.send(("pass", CHECKS[name][0]()))
    except Skipped as reason:
        answer.send(("skipped", str(reason)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the check found
        traceback.print_exc()
        answer.send(("fail", f"{type(error).__name__}: {error}"[:600]))
    sys.stdout.flush()
    os._exit(0)  # libraries would list what they leak at their end


def carry_out(name: str, minutes: float) -> Result:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=check, args=(name, minutes, theirs))
    begin = time.monotonic()
    process.start()
    theirs.close()
    limit_s = CHECKS[name][1]
    try:
        outcome, figure = ours.recv() if ours.poll(limit_s) else ("fail", f"not done within {limit_s:.0f} s")
    except EOFError:
        process.join()
        outcome, figure = "fail", f"its process ended with {process.exitcode}"
    process.join(20)
    process.kill()
    return Result(name, outcome, figure, round(time.monotonic() - begin, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the run with kills")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    import torch

    device = torch.cuda.get_device_name() if gpus() else "no GPU"
    print(f"torch {torch.__version__}, {gpus()} GPUs ({device})", flush=True)
    results = []
    for name in asked.only:
        results.append(carry_out(name, asked.minutes))
        last = results[-1]
        print(f"{last.name:22} {last.outcome:8} {last.figure}  [{last.took_s} s]", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(result.outcome == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
