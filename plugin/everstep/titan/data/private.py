"""Private names of torchtitan's and Hugging Face's datasets that reading by slot relies on.

As in `everstep.titan.private`, a name that a release removed raises an error at its first use.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from everstep.foreign import replace
from everstep.titan.names import InterleavedDataset


def parts_of(dataset: Any) -> list[Any]:
    """Return a dataset, all datasets that it contains, and the sources of their examples."""
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
    """Make each process that reads a Hugging Face dataset count epochs for itself. Otherwise the worker processes of a
    loader share one counter: a process that ends an epoch advances the others too, which is a race for the rows."""
    from datasets import IterableDataset

    for part in parts:
        if isinstance(part, IterableDataset):
            replace(part, "_epoch", part.epoch)


def load_states_once(parts: list[Any]) -> None:
    """Make a dataset that was restored from a state begin its next epoch at the beginning. Hugging Face starts every
    iteration of the state's epoch at the state, and torchtitan's multimodal dataset never sets another epoch."""
    from datasets import IterableDataset

    for part in parts:
        if hasattr(part, "_get_data_iter") and isinstance(part._data, IterableDataset):
            replace(part, "_get_data_iter", partial(_rest_of_epoch, type(part), part))


def _rest_of_epoch(kind: Any, dataset: Any) -> Iterator[Any]:
    yield from kind._get_data_iter(dataset)
    replace(dataset._data, "_starting_state_dict", None)


def lost_in_state(parts: list[Any]) -> str:
    """Return what the dataset's state lacks, so that a restored dataset would go on with other rows; "" if nothing is
    known to be missing."""
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    for part in parts:
        if isinstance(part, BufferShuffledExamplesIterable):
            return "the rows in a shuffle buffer"
        reads_again = isinstance(part, InterleavedDataset) and part._stopping_strategy == "all_exhausted"
        if reads_again and not all(getattr(source, "infinite", False) for source in part._datasets):
            return "which of its sources have ended"
    return ""
