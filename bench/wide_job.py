"""Configs for `[job] module`: torchtitan's debug Llama 3, widened to a state of a given size (fp32, Adam).

To use one, set `module = "wide_job"` and `config = "half_gigabyte"` in a copy of configs/demo.toml. Then run
`PYTHONPATH=bench python bench/switch.py --config COPY.toml`.
"""

from typing import Any

from torchtitan.models.common import ComplexRoPE, compute_ffn_hidden_dim
from torchtitan.models.llama3 import _build_llama3_layers
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def _widened(dim: int, layers: int) -> Trainer.Config:
    config = llama3_debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    heads = dim // 64
    model.dim = model.norm.normalized_shape = model.lm_head.in_features = model.tok_embeddings.embedding_dim = dim
    model.layers = _build_llama3_layers(
        n_layers=layers,
        dim=dim,
        n_heads=heads,
        hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=256),
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=131072, theta=500000, scaling="llama"),
        attn_backend="flex",
    )
    return config


def tiny() -> Trainer.Config:
    """0.3 million parameters, for the shortest possible steps."""
    return _widened(64, 1)


def half_gigabyte() -> Trainer.Config:
    """43 million parameters."""
    return _widened(512, 12)


def two_gigabytes() -> Trainer.Config:
    """168 million parameters."""
    return _widened(1024, 13)


def four_gigabytes() -> Trainer.Config:
    """344 million parameters."""
    return _widened(1472, 13)
