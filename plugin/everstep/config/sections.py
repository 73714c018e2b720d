"""Everstep's own sections of a config, in the form torchtitan's sections have: a field, then what a user
reads about it in `--help`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(kw_only=True, slots=True)
class Job:
    """`[job]`: the config that a file starts from. Read once, from the file; the command line has no flags
    for it, because by the time flags apply the base has been chosen."""

    module: Annotated[str, tyro.conf.Suppress] = ""
    """Whose registry to look in: a model of torchtitan (llama3, qwen3, deepseek_v3, gpt_oss, ...) or the
    import path of a package with a `config_registry`."""

    config: Annotated[str, tyro.conf.Suppress] = ""
    """Which config of that registry, e.g. llama3_8b. Empty: torchtitan's defaults around `flavor`."""

    flavor: Annotated[str, tyro.conf.Suppress] = ""
    """Which model of that registry, e.g. 1B, with the registry's default attention and without converters.
    Empty: the model of `config`."""


@dataclass(kw_only=True, slots=True)
class FaultTolerance:
    """`[fault_tolerance]`: replica groups, quorums and how a run survives its failures."""

    enable: bool = False
    """Train as one of several replica groups, with the slot ledger. Off: torchtitan's own trainer,
    unchanged."""

    groups: int = 1
    """Nominal number of replica groups, spares included. More may join; fewer is survived down to min_groups."""

    spares: int = 0
    """How many of the groups stand by: they have all that the others have and compute nothing, until one of those dies
    or becomes slow. Each costs its machine, and a place in every sum."""

    min_groups: int = 1
    """The smallest number of groups that may commit a step. With fewer, the run waits."""

    group_id: int = 0
    """This group's id, 0 to groups - 1, the same after every restart. `everstep run` and `everstep agent`
    set it."""

    lighthouse: str = ""
    """Address of the run's lighthouse (`everstep lighthouse`), `http://host:port`. Empty: the environment's
    TORCHFT_LIGHTHOUSE."""

    process_group: Literal["gloo", "nccl"] = "gloo"
    """What carries the gradient sums between groups. gloo aborts cleanly and runs everywhere; nccl is faster
    between GPUs and needs NCCL >= 2.28, which can end a sum whose peer is gone."""

    on_loss: Literal["redistribute", "shrink"] = "redistribute"
    """When a group is lost: `redistribute` computes its slots on the others, so that every step has its whole
    global batch; `shrink` commits the step with the slots that are there (torchft's behaviour)."""

    on_poison: Literal["stop", "skip"] = "stop"
    """When a slot ends the workers of three groups, one after the other: `stop` ends the run and names the slot; `skip`
    lets the step do without the slot's tokens, with an event."""

    bind_host: str = ""
    """Host name or address that this group's servers (heal source, gradient sums) listen on and advertise; Gloo and
    NCCL use its interface. Empty: this machine's address towards others. `everstep run` sets 127.0.0.1."""

    heartbeat_timeout_s: float = 2.0
    """A group whose heartbeats stop for this long is left out of the next quorum. Lower: shorter stalls
    when a host falls silent; too low: a busy host is taken for a dead one. A step's first sums wait as long beyond what
    the groups' paces explain. The death of a process is noticed without it."""

    join_timeout_s: float = 10.0
    """Longest that the groups of a quorum wait for another one that is alive but does not ask to join, a
    group that hangs for instance."""

    connect_timeout_s: float = 2.0
    """Longest wait for the other groups of a new quorum to connect their process group."""

    reduce_timeout_s: float = 10.0
    """Longest wait for one gradient sum across groups, where their paces are not known yet, and in retries. A joiner
    asks another group for the state after three times as long without a byte; nobody waits for a joiner."""

    quorum_timeout_s: float = 60.0
    """Longest wait for one quorum before it is asked for again, with the reason in an event."""

    stall_timeout_s: float = 120.0
    """A group whose ranks make no progress for this long is killed and restarted by its agent. Must be longer
    than quorum_timeout_s, reduce_timeout_s, the longest slot and the writing of a checkpoint."""

    startup_timeout_s: float = 900.0
    """The same before a group's first step: imports, model, compilation, checkpoint. A group that could not commit a
    step for four times as long (no quorum, no lighthouse) ends with an error."""

    node_failures: int = 10
    """In a batch job: how many deaths may begin on one node within an hour before the group goes on without
    it. 0: any number."""

    metrics_port: int = 0
    """Where the supervisor (on a cluster: the lighthouse's job) serves the run's figures for Prometheus, on the address
    of the lighthouse. 0: nowhere."""

    notify: str = ""
    """A webhook that is told of each guarantee that stops holding, in JSON as Slack takes it, {"text": ...}. Its
    address is a secret: the page does not show it. Empty: none."""

    exact: bool = False
    """Train to the same bits whatever fails: parameters, optimizer state and losses are those of the run without
    faults, and of the run with another number of groups. Takes deterministic kernels, 12 bytes a parameter more, and
    groups on equal hardware and software; one that computes other bits is refused."""

    audit_slots: float = 0.0
    """Share of slots that a second group computes too, to compare their bits; a third one decides who is wrong. Needs
    exact = true."""

    audit_interval: int = 50
    """Every so many committed steps, after each with exact = true, the groups compare a checksum of their
    parameters; one that differs is named and heals. 0: never."""


@dataclass(kw_only=True, slots=True)
class Data:
    """`[data]`: where the slots' tokens come from."""

    source: Literal["dataloader", "stdlib", "tokens"] = "dataloader"
    """`dataloader`: the torchtitan dataloader of `[dataloader]`, one stream per slot. `stdlib`: the Python
    standard library's own sources, byte by byte, no download. `tokens`: a memory-mapped token file of
    `everstep pack`."""

    path: str = ""
    """The token file, for source = "tokens"."""

    shuffle: bool = True
    """Shuffle rows by debug.seed and epoch. For stdlib and tokens."""
