import json

import pytest
import torchtitan.hf_datasets.text_datasets as text_datasets
from torchtitan.hf_datasets import DatasetConfig

from everstep.titan.data.byte_tokenizer import ByteTokenizer


def built(config, tokenizer, dp_rank=0, dp_world_size=1, seq_len=16, local_batch_size=2):
    """Build a dataloader as torchtitan does."""
    place = {"dp_rank": dp_rank, "dp_world_size": dp_world_size, "snapshot_every_n_steps": 1}
    return config.build(tokenizer=tokenizer, seq_len=seq_len, local_batch_size=local_batch_size, **place)


@pytest.fixture(scope="session")
def tokenizer():
    return ByteTokenizer.Config().build(tokenizer_path="not needed")


@pytest.fixture(scope="session")
def documents():
    """Texts of very different lengths, each beginning with its number."""
    return [f"<{number}>" + "abcdefghij"[number % 10] * (7 * number % 53) for number in range(60)]


@pytest.fixture
def jsonl(tmp_path, documents):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def register(monkeypatch):
    """A function that adds a dataset of a name to those of torchtitan's text dataloader."""

    def register(name, loader, processor=lambda row: row["text"]):
        config = DatasetConfig(path="given to the loader", loader=loader, sample_processor=processor)
        monkeypatch.setitem(text_datasets.DATASETS, name, config)

    return register
