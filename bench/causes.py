"""Check that a run names what is wrong with it: real causes, each in a separate run, and every outlet of reports.

    python bench/causes.py [NAME …] [--jobs 2]

Each row of CAUSES starts `everstep run` as a user does, waits until all groups take part, and breaks something: a disk
(a small tmpfs), a limit of a process or a control group (version 1), a process by a signal, or a trainer
(`cause_job.py`). The console, `everstep status`, the page, Prometheus' metrics and the webhook must all name the cause
within LIMIT_S of the moment at which the run can know it: the cause itself plus the wait that the row states. No cause
may show a traceback of Everstep on the console. Needs root, for the small disks.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from everstep.commands.status import status_of
from everstep.run.directory import LaunchError
from everstep.run.events import read_events
from everstep.snapshot.peers import read_records

LIMIT_S, STARTS_S, LOOK_S = 10.0, 120.0, 0.1
STALL_S = 6.0
HERE = Path(__file__).parent
LAST_WORDS = re.compile(r"^group \d+, incarnation \d+: (?:(?!^\d\d:\d\d:\d\d |^step ).*\n)*", re.MULTILINE)
"""The console's quotes from logs of dead workers. An exception of a worker in them is not a traceback of Everstep."""
CGROUP = Path("/sys/fs/cgroup")

CONFIG = """
[job]
module = "cause_job"
config = "{job}"
[training]
steps = 100000
seq_len = 64
local_batch_size = 1
global_batch_size = 6
disable_cuda_graphs = true
mixed_precision_param = "float32"
[optimizer]
lr = {lr}
implementation = "fused"
[activation_checkpoint]
mode = "none"
[data]
source = "{source}"
[fault_tolerance]
enable = true
groups = 2
heartbeat_timeout_s = 1.0
connect_timeout_s = 1.0
reduce_timeout_s = 3.0
join_timeout_s = 2.0
quorum_timeout_s = 5.0
stall_timeout_s = {stall}
audit_interval = 2
[snapshot]
segment_dir = "{shm}"
memory_reserve_gb = 0.0
interval = 2
failure_domain = "group"
[checkpoint]
interval = 10
keep_latest_k = 2
[metrics]
log_freq = 10
[debug]
seed = 0
"""


