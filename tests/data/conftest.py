import json

import pytest
import torchtitan.hf_datasets.text_datasets as text_datasets
from torchtitan.hf_datasets import DatasetConfig

from everstep.titan.data.byte_tokenizer import ByteTokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return ByteTokenizer.Config().build(tokenizer_path="not needed")


@pytest.fixture(scope="session")
def documents():
    """Texts of very different lengths, each telling which it is."""
    return [f"<{number}>" + "abcdefghij"[number % 10] * (7 * number % 53) for number in range(60)]


@pytest.fixture
def jsonl(tmp_path, documents):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def register(monkeypatch):
    """Gives torchtitan's text dataloader a dataset of that name."""

    def register(name, loader):
        config = DatasetConfig(path="given to the loader", loader=loader, sample_processor=lambda row: row["text"])
        monkeypatch.setitem(text_datasets.DATASETS, name, config)

    return register
