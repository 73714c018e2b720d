"""Run the checks that a first run on a GPU machine has to pass. Each prints `shown`, `failed` or `not shown`, and why.

    python bench/gpu/first_run.py [--only NAME ...] [--wheels FOLDER] [--minutes 2] [--json RESULT.json]

For a bare machine with one GPU, no network, torch 2.11 to 2.15, and Python 3.11 or later; `--wheels` takes missing
packages from a folder. Each check runs in a separate process with a time limit, so that a hang is a failed check. A
check that cannot run says why; one that runs on a stand-in names it. The exit status is 1 if a check failed.
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
import zipfile
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
STAND_IN_LOG = "EVERSTEP_TEST_DEVICE_LOG"
"""Environment variable with the folder in which the tests' stand-in device records each wait of the host."""


class NotShown(Exception):
    """A check cannot prove anything on this machine; the message says why."""


@dataclass
class Result:
    name: str
    outcome: str
    figure: str
    took_s: float


def device() -> Any:
    """Return the accelerator to check, or the CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def gpus() -> int:
    import torch

    return torch.accelerator.device_count() if device().type != "cpu" else 0


def where() -> str:
    kinds = {"cuda": "GPU", "cpu": "stand-in: the CPU"}
    return kinds.get(device().type, f"stand-in: the device {device().type}")


def needs() -> None:
    if not gpus():
        raise NotShown("there is no accelerator")


def needs_titan() -> None:
    try:
        import torchtitan  # noqa: F401
    except ImportError:
        raise NotShown("no torchtitan") from None


def needs_reconfigure() -> None:
    from torch.distributed import distributed_c10d as c10d

    if not hasattr(c10d, "ReconfigureOptions"):
        raise NotShown("torch 2.15 is needed")


# Transport


def column(rank: int) -> tuple[Any, Any]:
    """Return this process's rank column and the device of its gradients: NCCL if there is a GPU, Gloo otherwise."""
    import torch

    from everstep.quorum.process_group import RankColumn
    from everstep.quorum.streams import streams_of

    on = torch.device(device().type, rank % gpus()) if gpus() else device()
    if gpus():
        torch.accelerator.set_device_index(on.index)
    made = RankColumn(
        "nccl" if gpus() else "gloo",
        column=0,
        host="127.0.0.1",
        connect_timeout=WAIT,
        token=TOKEN,
        streams=streams_of(on),
    )
    return made, on


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.monotonic()
    found = call()
    return time.monotonic() - begin, found


def one_gpu() -> str:
    """A column of one member connects, sums, and connects again, 20 times. Measures the first use and the median."""
    import torch
    import torch.distributed as dist

    from everstep.quorum.process_group import Place

    needs_reconfigure()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, on = column(0)
    first_s, _ = timed(lambda: mine.warm(f"127.0.0.1:{store.port}", WAIT))
    rebuilds = []
    for number in range(20):
        place = Place(str(number), f"127.0.0.1:{store.port}", 0, 0, (mine.address,))
        took_s, _ = timed(lambda given=place: mine.connect(given))
        rebuilds.append(took_s)
        values = torch.full((BUCKET,), 2.0, device=on)
        mine.finish(mine.start(values, WAIT))
        assert float(values.sum()) == 2.0 * BUCKET
    mine.abort()
    return f"{where()}: first use {first_s:.2f} s, again {1000 * sorted(rebuilds)[10]:.1f} ms (median of 20)"


def _member(rank: int, store: str, pipe: Any) -> None:
    import torch

    from everstep.quorum.errors import SumsBroken
    from everstep.quorum.process_group import Place, connect_store

    mine, on = column(rank)
    mine.warm(store, WAIT)
    board = connect_store(store, WAIT)
    pipe.send("ready")
    while True:
        what, *given = pipe.recv()
        begin, answer = time.monotonic(), ""
        try:
            if what == "connect":
                key, place, size = given
                board.set(f"{key}/{place}", mine.address)
                peers = tuple(board.get(f"{key}/{peer}").decode() for peer in range(size))
                mine.connect(Place(key, store, 0, place, peers))
            elif what == "memory":
                answer = torch.accelerator.memory_reserved() if gpus() else 0, threading.active_count()
            elif what == "sum":
                values = torch.full((BUCKET,), rank + 1.0, device=on)
                mine.finish(mine.start(values, WAIT))
                answer = float(values[-1])
            elif what == "die":
                threading.Timer(given[0], os.kill, (os.getpid(), signal.SIGKILL)).start()
        except SumsBroken as error:
            answer = str(error)
        pipe.send((time.monotonic() - begin, answer))


