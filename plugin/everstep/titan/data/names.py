"""All that Everstep takes of torchtitan's data: a release that renames some of it is met here and in `titan.private`.

pyproject.toml allows torchtitan 0.3 and not 0.4: 0.3.0 is what was tried. torchtitan's main branch has other names for
the text dataloader, for three names of `components.dataloader` and for the interleaved datasets, and reads through
Grain.
"""

from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.hf_datasets.interleaved import InterleavedDataset
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

__all__ = [
    "DATASETS",
    "BaseDataLoader",
    "BaseTokenizer",
    "DataloaderExhaustedError",
    "HuggingFaceTextDataLoader",
    "HuggingFaceTokenizer",
    "InterleavedDataset",
    "ParallelAwareDataloader",
]
