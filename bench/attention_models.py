"""False alarms on clean data of real models: every check on, forward and backward, many seeds.

    python bench/attention_models.py --runs 5000

torchtitan's debug models (two layers each, and the layers that predict further tokens), freshly initialised or made to
look trained: three channels of the embedding times 1000, 200 and 50, rows of weights whose sizes differ by e, scores
times 8 (a saturated softmax), and gradients times 1e-20, each by chance. What is between the attentions is left out.
fp32 and bf16; 64 to 256 tokens; fused and explicit path.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter

import torch

from everstep.titan import cpu

cpu.stand_in()

from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3  # noqa: E402
from torchtitan.models.common import attention as titan_attention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from everstep.attention.evidence import Verdict  # noqa: E402
from everstep.attention.section import AttentionCheck  # noqa: E402
from everstep.titan import attention  # noqa: E402

LENGTHS = (64, 128, 256)

MODELS = {
    "llama3": lambda: llama3.model_registry("debugmodel"),
    "qwen3": lambda: qwen3.model_registry("debugmodel"),
    "qwen3_moe": lambda: qwen3.model_registry("debugmodel_moe"),
    "deepseek_v3 with MTP": lambda: deepseek_v3.model_registry("debugmodel", num_mtp_layers=1),
    "gpt_oss": lambda: gpt_oss.model_registry("debugmodel", attn_backend="flex"),
    "llama3, saturated": lambda: llama3.model_registry("debugmodel"),
}


def build(name: str, path: str, dtype: torch.dtype):
    """A checked model, and its checks."""
    spec = MODELS[name]()
    spec.model.layers = spec.model.layers[:2]
    if path == "fused":
        cpu.use_plain_attention(spec.model)
    section = AttentionCheck(enable=True, frequency=1.0, mode="detect", path=path)
    training = TrainingConfig(seq_len=max(LENGTHS), local_batch_size=1, disable_cuda_graphs=True)
    config = Trainer.Config(model_spec=spec, training=training)
    attention.apply(config, section)
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    for parameter in model.parameters():  # buffers, as RoPE's complex ones, stay
        parameter.data = parameter.data.to(dtype)
    return model, attention.attach([model], section)


def blocks_of(model) -> list:
    """The layers, those that predict further tokens included."""
    return [*model.layers.values(), *(getattr(model, "mtp_layers", None) or ())]


@torch.no_grad()
def draw_weights(model, name: str, draw: random.Random) -> None:
    """Other weights of what is run: as initialised, or as trained by chance."""
    parts = [
        model.tok_embeddings,
        *(part for block in blocks_of(model) for part in (block.attention_norm, block.attention)),
    ]
    trained = draw.random() < 0.6
    for part in parts:
        part.init_states(buffer_device=torch.device("cpu"))
        for fqn, parameter in part.named_parameters():
            if trained and part is not model.tok_embeddings and parameter.dim() == 2:
                parameter.mul_(torch.exp(0.7 * torch.randn(parameter.shape[0], 1)))
            if trained and part is model.tok_embeddings:
                channels = torch.randperm(parameter.shape[1])[:3]
                parameter[:, channels] *= torch.tensor([1000.0, 200.0, 50.0]).to(parameter.dtype)
            if name.endswith("saturated") and fqn.endswith("wqkv.weight"):
                parameter.mul_(8.0)


def run(model, checks, length: int, step: int, path: str, draw: random.Random) -> tuple[float, float]:
    """One forward and backward of every attention; the loss and what its gradient is scaled by."""
    tokens = torch.randint(0, model.tok_embeddings.weight.shape[0], (1, length))
    positions = torch.arange(length).expand(1, -1)
    masks = model.get_attention_masks(positions=positions) if path == "explicit" else None
    checks.begin(step, 0)
    x = model.tok_embeddings(tokens)
    for block in blocks_of(model):
        mask = masks[draw.choice(list(masks))] if isinstance(masks, dict) else masks
        x = x + block.attention(block.attention_norm(x), mask, positions)
    scale = draw.choice((1.0, 1.0, 1e-3, 1e-20))
    loss = (x.float() * torch.randn(x.shape) * torch.exp(torch.randn(length, 1))).mean()
    (loss * scale).backward()
    model.zero_grad()
    return loss.item(), scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--each", type=int, default=5, help="runs of one model with the same weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    titan_attention._compiled_create_block_mask = create_block_mask
    draw = random.Random(args.seed)
    built: dict[tuple, tuple] = {}
    runs, kinds, told, step = Counter(), Counter(), 0, 0
    alarms = evictions = not_finite = 0

    def tell() -> None:
        counts = {"runs": runs.total(), "alarms": alarms, "evictions": evictions, "not_finite": not_finite}
        print(json.dumps({**counts, "by_model": runs, "by_kind": kinds}), flush=True)

    while runs.total() < args.runs:
        name = list(MODELS)[len(runs) % len(MODELS)] if len(runs) < len(MODELS) else draw.choice(list(MODELS))
        path = "explicit" if name == "gpt_oss" or draw.random() < 0.2 else "fused"
        length, dtype = draw.choice(LENGTHS), draw.choice((torch.float32, torch.bfloat16))
        torch.manual_seed(draw.randrange(2**31))
        key = name, path, dtype
        if key not in built:
            built[key] = build(*key)
        model, checks = built[key]
        draw_weights(model, name, draw)
        checks.weights_changed()
        for _ in range(min(args.each, args.runs - runs.total())):
            step += 1
            before = draw.getstate(), torch.get_rng_state()
            loss, scale = run(model, checks, length, step, path, draw)
            refused = checks.refused()
            if not math.isfinite(loss):
                not_finite += 1
                continue
            runs[name] += 1
            kinds[f"{path}, {str(dtype)[6:]}, {length}"] += 1
            if refused:
                alarms += 1
                findings = checks.drain()[:2]
                print("ALARM", step, name, path, length, dtype, scale, findings, file=sys.stderr, flush=True)
                while (judged := checks.judge(0, alone=True)).verdict is Verdict.AGAIN:  # as a run of one group does
                    draw.setstate(before[0])
                    torch.set_rng_state(before[1])
                    run(model, checks, length, step, path, draw)
                    if not checks.refused():
                        break
                evictions += judged.leaves
                built[key] = model, checks = build(*key)  # the judgement may have widened a bound
                draw_weights(model, name, draw)
        if runs.total() // 100 > told:
            told = runs.total() // 100
            tell()
    tell()


if __name__ == "__main__":
    main()
