"""A user's own module for `[job] module`: torchtitan's debug Llama 3 with two layers, which most tests of runs train,
and the same on their own dataset, a JSONL file."""

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from everstep.titan.data.byte_tokenizer import ByteTokenizer

LAYERS = 2

DATASETS["notes"] = DatasetConfig(
    path="given as dataset_path",
    loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
    sample_processor=lambda row: row["text"],
)


def debugmodel() -> Trainer.Config:
    config = llama3_debugmodel()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    return config


def jsonl() -> Trainer.Config:
    config = debugmodel()
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="notes")
    return config
