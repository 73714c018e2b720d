"""A registry of models as small as small_job's, for `[job] module = "tiny_llama"`: Llamas, one of them with streams of
a dataloader, a model with experts, and small Llamas with faults of the storage or without the compiler's cache."""

import errno
import json
import math
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torchtitan.hf_datasets.text_datasets as text_datasets
from datasets import Dataset
from torch.distributed.checkpoint import FileSystemWriter
from torchtitan.config.override import derive
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

import small_job
from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.slot_computer import SlotComputer
from small_job import DIM, HEADS, llama, sized

TEXTS = "source of the json package"
_write, _open, _compute = FileSystemWriter.write_data, os.open, SlotComputer.compute


def tiny() -> Trainer.Config:
    return llama(2)


def tiny_4() -> Trainer.Config:
    return llama(4)


def tiny_streams() -> Trainer.Config:
    """A config for `[data] source = "dataloader"`."""
    lines = [line for path in sorted(Path(json.__file__).parent.glob("*.py")) for line in path.read_text().splitlines()]
    documents = [{"text": "\n".join(lines[at : at + 10])} for at in range(0, len(lines), 10)]
    text_datasets.DATASETS[TEXTS] = DatasetConfig(
        path="", loader=lambda path: Dataset.from_list(documents), sample_processor=lambda row: row["text"]
    )
    config = llama(2)
    config.dataloader, config.tokenizer = HuggingFaceTextDataLoader.Config(dataset=TEXTS), ByteTokenizer.Config()
    return config


def tiny_moe() -> Trainer.Config:
    config = sized(qwen3_moe_debug())
    config.model_spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=DIM, n_heads=HEADS, n_kv_heads=HEADS, head_dim=DIM // HEADS, moe_hidden_dim=DIM // 2,
        num_experts=8, top_k=2, rope=CosSinRoPE.Config(dim=DIM // HEADS, max_seq_len=1024, theta=500000),
        attn_backend="flex", moe_comm_backend="standard",
    )  # fmt: skip
    for layer in config.model_spec.model.layers:
        routed = layer.moe.routed_experts
        routed.inner_experts = derive(routed.inner_experts, Float32Experts.Config)
    return config


class Float32Experts(GroupedExperts):
    """Experts in float32. torchtitan's always round to bfloat16, which is too coarse for comparisons."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        parts = x_RD.split(num_tokens_per_expert_E.long().tolist())
        each = zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
        return torch.cat([(torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in each])


def struck() -> Trainer.Config:
    """A config with which each process once computes a NaN in a gradient of step STRUCK."""

    def compute(slots, step, slot, *, check_all):
        _compute(slots, step, slot, check_all=check_all)
        if str(step) == os.environ.get("STRUCK"):  # a process that called `struck` may run other tests
            del os.environ["STRUCK"]
            next(param.grad for param in slots.trainable if param.grad is not None).view(-1)[0] = math.nan

    SlotComputer.compute = compute
    return tiny()


def wide() -> Trainer.Config:
    """A model of 17 million parameters, with which a worker's own state has 136 MB."""
    small_job.DIM, small_job.VOCAB = 512, 8192
    return tiny()


def cold() -> Trainer.Config:
    """A config with which every process compiles everything itself."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    return tiny()


def held() -> Trainer.Config:
    """A config with which group 1, while the file HELD exists, creates HELD with suffix `.reached` before it
    writes to a checkpoint, and then blocks forever, or fails as on a full disk if HELD is not empty."""

    def write(writer, *args, **kwargs):
        held = Path(os.environ.get("HELD", "none"))  # a process that called `held` may run other tests
        if held.exists() and "writing-trainer-1-" in str(writer.path):
            held.with_suffix(".reached").touch()
            if held.read_text():
                raise OSError(errno.ENOSPC, "No space left on device")
            threading.Event().wait()
        return _write(writer, *args, **kwargs)

    FileSystemWriter.write_data = write
    return tiny()


def slow_storage() -> Trainer.Config:
    """A config with which opening a worker's state on storage for writing takes SLOW_WRITE seconds."""

    def open_slowly(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and "/state/workers/" in os.fspath(path):
            time.sleep(float(os.environ["SLOW_WRITE"]))
        return _open(path, flags, *args, **kwargs)

    os.open = open_slowly
    return tiny()
