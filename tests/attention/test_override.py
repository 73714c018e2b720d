"""Tests of torchtitan's models with checked attention, built and run as torchtitan does."""

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._debug_mode import DebugMode

from attention_extremes import OneShot
from everstep.titan import cpu, cpu_attention

if not cpu.has_accelerator():
    cpu.stand_in()

from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common import attention as common_attention
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention, VarlenMetadata
from torchtitan.trainer import Trainer

from everstep.attention import compiled
from everstep.attention.injection import Fault
from everstep.attention.section import AttentionCheck, Inject
from everstep.titan import attention as override


def registered(name, layers, backend="flex"):
    """Return torchtitan's debug model with `layers` layers, and with windows of 16 tokens if it has windows."""
    spec = MODELS[name].model_registry("debugmodel", attn_backend=backend)
    del spec.model.layers[layers:]
    for layer in spec.model.layers:
        if getattr(layer.attention, "sliding_window_size", None) is not None:
            layer.attention.sliding_window_size = 16
            if hasattr(layer.attention.inner_attention, "window_size"):
                layer.attention.inner_attention.window_size = (15, 0)
    return spec


MODELS = {"llama3": llama3, "qwen3": qwen3, "gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3}
L = 64
STOCK_FLEX = FlexAttention.forward


def trainer_config(spec, **sections) -> Trainer.Config:
    training = TrainingConfig(seq_len=L, local_batch_size=2, disable_cuda_graphs=True)
    return Trainer.Config(model_spec=spec, training=training, **sections)


def plain_sdpa(layers):
    """Return a Llama with `layers` layers and PyTorch's own attention."""
    spec = registered("llama3", layers)
    for _, _, parent, field in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, field, ScaledDotProductAttention.Config())
    return spec


def build(spec, section=None, checkpointing=None):
    """Return a model, built in the trainer's order, and its checks if a section is given."""
    config = trainer_config(spec)
    cpu_attention.prepare(config)
    if section is not None:
        override.apply(config, section)
    model = built(spec, config, checked=section is not None and section.enable)
    if checkpointing is not None:
        checkpointing.build(dump_folder="").apply(model)
    checks = override.attach([model], section) if section is not None and section.enable else None
    if checks is not None:
        checks.injector = OneShot()
    return model, checks


def built(spec, config, checked=False):
    spec.model.update_from_config(config=config)
    torch.manual_seed(0)
    model = spec.model.build()
    if checked:
        override.make_checkable(model)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def logits_and_gradients(model, spec):
    torch.manual_seed(1)
    tokens = torch.randint(0, spec.model.vocab_size, (2, L))
    positions = torch.cat([torch.arange(40), torch.arange(L - 40)]).expand(2, -1).contiguous()
    logits = model(tokens, positions=positions, attention_masks=None)
    logits.float().square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), gradients


def attention_of(model, x, positions, checks=None):
    """Return the outputs of the first two layers' attention to x under the model's own masks, and x's gradient."""
    masks = model.get_attention_masks(positions=positions)
    if checks is not None:
        checks.begin(1, 0)
    outs = []
    for layer in ("0", "1"):
        attention = model.layers[layer].attention
        if (kept := getattr(attention, "sinks", None)) is not None:
            torch.nn.init.normal_(kept, generator=torch.Generator().manual_seed(2))
        mask = masks[model.layers[layer].attn_mask_key] if isinstance(masks, dict) else masks
        outs.append(attention(x, mask, positions))
    (gradient,) = torch.autograd.grad(sum(out.square().sum() for out in outs), x) if x.requires_grad else (None,)
    assert checks is None or not checks.refused()
    return torch.stack(outs).detach(), gradient