class Hook:
    """A webhook. `texts`: text that was posted to it -> time of the first post."""

    def __init__(self) -> None:
        self.texts: dict[str, float] = {}
        texts = self.texts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
                texts.setdefault(text.partition(": ")[2], time.time())
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Scene:
    """One run, and what a cause needs to break it and to read its outlets."""

    def __init__(self, home: Path, cause: "Cause") -> None:
        self.home, self.run_dir, self.shm = home, home / "run", home / "shm"
        self.orders, self.console = home / "orders", home / "console"
        for folder in (self.orders, self.shm):
            folder.mkdir()
        self.hook, self.mounts, self.stopping = Hook(), list[Path](), threading.Event()
        self.controlled = Path()
        """The run's control group, if the cause names a controller."""
        self._cause = cause
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        cause = self._cause
        notes = self.home / "notes.jsonl"
        notes.write_text("".join(json.dumps({"text": f"note {n} " * 20}) + "\n" for n in range(40)))
        config = self.home / "cause.toml"
        config.write_text(CONFIG.format(lr=cause.lr, job=cause.job, source=cause.source, shm=self.shm, stall=STALL_S))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        flags = ["--page", "--groups", str(cause.groups), "--fault_tolerance.metrics_port", str(self.port)]
        flags += ["--fault_tolerance.notify", self.hook.address]
        flags += [flag.format(home=self.home) for flag in cause.flags]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_CAUSES": str(self.orders),
            "HF_HOME": str(self.home / "hf"),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "everstep.cli", "run", str(config), "--run-dir", str(self.run_dir), *flags]
        if cause.controller:
            self.controlled = own_group(cause.controller) / f"everstep-{os.getpid()}-{self.home.name}"
            self.controlled.mkdir()
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.controlled / "cgroup.procs"), *command]
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    # Used by acts

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(read_events(self.run_dir, {kind}))

    def until(self, what: Callable[[], Any], limit_s: float = STARTS_S) -> Any:
        end = time.monotonic() + limit_s
        while not (found := what()):
            assert self.process is not None
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(f"waited {limit_s:g} s ({self.process.poll()}): {self.console.read_text()[-800:]}")
            time.sleep(LOOK_S)
        return found

    def all_take_part(self, groups: int) -> None:
        """Wait until each group has committed a step with all others. Until then `startup_timeout_s` applies to it."""
        made = lambda: {event["group"] for event in self.events("commit") if len(event["groups"]) == groups}  # noqa: E731
        self.until(lambda: len(made()) == groups)

    def order(self, order: str, *places: str) -> None:
        for place in places:
            draft = self.orders / f".{place}"
            draft.write_text(order)
            draft.rename(self.orders / place)

    def workers(self, group: int) -> list[int]:
        return [event["pids"] for event in self.events("workers_started") if event["group"] == group][-1]

    def keeper(self, group: int) -> int:
        return next(place.pid for place in read_records(self.run_dir) if place.group == group)

    def lighthouse(self) -> int:
        return self.events("lighthouse_started")[-1]["pid"]

    def small_disk(self, at: Path, options: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=True)
        self.mounts.append(at)

    def again_and_again(self, what: Callable[[], object], every_s: float) -> None:
        def loop() -> None:
            while not self.stopping.wait(every_s):
                with contextlib.suppress(OSError, StopIteration, IndexError):
                    what()

        threading.Thread(target=loop, daemon=True).start()

    # Reads the outlets

    def heard(self, words: str) -> dict[str, Callable[[], list[str]]]:
        """Return, for each outlet, a function that returns the outlet's current sentences that match `words`."""

        def figures() -> list[str]:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            labels = [line.labels for family in families for line in family.samples if "sentence" in line.labels]
            return [each["sentence"] for each in labels if re.fullmatch(self._cause.guarantee, each["guarantee"])]

        def page() -> str:
            address = re.search("the run's page: (.*)", self.console.read_text())
            if address is None:
                return ""
            with contextlib.suppress(OSError), urllib.request.urlopen(address[1], timeout=5) as served:
                return served.read().decode()
            return read(self.run_dir / "report.html")  # the run has ended

        outlets = {
            "webhook": lambda: list(self.hook.texts),
            "console": lambda: re.findall(
                r"^(?:\d\d:\d\d:\d\d|everstep:) (.*)$", self.console.read_text(), re.MULTILINE
            ),
            "status": lambda: re.findall(r"^WRONG   (.*)$", status_of(self.run_dir), re.MULTILINE),
            "page": lambda: list(map(unescape, re.findall(r">([^<>]*)</td>", page()))),
            "prometheus": figures,
        }
        return {
            name: lambda told=told: [one for one in told() if re.search(words, one)] for name, told in outlets.items()
        }

    def end(self) -> None:
        self.stopping.set()
        self.hook.server.shutdown()
        if self.process is not None:
            mine = [psutil.Process(place.pid) for place in read_records(self.run_dir) if psutil.pid_exists(place.pid)]
            with contextlib.suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(self.process.pid)
                mine += [launcher, *launcher.children(recursive=True)]
            for process in mine:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            psutil.wait_procs(mine, timeout=10)
        if self._cause.controller:
            with contextlib.suppress(OSError):
                self.controlled.rmdir()
        for mount in reversed(self.mounts):
            subprocess.run(["umount", "-l", str(mount)], check=False)
        shutil.rmtree(self.home, ignore_errors=True)


