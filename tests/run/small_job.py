"""A user's module for `[job] module`: a Llama 3 of 0.2 million parameters, which most tests of runs train, and the same
on the user's dataset, a JSONL file.

To make starts and slots fast, the standard library's text is that of one package, and the loss is computed in one
piece. Each slot sleeps for EVERSTEP_TEST_PACE_S: otherwise groups would make hundreds of steps while another one
restarts, and the run without failures would have to make all of them as well.
"""

import os
import time

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models import llama3
from torchtitan.models.llama3 import ComplexRoPE
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer

from everstep.titan.data import texts
from everstep.titan.data.byte_tokenizer import ByteTokenizer

DIM, HEADS, VOCAB = 64, 4, 512
PACE_S = float(os.environ.get("EVERSTEP_TEST_PACE_S", "0"))

texts.stdlib_sources = lambda root: sorted((root / "json").glob("*.py"))
DATASETS["notes"] = DatasetConfig(
    path="given as dataset_path",
    loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
    sample_processor=lambda row: row["text"],
)


_forward = Llama3Model.forward


def _paced(*args, **kwargs):
    time.sleep(PACE_S)
    return _forward(*args, **kwargs)


if PACE_S:
    Llama3Model.forward = _paced


def debugmodel() -> Trainer.Config:
    return llama(2)


def llama(layers: int) -> Trainer.Config:
    config = sized(llama3_debugmodel())
    model = config.model_spec.model
    model.lm_head.param_init = llama3._output_linear_init(DIM)
    model.layers = llama3._build_llama3_layers(
        n_layers=layers, dim=DIM, n_heads=HEADS, hidden_dim=4 * DIM,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=1024, theta=500000), attn_backend="flex",
    )  # fmt: skip
    return config


def sized(config: Trainer.Config) -> Trainer.Config:
    """Set all sizes of the model except those of its layers, and return the config."""
    model = config.model_spec.model
    model.dim, model.vocab_size = DIM, VOCAB
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCAB, DIM
    model.norm.normalized_shape = DIM
    model.lm_head.in_features, model.lm_head.out_features = DIM, VOCAB
    config.loss.loss_fn.global_vocab_size, config.loss.num_chunks = VOCAB, 1
    return config


def jsonl() -> Trainer.Config:
    config = debugmodel()
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="notes")
    return config
