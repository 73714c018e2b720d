"""Every name that Everstep imports from torchtitan's data and checkpoint modules: what a release of torchtitan renames
is to be changed here, and in `titan.private`.

pyproject.toml allows torchtitan 0.3 but not 0.4; 0.3.0 was tried. torchtitan's main branch has renamed the text
dataloader, three names of `components.dataloader`, the interleaved datasets and `components.checkpoint_utils`, and
reads data through Grain.
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
from torchtitan.hf_datasets.text_datasets import HFDataSource as HFDataSource
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader as HuggingFaceTextDataLoader