def read(path: Path) -> str:
    """Return a file's text; "" if the file does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


Act = Callable[[Scene], object]


@dataclass(frozen=True)
class Wait:
    """Seconds before a run can know a cause, and what they are for, such as a timeout of the config or repeats."""

    s: float = 0.0
    of: str = ""


@dataclass(frozen=True)
class Cause:
    """What is broken, and what the outlets have to say about it."""

    guarantee: str
    words: str
    act: Act = lambda scene: None
    flags: tuple[str, ...] = ()
    before: Act = lambda scene: None
    groups: int = 2
    controller: str = ""
    """Controller (version 1) of a control group that the run is started in; "" for none."""
    job: str = "debugmodel"
    source: str = "stdlib"
    waits: Wait = Wait()
    """How long the run cannot know the cause."""
    starts: bool = True
    """Whether all groups must take part before the act."""
    lr: float = 8e-4
    silent: tuple[str, ...] = ()
    """Outlets that need not name it: the metrics of a run that it ends, or an outlet that is refreshed too rarely."""


def orders(order: str, *places: str) -> Act:
    return lambda scene: scene.order(order, *places)


def soon(order: str) -> Act:
    """Give the order for slot 3 of a step that comes soon."""

    def act(scene: Scene) -> None:
        step = max(event["step"] for event in scene.events("commit")) + 3
        scene.order(order, f"{SLOT}.step-{step}")

    return act


def sent(signum: signal.Signals, whom: Callable[[Scene], int]) -> Act:
    return lambda scene: os.kill(whom(scene), signum)


def full(folder: str, options: str) -> Act:
    """Mount a small disk in place of a folder of the run."""
    return lambda scene: scene.small_disk(scene.home / folder, options)


def in_place_of(folder: str, make: Callable[[Path], object]) -> Act:
    def act(scene: Scene) -> None:
        path = scene.home / folder
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}.old"))
        make(path)

    return act


def limited(kind: int, amount: int, whom: Callable[[Scene], int]) -> Act:
    return lambda scene: resource.prlimit(whom(scene), kind, (amount, amount))


def worker_of(group: int) -> Callable[[Scene], int]:
    return lambda scene: scene.workers(group)[0]


def launcher_of(scene: Scene) -> int:
    assert scene.process is not None
    return scene.process.pid


def both(*acts: Act) -> Act:
    return lambda scene: [act(scene) for act in acts]


def keep_killing(whom: Callable[[Scene], int], every_s: float = 0.2) -> Act:
    return lambda scene: scene.again_and_again(lambda: os.kill(whom(scene), signal.SIGKILL), every_s)


def own_group(controller: str) -> Path:
    """Return the control group (version 1) of this process under a controller."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return CGROUP / controller / next(name for _, names, name in lines if names == controller).lstrip("/")


def without_processes(scene: Scene) -> None:
    """Let launcher and groups start no more processes. The page's server is exempt, because it starts threads."""
    for process in psutil.Process(launcher_of(scene)).children():
        if "everstep.report.live" in process.cmdline():
            (own_group("pids") / "cgroup.procs").write_text(str(process.pid))
    (scene.controlled / "pids.max").write_text("1")
    os.kill(worker_of(1)(scene), signal.SIGKILL)


def with_little_memory(scene: Scene) -> None:
    """Limit the run's memory to 200 MB more than it uses now."""
    used = int((scene.controlled / "memory.usage_in_bytes").read_text())
    (scene.controlled / "memory.limit_in_bytes").write_text(str(used + 200_000_000))


def fill(scene: Scene) -> None:
    """Fill the disk of the run directory."""
    with contextlib.suppress(OSError), (scene.run_dir / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def starve(group: int) -> Act:
    """Leave a worker a tenth of a core."""

    def act(scene: Scene) -> None:
        pid = worker_of(group)(scene)

        def turn() -> None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.27)
            os.kill(pid, signal.SIGCONT)

        scene.again_and_again(turn, 0.03)

    return act


FIGURES = ("prometheus",)
SNAPSHOTS = ("--snapshot.enable",)
SEMI = ("--semi_sync.method", "diloco", "--semi_sync.workers", "2", "--semi_sync.sync_steps", "2", "--training.steps",
        "100000", "--checkpoint.interval", "1000")  # fmt: skip
CHECKPOINTS = ("--checkpoint.enable",)
EXACT = ("--fault_tolerance.exact", "--fault_tolerance.audit_slots", "1.0")
CHECKED = ("--attention_check.enable", "--attention_check.frequency", "1.0")
SLOT = "slot-3"
CODING, ROUND, NEXT = Wait(12.0, "coding_timeout_s"), Wait(6.0, "a round"), Wait(8.0, "the next checkpoint")
RESTARTS, STALLS = Wait(40.0, "three starts of the group"), Wait(2 * STALL_S + 4.0, "stall_timeout_s")
ASKED_TWICE = Wait(10.0, "two refusals and another group's answer")
EVERYBODY = ("group-0", "group-1")
ALWAYS = ("group-0.always", "group-1.always")


def unsaved(words: str, act: Act, *flags: str) -> Cause:
    return Cause("checkpoint", f"not written.*{words}", act, (*CHECKPOINTS, *flags), waits=NEXT)


def again(order: str, words: str) -> Cause:
    """Return a cause that ends group 1 each time that it starts."""
    failed = f"group 1 has failed .* in a row.*{words}"
    return Cause("group", failed, orders(order, "group-1.always"), waits=RESTARTS)


def everywhere(order: str, words: str) -> Cause:
    return Cause("run", f"The run failed: .*{words}", orders(order, *ALWAYS), waits=RESTARTS, silent=FIGURES)


