"""Makes any torchtitan dataloader readable by slot: one stream for each slot, opened by the group that computes it.

A run reads N = slots * dp_size streams. Stream k is the wrapped dataloader, built as data-parallel rank k of N. Stream
slot * dp_size + dp_rank has the batches of that slot and rank; its batch number p (from 0) belongs to step
began_after + p + 1. A batch depends only on (stream, number), because a dataloader that starts from the beginning or
from its own saved state gives the same batches again.

A group that takes over a slot opens the slot's stream at the newest state that the group knows, or at the beginning,
and skips to the batch that it needs. For this, groups exchange the states of their streams from time to time. Frequent
exchanges cost traffic, rare ones cost time for skipping; neither changes a batch. What a dataset draws from the global
generators of torch, numpy and Python is seeded for each batch, unless worker processes read it. States are plain values
(`everstep.data.plain`), never pickles. A batch is kept until its step is committed, because a retry reads it again."""

import contextlib
import copy
import functools
import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.data.plain import StreamState, decode_states, encode_states, from_plain, to_plain
from everstep.run.exits import USAGE_EXIT, TrainerEnds
from everstep.run.typed import UnfitError
from everstep.titan.data import private
from everstep.titan.data.slot_source import Batch, SlotSource
from everstep.titan.names import (
    BaseDataLoader,
    BaseTokenizer,
    DataloaderExhaustedError,
    ParallelAwareDataloader,
)
from everstep.titan.state import slot_seed

logger = logging.getLogger(__name__)

_SPEED = {"persistent_workers": False, "pin_memory": False, "prefetch_factor": None}
"""Settings of dataloaders that affect speed only, with torchtitan's defaults."""
_RANK = "dp_rank_"
"""Prefix of a checkpoint's keys: `dp_rank_3` holds the stream states that data-parallel rank 3 knew."""


@contextlib.contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Seed the global generators for the body, and restore them after it. The streams that a process opens, and the
    batches that it skips, depend on which groups died; the model's random numbers must not."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


class _Stream:
    """An open dataloader and its position, the number of its next batch. It starts at the state `known` if there is one
    and restoring from it is exact, else at the beginning. `seed`: the run's, for what a dataset draws. As torchtitan's
    data-parallel ranks, all streams draw the same, so that a dataset may shuffle what it then divides among them."""

    def __init__(self, build: Callable[[], BaseDataLoader], seed: int, known: StreamState | None):
        self._seed = seed
        with _drawing(seed):  # a dataloader's iterator draws a seed from torch's global generator
            self.loader = build()
            parts = private.parts_of(getattr(self.loader, "dataset", None))
            private.count_epochs_apart(parts)
            private.load_states_once(parts)
            self._lost = private.lost_in_state(parts)
            if self._lost:
                known = None
            _let_states_be_copies(self.loader)
            if known:
                _stateful(self.loader).load_state_dict(self.loader, from_plain(known.state))
            self._batches = iter(self.loader)
        self.position = self.began_at = known.position if known else 0

    def batch(self, number: int) -> Batch:
        """Skip to batch `number`, not before `position`, and return it. Raises StopIteration at the end of the data."""
        while True:
            with _drawing(slot_seed(self._seed, self.position, 0, 0)):
                batch = next(self._batches)
            self.position += 1
            if self.position > number:
                return batch

    def state(self) -> StreamState:
        """Return position and state. Raises UnfitError if a dataloader restored from it would give other batches."""
        if self._lost:
            raise UnfitError(f"the state does not contain {self._lost}")
        return StreamState(self.position, to_plain(_stateful(self.loader).state_dict(self.loader)))


def _let_states_be_copies(loader: BaseDataLoader) -> None:
    """Make the dataset of a loader with worker processes return copies as states. A worker process passes the state to
    a thread that sends it while the process reads on. torchtitan's datasets put their live buffers into the state, so
    without a copy it would be sent with tokens of later batches."""
    dataset: Any = getattr(loader, "dataset", None)
    if getattr(loader, "num_workers", 0) and hasattr(dataset, "state_dict"):
        dataset.state_dict = functools.partial(_copied_state, type(dataset), dataset)


def _copied_state(kind: Any, dataset: Any) -> dict[str, Any]:
    return copy.deepcopy(kind.state_dict(dataset))


def _stateful(loader: BaseDataLoader) -> Any:
    """Return the class whose `state_dict` to use: for torchtitan's loader torchdata's, as torchtitan's pickles it."""
    return StatefulDataLoader if isinstance(loader, ParallelAwareDataloader) else type(loader)


