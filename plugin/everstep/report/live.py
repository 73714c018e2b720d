"""What is told of a run while it goes, beside the view: a Prometheus endpoint, TensorBoard and W&B.

A thread follows the run's events from their beginning, in whatever process is there for the whole run: the supervisor,
or on a cluster the lighthouse's job. It asks no trainer, and no trainer waits for it.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.report.scalars import Scalars, Sink, TensorBoard, WandB
from everstep.run.events import EventTail

POLL_S = 1.0


@dataclass(frozen=True)
class Telling:
    """What is wanted. `port` 0: no endpoint."""

    run_dir: Path
    groups: int = 1
    min_groups: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    tensorboard: bool = False
    tensorboard_folder: str = "tb"
    wandb: bool = False

    @property
    def anything(self) -> bool:
        return bool(self.port or self.tensorboard or self.wandb)


def telling(run_dir: Path, host: str, toml: dict[str, Any], port: int, groups: int, min_groups: int) -> Telling:
    """What a run's config asks for: torchtitan's `[metrics]` in `toml`, and what `[fault_tolerance]` says."""
    metrics = toml.get("metrics", {})
    return Telling(
        run_dir=run_dir,
        host=host,
        port=port,
        groups=groups,
        min_groups=min_groups,
        tensorboard=bool(metrics.get("enable_tensorboard", False)),
        tensorboard_folder=str(metrics.get("save_tb_folder", "tb")),
        wandb=bool(metrics.get("enable_wandb", False)),
    )


class Teller:
    """Begins when it is made; `close` writes what is left. What goes wrong is printed and costs the run nothing."""

    def __init__(self, what: Telling) -> None:
        self._what = what
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if what.anything:
            self._thread = threading.Thread(target=self._run, name="teller", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  a full disk, a server that is away
            _say("metrics end here", error)

    def _follow(self) -> None:
        from everstep.report.metrics import Metrics

        what = self._what
        metrics, scalars = Metrics(what.groups, what.min_groups), Scalars(_sinks(what))
        stop_serving = _serve(what, metrics.registry) if what.port else None
        tail = EventTail(what.run_dir)
        try:
            while True:
                last = self._over.wait(POLL_S)
                events = tail.new()
                metrics.follow(events)
                scalars.follow(events)
                if last:
                    return
        finally:
            scalars.close()
            if stop_serving is not None:
                stop_serving()


def _sinks(what: Telling) -> list[Sink]:
    """Those that are wanted and can be opened."""
    wanted: list[tuple[str, Callable[[], Sink]]] = []
    if what.tensorboard:
        wanted.append(("TensorBoard", lambda: TensorBoard(what.run_dir / what.tensorboard_folder)))
    if what.wandb:
        run_id = hashlib.blake2b(str(what.run_dir.resolve()).encode(), digest_size=6).hexdigest()
        wanted.append(("W&B", lambda: WandB(what.run_dir, run_id)))
    found: list[Sink] = []
    for name, opened in wanted:
        try:
            found.append(opened())
        except Exception as error:  # noqa: BLE001  whatever keeps one away must not keep the others away
            _say(f"nothing goes to {name}", error)
    return found


def _serve(what: Telling, registry: Any) -> Callable[[], None] | None:
    """Serve a prometheus_client registry; what ends that, or None if it cannot be."""
    from prometheus_client import start_http_server

    try:
        return start_http_server(what.port, what.host, registry=registry)[0].shutdown
    except OSError as error:
        _say(f"no figures on {what.host}:{what.port} (fault_tolerance.metrics_port)", error)
        return None


def _say(what: str, error: Exception) -> None:
    print(f"everstep: {what}: {type(error).__name__}: {error}", flush=True)