def diverges(act: Act = lambda scene: None, words: str = "the loss is", lr: float = 8e-4) -> Cause:
    return Cause("finite", f"not finite|{words}", act, lr=lr, waits=ASKED_TWICE, silent=FIGURES)


CAUSES = {
    "memory for no snapshot": Cause("snapshots", "not taken", before=full("shm", "size=4m"), flags=SNAPSHOTS),
    "no inodes where snapshots go": Cause("snapshots", "not taken", before=full("shm", "nr_inodes=2"), flags=SNAPSHOTS),
    "snapshots' folder is read-only": Cause("snapshots", "not taken", before=full("shm", "ro"), flags=SNAPSHOTS),
    "a keeper stands still": Cause(
        "snapshots", "not coded|none of the last", sent(signal.SIGSTOP, lambda scene: scene.keeper(1)), SNAPSHOTS,
        waits=CODING),
    "a keeper stands still, with a snapshot a step": Cause(
        "snapshots", "not coded|none of the last", sent(signal.SIGSTOP, lambda scene: scene.keeper(0)),
        (*SNAPSHOTS, "--snapshot.interval", "1"), waits=CODING),
    "a keeper dies again and again": Cause(
        "snapshots", "not taken|not coded|none of the last", keep_killing(lambda scene: scene.keeper(1)), SNAPSHOTS,
        waits=Wait(15.0, "coding_timeout_s")),
    "a group that shared snapshots is sent away": Cause(
        "hosts", "survives the loss of no host", orders("multiply-wrongly", "group-0.always"), (*SNAPSHOTS, *CHECKED),
        waits=Wait(20.0, "refusals, another group's answer, and a coding without it")),
    "no room for workers' states": Cause(
        "workers", "the run ends", both(full("run/state/workers", "size=4k"), full("shm", "size=4k")), SEMI,
        waits=ROUND),
    "workers' storage is a file, and no other keeper": Cause(
        "workers", "the run ends", both(
            in_place_of("run/state/workers", Path.touch), sent(signal.SIGKILL, lambda scene: scene.keeper(0)),
            keep_killing(lambda scene: scene.keeper(0)), keep_killing(lambda scene: scene.keeper(1))),
        SEMI, waits=ROUND),
    "workers' storage is read-only, and no other keeper": Cause(
        "workers", "the run ends", both(
            full("run/state/workers", "ro"), keep_killing(lambda scene: scene.keeper(0)),
            keep_killing(lambda scene: scene.keeper(1))), SEMI, waits=ROUND),
    "a full checkpoint folder": unsaved("No space", full("run/checkpoint", "size=64k")),
    "a full checkpoint folder, written meanwhile": unsaved(
        "No space", full("run/checkpoint", "size=64k"), "--checkpoint.async_mode", "async"),
    "a read-only checkpoint folder": unsaved("Read-only", full("run/checkpoint", "ro")),
    "no inodes for checkpoints": unsaved("No space", full("run/checkpoint", "nr_inodes=1")),
    "a file in place of the checkpoint folder": unsaved("", in_place_of("run/checkpoint", Path.touch)),
    "a link to nothing in place of the checkpoint folder": unsaved(
        "", in_place_of("run/checkpoint", lambda path: path.symlink_to("/nowhere/at/all"))),
    "files may not be as large as a checkpoint": unsaved(
        "large", both(*(limited(resource.RLIMIT_FSIZE, 1 << 20, worker_of(group)) for group in (0, 1)))),
    "a group that takes no connections": Cause(
        "reach", "leave out group 1 ", both(
            orders("refuse-connections", "group-1"), lambda scene: time.sleep(2.0), sent(signal.SIGKILL, worker_of(2))),
        groups=3, waits=Wait(8.0, "reduce_timeout_s and two tries of connect_timeout_s")),
    "an error again and again": again("runtime", "broken"),
    "SIGSEGV again and again": again("segv", "SIGSEGV"),
    "SIGABRT again and again": again("abort", "SIGABRT"),
    "SIGBUS again and again": again("bus", "SIGBUS"),
    "an exit with a status again and again": again("exit", "status 3"),
    "an exit of a library again and again": again("exit-unseen", "status 7"),
    "no descriptors in a worker, again and again": again("descriptors", "Too many open files"),
    "a hang": Cause("group", "Group 1 hung: rank 0 made no progress in compute", orders("hang", "group-1"),
                    waits=STALLS),
    "a hang that holds the interpreter": Cause(
        "group", "Group 1 hung: rank 0 made no progress in compute", orders("hang-interpreter", "group-1"),
        waits=STALLS),
    "a worker that is stopped": Cause(
        "group", "Group 1 hung: rank 0 made no progress", sent(signal.SIGSTOP, worker_of(1)), waits=STALLS),
    "Python's memory": Cause("machine", "Group 1 ran out of memory", orders("memory", "group-1")),
    "a device's memory": Cause("machine", "Group 1 ran out of memory.*CUDA", orders("device-memory", "group-1")),
    "more memory than the machine has": Cause("machine", "Group 1 ran out of memory", orders("allocate", "group-1")),
    "the memory of a control group": Cause(
        "machine", "Group 1 ran out of memory.*control group", both(with_little_memory, orders("eat", "group-1")),
        controller="memory"),
    "no processes": Cause("machine", "Resource temporarily unavailable", without_processes, controller="pids"),
    "no descriptors for the launcher": Cause(
        "machine", "Too many open files", both(limited(resource.RLIMIT_NOFILE, 8, launcher_of),
                                               sent(signal.SIGKILL, worker_of(1)))),
    "a run directory without room": Cause(
        "machine", "No space left", both(fill, sent(signal.SIGKILL, worker_of(1))),
        before=full("run", "size=8m,mode=755"), flags=("--checkpoint.no-enable",)),
    "a lighthouse that is killed again and again": Cause(
        "lighthouse", "The lighthouse died", keep_killing(Scene.lighthouse, 0.5)),
    "a lighthouse that hangs": Cause(
        "lighthouse", "The lighthouse died|got no quorum", sent(signal.SIGSTOP, Scene.lighthouse),
        waits=Wait(12.0, "SILENCE_S of the lighthouse, and it is back at once"),
        silent=("status", "page", "prometheus")),
    "a lighthouse without descriptors": Cause(
        "lighthouse", "got no quorum", both(
            limited(resource.RLIMIT_NOFILE, 3, Scene.lighthouse), sent(signal.SIGKILL, worker_of(1))),
        waits=Wait(14.0, "a start of the group and two quorum_timeout_s")),
    "too few groups for min_groups": Cause(
        "lighthouse", "got no quorum.*min_groups is 2", before=orders("away", "host-1"),
        flags=("--fault_tolerance.min_groups", "2"), starts=False,
        waits=Wait(25.0, "a start and two quorum_timeout_s")),
    "a weight that flips": Cause(
        "arithmetic", "parameters of groups? 1 ", orders("flip", "group-1"),
        ("--fault_tolerance.audit_interval", "8"), groups=3,
        waits=Wait(8.0, "audit_interval; it has healed two seconds later"), silent=("page",)),
    "a weight that flips, in exact mode": Cause(
        "arithmetic", "parameters of groups? 1 |computed other bits", orders("flip", "group-1"), EXACT, groups=3,
        waits=Wait(6.0, "an audit")),
    "products that are wrong, in audited slots": Cause(
        "arithmetic", "group 1 computed other bits", orders("flip-products", "group-1.always"), EXACT, groups=3,
        waits=Wait(6.0, "an audit")),
    "a device that multiplies wrongly": Cause(
        "arithmetic", "rank 0 .*refused|group 1 computed", orders("multiply-wrongly", "group-0.always"), CHECKED,
        waits=ASKED_TWICE),
    "NaN in one slot, wherever it is computed": Cause(
        "finite", "Slot 3 of step", orders("no-gradient", SLOT), waits=ASKED_TWICE, silent=FIGURES),
    "NaN in all parameters": diverges(orders("nan", *EVERYBODY), "the loss is nan"),
    "Inf in all parameters": diverges(orders("inf", *EVERYBODY)),
    "parameters that became huge": diverges(orders("huge", *EVERYBODY)),
    "a learning rate without sense": diverges(lr=1e30),
    "a slot that ends groups": Cause(
        "data", "Slot 3 of step .* ended the workers.*The run ends", soon("runtime"), waits=RESTARTS,
        silent=FIGURES),
    "a slot that ends groups by SIGSEGV": Cause(
        "data", "Slot 3 of step .* ended the workers", soon("segv"), waits=RESTARTS, silent=FIGURES),
    "a slot that is skipped": Cause(
        "data", "Slot 3 of step .*The slot is skipped", soon("key"), ("--fault_tolerance.on_poison", "skip"),
        waits=RESTARTS),
    "data that ends": Cause(
        "data", "The data ended at step", flags=("--dataloader.dataset_path", "{home}/notes.jsonl"), job="jsonl",
        source="dataloader", starts=False, waits=Wait(60.0, "the data's end"), silent=FIGURES),
    "a slow host": Cause(
        "pace", "Group 1 is slow", orders("slow", "group-1"), waits=Wait(12.0, "some slots of its pace")),
    "a host with a tenth of a core left": Cause(
        "pace|group", "Group 1 is slow|Group 1 hung", starve(1), waits=STALLS),
    "a clock that is ahead": Cause("clock", "clocks of groups .* differ by 3[56]", before=orders("ahead", "host-1")),
    "a clock that is behind": Cause("clock", "clocks of groups .* differ by 3[56]", before=orders("behind", "host-1")),
    "an error in every group": everywhere("key", "KeyError"),
    "SIGSEGV in every group": everywhere("segv", "SIGSEGV"),
    "an exit of every group": everywhere("exit", "status 3"),
    "no memory in every group": everywhere("memory", "MemoryError"),
}  # fmt: skip