class SlotStreams(SlotSource):
    """Reads the dataloader of `Config.base`, which must be deterministic: two instances that are built with the same
    arguments give the same batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        base: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """Config of the dataloader that every stream is an instance of: that of `[dataloader]`."""

        seed: int = 0
        """The run's seed, for what a dataset draws from global generators."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs,
    ):
        super().__init__(dp_rank, dp_world_size)
        self._base, self._seed, self._tokenizer = config.base, config.seed, tokenizer
        self._runtime = {
            "tokenizer": tokenizer,
            "seq_len": seq_len,
            "local_batch_size": local_batch_size,
            # With worker processes, a state is exact only after a batch at which a snapshot was taken.
            "snapshot_every_n_steps": 1,
        }
        self._complained = False
        self._forget()

    def begin_after(self, step: int) -> None:
        super().begin_after(step)
        self._forget()

    def _forget(self) -> None:
        self._live: dict[int, _Stream] = {}
        self._known: dict[int, StreamState] = {}
        self._held: dict[tuple[int, int], Batch] = {}  # (step, counted from 0 in this data, and slot) -> batch
        self._steps = 0  # number of committed steps that read this data

    # By slot.

    @property
    def _streams(self) -> int:
        return self._slots * self.dp_size

    def _slot(self, number: int, slot: int) -> Batch:
        if (number, slot) not in self._held:
            self._held[number, slot] = self._batch(slot * self.dp_size + self.dp_rank, number)
        inputs, labels = self._held[number, slot]
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        return copies, labels.clone()

    def committed(self, step: int) -> None:
        self._steps = step - self.began_after
        self._held = {key: batch for key, batch in self._held.items() if key[0] >= self._steps}

    def fingerprint(self) -> str:
        settings = self._base.to_dict()
        settings |= {key: value for key, value in _SPEED.items() if key in settings}
        config = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(settings, sort_keys=True))
        return f"{type(self._base).__qualname__} {config}, rows of {self._runtime['seq_len']}"

    @property
    def largest_id(self) -> int:
        return self._tokenizer.get_vocab_size() - 1

    # Positions of streams.

    def known_states(self, *, own: bool = False) -> bytes:
        """Return the newest known state of every stream, or of this rank's `own`, none beyond the last commit."""
        self.note_live()
        return encode_states({of: known for of, known in self._known.items() if of in self._live or not own})

    def learn(self, states: bytes) -> None:
        """Keep each of `states` that is newer than the known state of its stream."""
        for stream, state in decode_states(states).items():
            if stream not in self._known or state.position > self._known[stream].position:
                self._known[stream] = state
            if stream in self._live and self._live[stream].position < state.position:
                del self._live[stream]  # another group computes this slot now

    def note_live(self) -> None:
        for stream, live in self._live.items():
            known = self._known.get(stream)
            if live.position <= self._steps and (known is None or live.position > known.position):
                try:
                    self._known[stream] = live.state()
                except UnfitError as error:
                    if not self._complained:
                        logger.warning(
                            "The state of %s cannot be sent to other groups. A group that takes over one of its "
                            "streams will read it from the beginning. Reason: %s",
                            type(live.loader).__name__,
                            error,
                        )
                    self._complained = True

    def _batch(self, stream: int, number: int) -> Batch:
        """Return batch `number` of `stream`; reopen it if it is beyond that batch, or a known state is nearer."""
        live, known = self._live.pop(stream, None), self._known.get(stream)
        if known and known.position > number:
            known = None
        if live and (live.position > number or (known and known.position > live.position)):
            live = None
        live = live or self._open(stream, known, number)
        while True:
            try:
                batch = live.batch(number)
                break
            except StopIteration:
                if live.began_at == 0:
                    what = f"data stream {stream} of {self._streams} ended before batch {number}"
                    raise DataloaderExhaustedError(what) from None
            # A text dataset of torchtitan that is restored after its last document was read drops the rows that were
            # still in its buffer. So only reading from the beginning can tell whether the data really ends here.
            live = self._open(stream, None, number)
        self._live[stream] = live
        return batch

    def _open(self, stream: int, known: StreamState | None, number: int) -> _Stream:
        position = known.position if known else 0
        logger.info("Data stream %d opened at batch %d, %d to skip", stream, position, number - position)

        def build() -> BaseDataLoader:
            try:
                return self._base.build(dp_world_size=self._streams, dp_rank=stream, **self._runtime)
            except IndexError as error:  # of Hugging Face, which divides a dataset into ranges of documents
                raise TrainerEnds(
                    USAGE_EXIT,
                    f"[dataloader] cannot be divided into {self._streams} data streams, one for each local batch of "
                    f"global_batch_size: it has fewer documents ({error}) Set a smaller global_batch_size",
                ) from error

        return _Stream(build, self._seed, known)

    # The interface of a torchtitan dataloader.

    def __iter__(self) -> Iterator[Batch]:
        raise TypeError("streams are read by slot; torchtitan's own trainer iterates over the dataloader itself")

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and under this data-parallel rank's key its stream states, as torchtitan's dataloaders
        do. While a checkpoint is loaded, the keys are those of all ranks that wrote it."""
        states = self.known_states()
        return {
            **{f"{_RANK}{rank}": states for rank in self.saved_ranks or (self.dp_rank,)},
            "streams": (self._streams, self.fingerprint()),
            "batches_read": self._steps * self._streams,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's position and states. Raises ValueError if it is of other streams or data."""
        if not state_dict:
            return
        told, mine = state_dict["streams"], self.fingerprint()
        streams, data = told if isinstance(told, tuple) else (told, mine)  # old checkpoints do not tell their data
        if streams != self._streams:
            raise ValueError(
                f"the checkpoint has {streams} data streams, but this run has {self._streams}: keep "
                "global_batch_size and local_batch_size."
            )
        if data != mine:
            raise ValueError(
                f"the checkpoint was trained on other data: its data is ({data}), this run's is ({mine}). Use the "
                "checkpoint's [dataloader] and seq_len (a folder that has moved needs a link at its old place), or "
                'ignore its position with checkpoint.exclude_from_loading = ["dataloader"].'
            )
        self._forget()
        for key, states in state_dict.items():
            if key.startswith(_RANK):
                self.learn(states)
        own = range(self.dp_rank, self._streams, self.dp_size)
        self._known = {stream: known for stream, known in self._known.items() if stream in own}
        self._steps = state_dict["batches_read"] // self._streams
