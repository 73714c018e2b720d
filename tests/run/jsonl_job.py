"""A user's own module for `[job] module`: a small Llama 3 on their own dataset, a JSONL file."""

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

import small_job
from everstep.titan.data.byte_tokenizer import ByteTokenizer

DATASETS["notes"] = DatasetConfig(
    path="given as dataset_path",
    loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
    sample_processor=lambda row: row["text"],
)


def debugmodel() -> Trainer.Config:
    config = small_job.debugmodel()
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="notes")
    return config
