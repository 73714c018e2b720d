"""One of two ranks that train a checked debug model under FSDP with bfloat16 parameters; see test_ranks."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parent))

from everstep.attention import linear as checked
from everstep.attention.injection import Fault
from everstep.attention.section import AttentionCheck
from test_override import MODELS, aim, build, first, logits_and_gradients, plain_sdpa

HITS = ("wqkv.y", "wo.dx", "wqkv.dw")


def main(told: Path) -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    spec = first(3, plain_sdpa(MODELS["llama3"]()))
    model, checks = build(spec, AttentionCheck(enable=True, frequency=1.0))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    seen: set[str] = set()
    plain = checked.tile_sums

    def noting(b: torch.Tensor):
        seen.add(str(b.dtype))
        return plain(b)

    checked.tile_sums = noting
    checks.begin(1, 0)
    _, expected = logits_and_gradients(model, spec, masked=False)
    refused, findings, worst = bool(checks.refused()), checks.drain(), 0.0
    for step, section in enumerate(HITS, start=2):
        checks.begin(step, 0)
        if rank == 1:
            aim(checks, section, Fault("nan", 0.3))
        _, gradients = logits_and_gradients(model, spec, masked=False)
        refused |= bool(checks.refused())
        findings += checks.drain()
        for name, gradient in gradients.items():
            a, b = gradient.to_local(), expected[name].to_local()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.numel() else 0.0)
    told.write_text(
        json.dumps(
            {
                "findings": [(f["section"], f["action"]) for f in findings],
                "hits": HITS,
                "refused": refused,
                "dtypes": sorted(seen),
                "difference": worst,
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