@dataclass
class Found:
    """Whether and when the outlets named a cause."""

    name: str
    cause: Cause
    sentences: dict[str, list[str]] = field(default_factory=dict)
    """Sentence -> the outlets that said it."""
    heard_s: dict[str, float] = field(default_factory=dict)
    """Outlet -> seconds after the cause until it named it."""
    wrong: str = ""

    def row(self) -> dict[str, Any]:
        outlets = {outlet: round(seconds, 1) for outlet, seconds in self.heard_s.items()}
        wait = self.cause.waits
        waits = {"waits_for": f"{wait.of}, {wait.s:g} s"} if wait.of else {}
        return {"cause": self.name, "wrong": self.wrong, **waits, "heard_s": outlets, "said": self.sentences}


def tried(name: str, folder: Path) -> Found:
    """Start a run, break it with one cause, and end it. Returns what the outlets said."""
    cause = CAUSES[name]
    home = folder / re.sub(r"\W+", "-", name)
    home.mkdir()
    scene, found = Scene(home, cause), Found(name, cause)
    try:
        cause.before(scene)
        scene.start()
        if cause.starts:
            scene.all_take_part(cause.groups)
        begun = time.time()
        cause.act(scene)
        listen(scene, cause, found, begun)
        said = LAST_WORDS.sub("", scene.console.read_text())
        if "Traceback" in said:
            found.wrong += " traceback: " + said[said.index("Traceback") :][:600]
    except Exception as error:  # noqa: BLE001  the other causes go on
        found.wrong = f"{type(error).__name__}: {error}"
    finally:
        scene.end()
    return found


