"""What is told of a run while it goes, beside the view: a Prometheus endpoint, TensorBoard and W&B.

A thread follows the run's events from their beginning, in whatever process is there for the whole run: the supervisor,
or on a cluster the lighthouse's job. It asks no trainer, and no trainer waits for it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.report.curves import Curves, Sink, TensorBoard, WandB
from everstep.report.serve import Server
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
        from prometheus_client import generate_latest

        from everstep.report.metrics import Metrics

        what = self._what
        metrics, curves = Metrics(what.groups, what.min_groups), Curves(what.run_dir, _sinks(what))
        kind = "text/plain; version=0.0.4; charset=utf-8"
        server = None
        if what.port:
            server = _opened(
                f"no figures on {what.host}:{what.port} (fault_tolerance.metrics_port)",
                lambda: Server(what.host, what.port, {"/metrics": lambda: (kind, generate_latest(metrics.registry))}),
            )
        tail = EventTail(what.run_dir)
        try:
            while True:
                last = self._over.wait(POLL_S)
                events = tail.new()
                metrics.follow(events)
                curves.follow(events)
                if last:
                    return
        finally:
            curves.close()
            if server is not None:
                server.close()


def _sinks(what: Telling) -> list[Sink]:
    """Those that are wanted and can be opened."""
    found: list[Any] = []
    if what.tensorboard:
        folder = what.run_dir / what.tensorboard_folder
        found.append(_opened("nothing goes to TensorBoard", lambda: TensorBoard(folder)))
    if what.wandb:
        found.append(_opened("nothing goes to W&B", lambda: WandB(what.run_dir)))
    return [sink for sink in found if sink is not None]


def _opened(otherwise: str, make: Callable[[], Any]) -> Any:
    """What is made; None, and a sentence, when it cannot be: that must not keep the others away."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001  a package, a port, a network
        _say(otherwise, error)
        return None


def _say(what: str, error: Exception) -> None:
    print(f"everstep: {what}: {type(error).__name__}: {error}", flush=True)
