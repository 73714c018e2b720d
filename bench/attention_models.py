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

from everstep.attention.section import AttentionCheck  # noqa: E402
from everstep.titan import attention  # noqa: E402

MODELS = {
    "llama3": lambda: llama3.model_registry("debugmodel"),
    "qwen3": lambda: qwen3.model_registry("debugmodel"),
    "qwen3_moe": lambda: qwen3.model_registry("debugmodel_moe"),
    "deepseek_v3 with MTP": lambda: deepseek_v3.model_registry("debugmodel", num_mtp_layers=1),
    "gpt_oss": lambda: gpt_oss.model_registry("debugmodel", attn_backend="flex"),
    "llama3, saturated": lambda: llama3.model_registry("debugmodel"),
}


def build(name: str, path: str, length: int, dtype: torch.dtype, draw: random.Random):
    """A checked model with weights of some kind, and its checks."""
    spec = MODELS[name]()
    spec.model.layers = spec.model.layers[:2]
    if path == "fused":
        cpu.use_plain_attention(spec.model)
    section = AttentionCheck(enable=True, frequency=1.0, mode="detect", path=path)
    training = TrainingConfig(seq_len=length, local_batch_size=1, disable_cuda_graphs=True)
    config = Trainer.Config(model_spec=spec, training=training)
    attention.apply(config, section)
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        trained = draw.random() < 0.6
        for fqn, parameter in model.named_parameters():
            if trained and "attention" in fqn and parameter.dim() == 2:
                parameter.mul_(torch.exp(0.7 * torch.randn(parameter.shape[0], 1)))
            if trained and fqn.endswith("tok_embeddings.weight"):
                channels = torch.randperm(parameter.shape[1])[:3]
                parameter[:, channels] *= torch.tensor([1000.0, 200.0, 50.0])
            if name.endswith("saturated") and fqn.endswith("wqkv.weight"):
                parameter.mul_(8.0)
    model = model.to(dtype)
    return spec, model, attention.attach([model], section)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--each", type=int, default=5, help="runs of one model as it was built")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    titan_attention._compiled_create_block_mask = create_block_mask
    draw = random.Random(args.seed)
    runs, alarms, leavers = Counter(), Counter(), Counter()
    while sum(runs.values()) < args.runs:
        name = list(MODELS)[len(runs) % len(MODELS)] if len(runs) < len(MODELS) else draw.choice(list(MODELS))
        path = "explicit" if name == "gpt_oss" or draw.random() < 0.2 else "fused"
        length, dtype = draw.choice((64, 128, 256)), draw.choice((torch.float32, torch.bfloat16))
        torch.manual_seed(draw.randrange(2**31))
        spec, model, checks = build(name, path, length, dtype, draw)
        for step in range(1, args.each + 1):
            tokens = torch.randint(0, spec.model.vocab_size, (1, length))
            positions = torch.arange(length).expand(1, -1)
            masks = model.get_attention_masks(positions=positions) if path == "explicit" else None
            checks.begin(step, 0)
            x = model.tok_embeddings(tokens)
            for block in (*model.layers.values(), *(getattr(model, "mtp_layers", None) or ())):
                mask = masks[draw.choice(list(masks))] if isinstance(masks, dict) else masks
                x = x + block.attention(block.attention_norm(x), mask, positions)
            scale = draw.choice((1.0, 1.0, 1e-3, 1e-20))
            loss = (x.float() * torch.randn(x.shape) * torch.exp(torch.randn(length, 1))).mean()
            (loss * scale).backward()
            model.zero_grad()
            if not math.isfinite(loss.item()):
                checks.refused()
                continue
            runs[name] += 1
            if checks.refused():
                alarms[name] += 1
                print("ALARM", name, path, length, dtype, scale, checks.drain()[:2], file=sys.stderr, flush=True)
            leavers[name] += checks.judge(0, alone=True).reason != ""
    print(json.dumps({"runs": runs, "alarms": sum(alarms.values()), "evictions": sum(leavers.values())}))


if __name__ == "__main__":
    main()
