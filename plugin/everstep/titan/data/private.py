"""Private names of torchtitan's and Hugging Face's datasets that reading by slot relies on, each dataset as its parts.

As `everstep.titan.private`: a name that is gone raises where it is used.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from everstep.foreign import replace
from everstep.titan.names import InterleavedDataset


def parts_of(dataset: Any) -> list[Any]:
    """A dataset, and the datasets and the sources of their examples that it is made of."""
    from datasets import iterable_dataset as hf
    from torch.utils.data import Dataset

    kinds = Dataset, hf.IterableDataset, hf._BaseExamplesIterable
    found: dict[int, Any] = {}
    left = [dataset]
    while left:
        part = left.pop()
        if isinstance(part, list) and part and isinstance(part[0], kinds):
            left += part
        elif isinstance(part, kinds) and id(part) not in found:
            found[id(part)] = part
            left += vars(part).values()
    return list(found.values())


def count_epochs_apart(parts: list[Any]) -> None:
    """Have each process that reads a dataset count its own epochs. Those of Hugging Face are counted in memory that a
    loader's processes share, where each that ends one moves the others on: which rows come next is a matter of luck."""
    from datasets import IterableDataset

    for part in parts:
        if isinstance(part, IterableDataset):
            replace(part, "_epoch", part.epoch)


def load_states_once(parts: list[Any]) -> None:
    """Have a dataset that goes on from a state begin its next epoch at the beginning. Hugging Face's begin each
    iteration of the state's epoch at the state, and torchtitan's multimodal dataset never counts another epoch."""
    from datasets import IterableDataset

    for part in parts:
        if hasattr(part, "_get_data_iter") and isinstance(part._data, IterableDataset):
            replace(part, "_get_data_iter", partial(_rest_of_epoch, type(part), part))


def _rest_of_epoch(kind: Any, dataset: Any) -> Iterator[Any]:
    yield from kind._get_data_iter(dataset)
    replace(dataset._data, "_starting_state_dict", None)


def lost_in_state(parts: list[Any]) -> str:
    """What a dataset's state does not have, so that it goes on with other rows once that is loaded; empty where nothing
    is known to be lost."""
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    for part in parts:
        if isinstance(part, BufferShuffledExamplesIterable):
            return "the rows in a shuffle buffer"
        reads_again = isinstance(part, InterleavedDataset) and part._stopping_strategy == "all_exhausted"
        if reads_again and not all(getattr(source, "infinite", False) for source in part._datasets):
            return "which of its sources have ended"
    return ""