DEATHS = 10


def two_ranks() -> str:
    """Two processes sum, on one GPU if there is one. DEATHS times one is killed while the other waits for it, and a new
    one takes its place. The survivor notices each death within 5 s, and its memory and threads do not grow."""
    import torch.distributed as dist

    needs_reconfigure()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if gpus() == 1:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30
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
    noticed, rebuilds, held, slowest_s = [], [], [], 0.0
    for number in range(DEATHS):
        answers = tell([first, second], "connect", f"{number}")
        assert not any(error for _, error in answers), answers
        rebuilds.append(max(took for took, _ in answers))
        sums = tell([first, second], "sum")
        assert [total for _, total in sums] == [3.0, 3.0], sums
        slowest_s = max(took for took, _ in sums)
        held.append(tell([first], "memory")[0][1])
        tell([second], "die", 0.3)
        ((noticed_s, answer),) = tell([first], "sum")
        assert isinstance(answer, str), answer
        noticed.append(noticed_s - 0.3)
        other.join()
        if number < DEATHS - 1:
            second, other = begin(1)
    one.kill()
    assert max(noticed) < 5, f"a death was noticed after {max(noticed):.1f} s"
    grown, threads = (held[-1][part] - held[1][part] for part in (0, 1))
    assert grown <= 2 * BUCKET * 4, f"{grown >> 20} MiB of device memory more after {DEATHS} deaths"
    assert threads <= 4, f"{threads} threads more after {DEATHS} deaths"
    speed = BUCKET * 4 / slowest_s / 1e9
    return (
        f"{where()}: {speed:.2f} GB/s; each of {DEATHS} deaths was noticed within {max(noticed):.2f} s; connected "
        f"again within {1000 * max(rebuilds[1:]):.0f} ms; {grown >> 20} MiB and {threads} threads were left"
    )


# The rest of a worker's life


