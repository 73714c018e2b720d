"""All that Everstep takes of torchtitan's data and checkpoints: a release that renames some of it is met here and in
`titan.private`.

pyproject.toml allows torchtitan 0.3 and not 0.4: 0.3.0 is what was tried. torchtitan's main branch has other names for
the text dataloader, for three names of `components.dataloader` and for the interleaved datasets, reads through Grain,
and has renamed `components.checkpoint_utils`.
"""

from torchtitan.components.checkpoint_utils import init_optim_state as init_optim_state
from torchtitan.components.checkpointer import CheckpointManager as CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER as DATALOADER
from torchtitan.components.checkpointer.base import TRAIN_STATE as TRAIN_STATE
from torchtitan.components.dataloader import BaseDataLoader as BaseDataLoader
from torchtitan.components.dataloader import DataloaderExhaustedError as DataloaderExhaustedError
from torchtitan.components.dataloader import ParallelAwareDataloader as ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer as BaseTokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
from torchtitan.hf_datasets.interleaved import InterleavedDataset as InterleavedDataset
from torchtitan.hf_datasets.text_datasets import DATASETS as DATASETS
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader as HuggingFaceTextDataLoader