def listen(scene: Scene, cause: Cause, found: Found, begun: float) -> None:
    """Wait until every outlet has named the cause, or it is too late; note in `found` which did and when."""
    outlets = scene.heard(cause.words)
    for silent in cause.silent:
        del outlets[silent]
    latest = begun + cause.waits.s + LIMIT_S
    while missing := [outlet for outlet in outlets if outlet not in found.heard_s]:
        if time.time() > latest:
            found.wrong = f"not within {latest - begun:g} s: {', '.join(missing)}; said: {list(scene.hook.texts)}; "
            found.wrong += scene.console.read_text()[-600:]
            return
        for outlet in missing:
            with contextlib.suppress(OSError, LaunchError):  # there are no events yet
                if sentences := outlets[outlet]():
                    found.heard_s[outlet] = time.time() - begun
                    found.sentences.setdefault(sentences[-1], []).append(outlet)
        time.sleep(LOOK_S)


def all_of(names: list[str], jobs: int) -> Iterator[Found]:
    with tempfile.TemporaryDirectory(prefix="everstep-causes-") as name, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name_: tried(name_, Path(name)), names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in CAUSES; default: all of them")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    args = parser.parse_args()
    count = named = 0
    slowest = 0.0
    for found in all_of(args.names or list(CAUSES), args.jobs):
        count, named = count + 1, named + (not found.wrong)
        late = max(found.heard_s.values(), default=0.0) - found.cause.waits.s
        slowest = max(slowest, late)
        print(json.dumps(found.row()), flush=True)
    print(json.dumps({"causes": count, "named": named, "latest_after_it_could_be_known_s": round(slowest, 1)}))


if __name__ == "__main__":
    main()