def fork_before_cuda() -> str:
    """Imports before workers are forked do not initialise CUDA, and a forked worker can use it."""
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
        ones = torch.ones(4, 4, device=device())
        os._exit(0 if float(ones.mm(ones).sum()) == 64.0 else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked process ended with {status}"
    return f"{what}; forked and computed on {where()} after {time.monotonic() - begin:.2f} s"


def pinned_copies() -> str:
    """A copy from the device to pinned host memory has the right bytes and does not block the host."""
    needs()
    import torch

    size = 256 << 20
    source = torch.arange(size // 8, dtype=torch.int64).to(device()).view(torch.uint8)
    plain, stream = torch.empty_like(source, device="cpu"), torch.Stream(device=device())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    torch.accelerator.synchronize()
    plain_s, _ = timed(lambda: plain.copy_(source))
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        issued_s, _ = timed(lambda: pinned.copy_(source, non_blocking=True))
        rest_s, _ = timed(stream.synchronize)
    assert torch.equal(plain, pinned), "the copies differ"
    assert issued_s < rest_s, f"the copy blocked the host for {issued_s:.3f} s"
    return f"{where()}: pinned {size / (issued_s + rest_s) / 1e9:.1f} GB/s, pageable {size / plain_s / 1e9:.1f} GB/s"


def from_the_device() -> str:
    """A joiner's copy of a state, and a snapshot of it, have the committed bytes though the optimizer goes on."""
    needs()
    import numpy as np
    import torch

    from everstep.quorum.heal import HealState, _Copy
    from everstep.quorum.streams import streams_of
    from everstep.snapshot.layout import CopyPlan, State

    tensors = {f"model/{number}": torch.arange(1 << 22, device=device()) + number for number in range(4)}
    for tensor in tensors.values():
        tensor.mul_(3)  # still running when the copies are requested
    plan, streams = CopyPlan(State(tensors), (0,), 0, 0, 1), streams_of(device())
    copy = _Copy(HealState(tensors=tensors), streams, 60)
    copy.begin()
    source_s, _ = timed(copy.join)
    whole = np.empty(plan.layout.size, dtype=np.uint8)
    copied_s, _ = timed(lambda: plan.copy(whole, b"", streams, streams.record(), lambda: None))
    for tensor in tensors.values():
        tensor.zero_()  # as the next optimizer step would
    wanted = b"".join(((torch.arange(1 << 22) + number) * 3).numpy().tobytes() for number in range(4))
    assert whole.tobytes() == wanted, "the snapshot has other bytes"
    assert b"".join(copy.views(0, len(wanted))) == wanted, "the joiner gets other bytes"
    speeds = (len(wanted) / took / 1e9 for took in (copied_s, source_s))
    return "{}: snapshot {:.1f} GB/s, set aside for joiners {:.1f} GB/s".format(where(), *speeds)


def gloo_of_device() -> str:
    """PyTorch's Gloo sums a tensor of the device."""
    needs()
    import torch
    import torch.distributed as dist

    if device().type != "cuda":
        raise NotShown(f"PyTorch's Gloo knows no tensors of {device().type}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.full((BUCKET,), 2.0, device=device())
    dist.all_reduce(values)
    assert float(values.sum()) == 2.0 * BUCKET
    return "a sum of one rank is right"


def graphs() -> str:
    """A config with recorded graphs and attention checks is refused."""
    needs()
    needs_titan()
    from everstep.titan.load import load_config
    from everstep.titan.machine import choose_attention
    from everstep.titan.trainer import EverstepTrainer

    config = load_config(ROOT / "configs" / "demo.toml", EverstepTrainer.Config)
    config.training.disable_cuda_graphs = False
    try:
        choose_attention(config)
    except ValueError as error:
        if "graph" not in str(error):
            raise
        return str(error)
    raise AssertionError("it was taken")


def block(section: Any, length: int) -> Callable[[int], list[Any]]:
    """Return a function that computes a slot, by number, on one block of Llama 3 (of the 8B model on a GPU), with
    checks as `section` says. It returns the gradients and what the checks refuse."""
    import torch
    from torchtitan.config import TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    from everstep.titan import attention, cpu, cpu_attention

    large = device().type == "cuda"
    spec: Any = llama3.model_registry("8B" if large else "debugmodel", attn_backend="flex")
    training = TrainingConfig(seq_len=length, local_batch_size=1, disable_cuda_graphs=True)
    config: Any = Trainer.Config(model_spec=spec, training=training)
    spec.model.layers = spec.model.layers[:1]
    spec.model.update_from_config(config=config)
    if not cpu.has_attention_kernels():
        cpu_attention.prepare(config)
    attention.apply(config, section)
    with torch.device("meta"):
        model: Any = spec.model.build()
    if section.enable:
        attention.make_checkable(model)
    model.to_empty(device=device())
    torch.manual_seed(0)
    model.init_weights(buffer_device=None)
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16 if large else torch.float32)
    model.tok_embeddings = model.norm = model.lm_head = None  # as in a pipeline's stage
    checks = attention.attach([model], section) if section.enable else None
    rows = torch.randn(1, length, spec.model.dim, device=device(), dtype=next(model.parameters()).dtype)
    positions = torch.arange(length, device=device())[None]
    masks = model.get_attention_masks(positions)

    def slot(number: int) -> list[Any]:
        model.zero_grad()
        if checks is not None:
            checks.begin(1, number)
        model(rows, positions=positions, attention_masks=masks).square().mean().backward()
        torch.accelerator.synchronize()
        if checks is not None:
            checks.end()
        return [[param.grad for param in model.parameters()], checks.refused() if checks is not None else frozenset()]

    return slot


def attention_checks() -> str:
    """A block has the same gradients with checks as without; only a slot with an infinity is refused. Measures the cost
    of checks in every slot, beside the estimate of bench/attention_roofline.py for an H100."""
    needs()
    needs_titan()
    import torch

    from everstep.attention.section import AttentionCheck, Inject

    large = device().type == "cuda"
    length = 8192 if large else 128
    sections = AttentionCheck(), AttentionCheck(enable=True, frequency=1.0)
    plain, checked = (block(section, length) for section in sections)
    took: list[list[float]] = [[], []]
    for number in range(12):
        (plain_s, (wanted, _)), (checked_s, (found, refused)) = (
            timed(lambda: plain(0)),
            timed(lambda number=number: checked(number)),
        )
        assert not refused, f"slot {number} was refused"
        took[0].append(plain_s)
        took[1].append(checked_s)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if large else 1e-4, atol=1e-6)
    harmed = AttentionCheck(enable=True, frequency=1.0, mode="detect", inject=Inject(kind="inf"))
    assert block(harmed, length)(0)[1], "an infinity was not found"
    before, after = (sorted(times)[len(times) // 2] for times in took)
    said = (
        f"{where()}: a block of length {length} takes {1000 * before:.1f} ms, and {after / before - 1:.1%} more checked"
    )
    if large:
        command = [sys.executable, str(ROOT / "bench" / "attention_roofline.py"), "--json", "--models", "Llama 3 8B"]
        counted = json.loads(run(command).splitlines()[-1])["Llama 3 8B, eager"]["rate_1"]
        said += f"; counted for an H100: {counted:.1%}"
    return said


def waits(call: Callable[[], Any]) -> int:
    """Return how often the host waited for the device in a call, not counting threads that wait for sums."""
    import torch

    if device().type != "cuda":
        log = Path(os.environ[STAND_IN_LOG], f"waits-{os.getpid()}.txt")
        log.write_text("")
        call()
        return sum("in_flight.py" not in line for line in log.read_text().splitlines())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len(seen)


def host_synchronisations() -> str:
    """With FSDP2 on one GPU, the host does not wait for the device in the last slot, while its sums are begun."""
    os.environ[STAND_IN_LOG] = tempfile.mkdtemp(prefix="first-run-")
    needs()
    needs_reconfigure()
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from everstep.quorum.process_group import Place
    from everstep.step.private import local
    from everstep.step.reduction import GradientReducer

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = dist.get_default_backend_for_device(device())
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device().type, (1,))
    layers = [torch.nn.Linear(1 << 9, 1 << 9, bias=False, device=device()) for _ in range(16)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine, _ = column(0)
    mine.connect(Place("a", f"127.0.0.1:{store.port}", 0, 0, (mine.address,)))
    reducer = GradientReducer(model.parameters(), 1 << 21, mine._streams)
    rows = torch.ones(4, 1 << 9, device=device())

    def gradient_of(param: torch.nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        return local(param.grad)

    def slot(last: bool) -> None:
        reducer.begin_slot(last=last)
        model(rows).sum().backward()
        reducer.end_slot()

    for _ in range(2):
        model.zero_grad()
        reducer.begin(mine, WAIT)
        slot(last=False)
        seen = waits(lambda: slot(last=True))
        own = [gradient_of(param).clone() for param in model.parameters()]
        reducer.finish()
        reducer.assign(1.0)
        for param, grad in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(gradient_of(param), grad)
    mine.abort()
    assert not seen, f"{seen} host synchronisations"
    return f"{where()}: 0 over {len(reducer._buckets)} buckets, sums as the gradients"


# Runs


def run(command: list[str], limit_s: float = 900) -> str:
    """Return a command's output. Raises AssertionError with the end of the output if the command fails."""
    paths = [str(ROOT / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:3])} …: {(done.stdout + done.stderr)[-400:]}"
    return done.stdout


def everstep(run_dir: Path, *flags: str, limit_s: float = 900) -> None:
    command = [sys.executable, "-m", "everstep.cli", "run", str(ROOT / "configs" / "demo.toml")]
    backend = "nccl" if gpus() else "gloo"
    flags = (*flags, "--fault_tolerance.process_group", backend, "--fault_tolerance.connect_timeout_s", "3.0")
    run([*command, "--run-dir", str(run_dir), *flags], limit_s)


def bitwise() -> str:
    """Two runs of one group have bitwise equal losses."""
    needs_titan()
    from everstep.report.score import account_of, loss_by_step

    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            everstep(Path(folder, name), "--groups", "1", "--steps", "8", "--checkpoint.no-enable")
        one, two = (loss_by_step(account_of(Path(folder, name)).lineage.final()) for name in ("one", "two"))
    differing = [step for step in one if one[step] != two.get(step)]
    assert one, "no step was made"
    assert not differing, f"steps {differing} differ: {[(one[s], two.get(s)) for s in differing[:3]]}"
    return f"{len(one)} steps, losses equal to the bit ({where()})"


MINUTES = 2.0


def kills() -> str:
    """A run with a kill every 10 s makes every step with its whole batch, and computes nothing twice."""
    needs_titan()
    every_s = 10.0
    count = max(1, int(60 * MINUTES / every_s))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "bench" / "endurance.py"), "--kills", str(count), "--every", str(every_s)]
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        config, demo = Path(folder, "run.toml"), (ROOT / "configs" / "demo.toml").read_text()
        config.write_text(demo.replace('"gloo"', '"nccl"' if gpus() else '"gloo"'))
        command += ["--config", str(config)]
        said = run([*command, "--groups", str(max(3, gpus())), "--run-dir", f"{folder}/run"], 60 * MINUTES + 900)
        report = json.loads(Path(folder, "run", "report.json").read_text())
    assert said
    figures = {key: report[key] for key in sorted(report) if re.search("kill|lost|thrown|stall|duplic", key)}
    return json.dumps(figures)[:400]


CHECKS: dict[str, tuple[Callable[[], str], float]] = {
    "transport-one": (one_gpu, 300),
    "transport-two": (two_ranks, 300),
    "fork-before-cuda": (fork_before_cuda, 300),
    "pinned-copies": (pinned_copies, 120),
    "from-the-device": (from_the_device, 120),
    "gloo": (gloo_of_device, 60),
    "graphs": (graphs, 120),
    "attention-checks": (attention_checks, 600),
    "host-synchronisations": (host_synchronisations, 300),
    "bitwise": (bitwise, 1800),
    "kills": (kills, 60 * MINUTES + 1800),
}
"""Name -> check, and its time limit in seconds."""


def check(name: str, minutes: float, answer: Any) -> None:
    """Run a check in this process, and send its outcome to `answer`."""
    global MINUTES
    MINUTES = minutes
    try:
        answer.send(("shown", CHECKS[name][0]()))
    except NotShown as reason:
        answer.send(("not shown", str(reason)))
    except BaseException as error:  # noqa: BLE001 - any error is a failed check
        traceback.print_exc()
        answer.send(("failed", f"{type(error).__name__}: {error}"[:600]))
    sys.stdout.flush()
    os._exit(0)  # a normal exit would have libraries list what they leak


def carry_out(name: str, minutes: float) -> Result:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=check, args=(name, minutes, theirs))
    begin = time.monotonic()
    process.start()
    theirs.close()
    limit_s = CHECKS[name][1]
    try:
        outcome, figure = ours.recv() if ours.poll(limit_s) else ("failed", f"not done within {limit_s:.0f} s")
    except EOFError:
        process.join()
        outcome, figure = "failed", f"its process ended with {process.exitcode}"
    process.join(20)
    process.kill()
    return Result(name, outcome, figure, round(time.monotonic() - begin, 1))


def unpack(wheels: Path) -> None:
    """Make a folder's wheels importable, here and in the processes of checks."""
    folder = tempfile.mkdtemp(prefix="first-run-")
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the run with kills")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what this machine lacks")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.wheels:
        unpack(asked.wheels)
    import torch

    print(f"torch {torch.__version__}, {where()}, {gpus()} of it", flush=True)
    results = []
    for name in asked.only:
        results.append(carry_out(name, asked.minutes))
        last = results[-1]
        print(f"{last.name:22} {last.outcome:9} {last.figure}  [{last.took_s} s]", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
