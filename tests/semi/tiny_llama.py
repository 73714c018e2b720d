"""A registry with Llamas of 0.2 and 0.3 million parameters, for `[job] module = "tiny_llama"`."""

from torchtitan.models import llama3
from torchtitan.models.llama3 import ComplexRoPE
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

DIM, HEADS, VOCAB = 64, 4, 512


def tiny() -> Trainer.Config:
    return _llama(2)


def tiny_4() -> Trainer.Config:
    return _llama(4)


def _llama(layers: int) -> Trainer.Config:
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.dim, model.vocab_size = DIM, VOCAB
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCAB, DIM
    model.norm.normalized_shape = DIM
    model.lm_head.in_features, model.lm_head.out_features = DIM, VOCAB
    model.lm_head.param_init = llama3._output_linear_init(DIM)
    model.layers = llama3._build_llama3_layers(
        fuse_qkv=True,
        n_layers=layers,
        dim=DIM,
        n_heads=HEADS,
        hidden_dim=4 * DIM,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=1024, theta=500000),
        attn_backend="flex",
    )
    config.loss.loss_fn.global_vocab_size = VOCAB
    return config