@pytest.mark.parametrize("name", ["llama3", "gpt_oss", "deepseek_v3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_model_has_one_mask_on_every_path_and_with_every_kernel(name, monkeypatch):
    """Rows have several documents, and models sliding windows, sinks or latent attention. Compared are torch's own
    FlexAttention, which has no backward on a CPU, its replacement there, and both paths of the check."""
    positions = torch.stack([torch.cat([torch.arange(40), torch.arange(L - 40)]), torch.arange(L) % 23])
    monkeypatch.setattr(common_attention, "_compiled_create_block_mask", create_block_mask)
    monkeypatch.setattr(context_parallel, "_compiled_create_block_mask", create_block_mask)
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(FlexAttention, "forward", STOCK_FLEX)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    spec = registered(name, 2)
    stock = built(spec, trainer_config(spec))
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, *args, **more: tensor)  # they get stock's
    state = stock.state_dict()
    x = torch.randn(2, L, spec.model.dim, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, _ = attention_of(stock, x, positions)
        alone, _ = attention_of(stock, x[:, :40], positions[:, :40])
    torch.testing.assert_close(alone, expected[:, :, :40])
    x.requires_grad_()
    slopes = []
    for backend in ("flex", "varlen"):
        for path in ("", "fused", "explicit"):
            section = AttentionCheck(enable=True, frequency=1.0, path=path) if path else None
            model, checks = build(registered(name, 2, backend), section)
            model.load_state_dict(state)
            out, slope = attention_of(model, x, positions, checks)
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
            slopes.append(slope)
    for slope in slopes[1:]:
        torch.testing.assert_close(slope, slopes[0], rtol=1e-6, atol=1e-6 * slopes[0].abs().max().item())


def test_a_window_to_the_left_and_to_the_right_shows_just_that_of_a_document():
    starts = torch.tensor([0, 40, 64, 70, 2 * L])
    documents = [[0] * 40 + [1] * 24, [2] * 6 + [3] * 58]
    for window in [(-1, 0), (5, 0), (-1, -1), (3, 5), (-1, 5)]:
        inner = override.CheckedVarlenAttention(VarlenAttention.Config(window_size=window))
        visible = inner._visible(torch.zeros(2, L, 1, 8), {"attention_masks": VarlenMetadata(starts, starts, 40, 40)})
        seen = visible.block(0, L, 0, L, batch=2, heads=1, device=starts.device)
        back, ahead = (2 * L if size < 0 else size for size in window)
        expected = [
            [[ids[i] == ids[j] and i - back <= j <= i + ahead for j in range(L)] for i in range(L)] for ids in documents
        ]
        assert seen.squeeze(1).equal(torch.tensor(expected)), window


@pytest.mark.parametrize("checkpointing", [None, FullAC.Config(), SelectiveAC.Config()], ids=["none", "full", "some"])
@pytest.mark.parametrize("section", ["wqkv.y", "scores", "wqkv.dw", "dq"])
def test_a_nan_is_repaired_and_found_once_with_and_without_checkpointing(checkpointing, section):
    spec = plain_sdpa(3)
    model, checks = build(spec, AttentionCheck(enable=True, frequency=1.0, path="explicit"), checkpointing)
    checks.begin(1, 0)
    logits, gradients = logits_and_gradients(model, spec)
    checks.begin(2, 0)
    checks.injector.aim = 2, section, Fault("nan", 0.01)
    hit_logits, hit_gradients = logits_and_gradients(model, spec)
    assert not checks.refused()
    assert [(f["layer"], f["section"]) for f in checks.findings.drain()] == [(2, section)]
    torch.testing.assert_close(hit_logits, logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(hit_gradients[name], gradient, rtol=1e-3, atol=1e-6)


def test_switched_off_the_model_is_torchtitans_own():
    """It has the same modules, and the same operations on the same shapes, so it takes the same memory."""
    spec, stock_spec = (plain_sdpa(2) for _ in range(2))
    parallelize, config = spec.parallelize_fn, trainer_config(spec)
    override.apply(config, AttentionCheck(enable=False))
    assert spec.parallelize_fn is parallelize
    model, checks = build(spec, AttentionCheck(enable=False))
    stock, _ = build(stock_spec)
    assert checks is None
    assert [(name, type(m)) for name, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    assert {type(m).__module__.split(".")[0] for m in model.modules()} <= {"torchtitan", "torch"}
    made = []
    for each in (model, stock):
        with DebugMode() as operations:
            logits_and_gradients(each, spec)
        made.append(operations.debug_string())
    assert made[0] == made[1]
    assert made[0].count("\n") > 100


def test_recorded_cuda_graphs_are_refused_by_their_key(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = trainer_config(registered("llama3", 1))
    override.apply(config, AttentionCheck(enable=True))
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match=r"training\.disable_cuda_graphs = true"):
        override.apply(config, AttentionCheck(enable=True))


def test_a_partly_covered_model_is_refused_and_the_missing_part_is_named():
    spec = plain_sdpa(6)
    model, _ = build(spec, AttentionCheck(enable=True))
    model.layers["3"].attention.wo = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"17 of 18 .*layers\.3\.attention\.wo"):
        override.attach([model], AttentionCheck(enable=True))


def test_a_fault_for_a_result_that_this_path_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r'inject\.section = "scores": the fused path has no such result'):
        build(plain_sdpa(1), AttentionCheck(enable=True, inject=Inject(kind="nan", section="scores")))


@pytest.mark.parametrize("checkpointing", [None, SelectiveAC.Config()], ids=["none", "selective"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_checked_as_an_eager_one(backend, checkpointing, monkeypatch):
    """The same faults are found in the same places, and without faults the results are those of the eager model."""
    torch._dynamo.reset()
    if backend != "inductor":  # nor does it compile what checks do
        monkeypatch.setattr(compiled, "_compiled", lambda function: function)
    found, results = [], []
    for compiler in (None, backend):
        torch.manual_seed(0)
        spec = plain_sdpa(2)
        model, checks = build(spec, AttentionCheck(enable=True, frequency=1.0, path="fused"), checkpointing)
        for block in model.layers.values() if compiler else ():
            block.compile(backend=compiler, fullgraph=True)
        aimed = []
        for step, section in enumerate(("wqkv.y", "wo.dx", "wqkv.dw", "context", "dq", ""), 1):
            checks.begin(step, 0)
            checks.injector.aim = (1, section, Fault("nan", 0.3)) if section else None
            results.append(logits_and_gradients(model, spec))
            refused = checks.refused()
            aimed.append((section, refused, [(f["layer"], f["section"], f["kind"]) for f in checks.findings.drain()]))
        found.append(aimed)
    eager, in_graphs = found
    for (section, refused, where), (_, refused_too, where_too) in zip(eager, in_graphs, strict=True):
        assert (refused, where) == (refused_too, where_too), section
        assert bool(where) == bool(section)
    for a, b in zip(results[5][1].values(), results[11][1].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(results[5][0], results[11][0], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()
