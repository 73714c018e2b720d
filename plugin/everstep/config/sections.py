"""Everstep's own sections of a config, in the form of torchtitan's sections: each field is followed by the text that a
user reads in `--help`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(kw_only=True, slots=True)
class Job:
    """`[job]`: the config that a file starts from. It is read from the file only. The command line has no flags for it,
    because flags apply to a config that is already chosen."""

    module: Annotated[str, tyro.conf.Suppress] = ""
    """Model or package whose registry is used: a model of torchtitan (llama3, qwen3, deepseek_v3, gpt_oss, ...), or the
    import path of a package with a `config_registry`."""

    config: Annotated[str, tyro.conf.Suppress] = ""
    """Name of a config in that registry, e.g. llama3_8b. Empty: torchtitan's defaults for the model of `flavor`."""

    flavor: Annotated[str, tyro.conf.Suppress] = ""
    """Name of a model in that registry, e.g. 1B, with the registry's default attention and without converters. Empty:
    the model of `config`."""


@dataclass(kw_only=True, slots=True)
class FaultTolerance:
    """`[fault_tolerance]`: replica groups, their quorums, and how a run survives failures."""

    enable: bool = False
    """Train as one of several replica groups, and count every slot of a step exactly once. Off: torchtitan's own
    trainer, unchanged."""

    groups: int = 1
    """Number of replica groups, spares included. More may join. The run goes on with fewer, down to min_groups."""

    spares: int = 0
    """Number of groups that stand by. They hold the same state as the others but compute no slots until another group
    dies or becomes slow. Each costs its machine, and takes part in every sum."""

    min_groups: int = 1
    """Smallest number of groups that may commit a step. With fewer, the run waits."""

    group_id: int = 0
    """This group's id, 0 to groups - 1, the same after every restart. `everstep run` and `everstep agent` set it."""

    lighthouse: str = ""
    """Address of the run's lighthouse (`everstep lighthouse`), `http://host:port`. An address that a lighthouse has
    written into the run directory is preferred."""

    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend of the gradient sums between groups. gloo aborts cleanly and runs everywhere. nccl is faster between GPUs
    and needs NCCL >= 2.28, which can abort a sum whose peer is gone."""

    on_loss: Literal["redistribute", "shrink"] = "redistribute"
    """What happens when a group is lost. `redistribute`: the other groups compute its slots, so every step has its
    whole global batch. `shrink`: the step commits with the slots that remain (torchft's behaviour)."""

    on_poison: Literal["stop", "skip"] = "stop"
    """What happens when one slot has ended the workers of three groups, one after another. `stop`: the run ends and
    names the slot. `skip`: the step leaves out the slot's tokens, with an event."""

    bind_host: str = ""
    """Host name or address that this group's servers (heal source, gradient sums) listen on and advertise. Gloo and
    NCCL use its interface. Empty: the address by which other hosts reach this one. `everstep run` sets 127.0.0.1."""

    heartbeat_timeout_s: float = 2.0
    """A group without a heartbeat for this long is left out of the next quorum. Lower values shorten the stall when a
    host falls silent, but too low a value takes a busy host for a dead one. The sums of a step's first attempt wait
    this much longer than the groups' paces explain. The death of a process is noticed without this timeout."""

    join_timeout_s: float = 10.0
    """Longest time that the groups of a quorum wait for a group that is alive but does not ask to join, e.g. because it
    hangs."""

    connect_timeout_s: float = 2.0
    """Longest wait for the groups of a new quorum to connect to each other for sums."""

    reduce_timeout_s: float = 10.0
    """Longest wait for one gradient sum across groups, in retries and as long as the groups' paces are unknown. A
    joiner that receives no byte of a state for three times as long asks another group. No group waits for a joiner."""

    quorum_timeout_s: float = 60.0
    """Longest wait for one quorum. After it the group asks again, with the reason in an event."""

    stall_timeout_s: float = 120.0
    """A group with a rank that makes no progress for this long is killed and restarted by its agent. Must be longer
    than quorum_timeout_s, reduce_timeout_s, the longest slot and the writing of a checkpoint."""

    startup_timeout_s: float = 900.0
    """The same before a group's first step, which includes imports, model, compilation and checkpoint. A group that
    commits no step for four times as long (no quorum, no lighthouse) ends with an error."""

    node_failures: int = 10
    """In a batch job: number of deaths of this group on one node within an hour after which the group leaves that node.
    0: it never leaves."""

    metrics_port: int = 0
    """Port on which the supervisor (on a cluster: the lighthouse's job) serves the run's figures for Prometheus, at the
    lighthouse's address. 0: none."""

    notify: str = ""
    """URL of a webhook that receives a message for each guarantee that stops holding, as JSON in Slack's format,
    {"text": ...}. The URL is a secret, so the page does not show it. Empty: none."""

    exact: bool = False
    """Compute the same bits whatever fails: parameters, optimizer state and losses are those of a run without faults,
    with any number of groups. Costs deterministic kernels and 12 more bytes for each parameter. Needs equal hardware
    and software in all groups; a group that computes other bits is refused."""

    audit_slots: float = 0.0
    """Share of slots, 0 to 1, that a second group computes too, to compare the bits. If they differ, a third group
    decides which group is wrong. Needs exact = true."""

    audit_interval: int = 50
    """Committed steps between two comparisons of a checksum of all groups' parameters; with exact = true they are
    compared after every step. A group that differs is named and heals. 0: never."""


@dataclass(kw_only=True, slots=True)
class Data:
    """`[data]`: the source of the slots' tokens."""

    source: Literal["dataloader", "stdlib", "tokens"] = "dataloader"
    """`dataloader`: the torchtitan dataloader of `[dataloader]`, one stream for each slot. `stdlib`: the source files
    of Python's standard library, byte by byte, without download. `tokens`: a token file of `everstep pack`, which is
    memory-mapped."""

    path: str = ""
    """Path of the token file, for source = "tokens"."""

    shuffle: bool = True
    """Shuffle the rows, by debug.seed and epoch. For stdlib and tokens."""
