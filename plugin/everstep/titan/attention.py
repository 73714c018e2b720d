"""Puts the attention check into torchtitan's models.

`apply` has torchtitan call `make_checkable` on a model that was built, before it is parallelized. That turns the
attention's projections and inner attention into instances of subclasses, to which `attach` gives their guards. Without
a guard, and with `attention_check.enable = false`, the model computes as torchtitan's does.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear

from everstep.attention import explicit, fused, operators
from everstep.attention.guard import Checks, Guard
from everstep.attention.linear import linear, result_names
from everstep.attention.masks import Visible
from everstep.attention.section import AttentionCheck
from everstep.titan import cpu, private
from everstep.titan.cpu_attention import MatrixMask, visible_in


class _CheckedProjection:
    """The base of the checked projections: a guard, and the names of their results."""

    guard: Guard | None = None

    def results(self, name: str) -> tuple[str, ...]:
        """Return the names of the checked results."""
        return result_names(name)

    def _checked(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, guard: Guard) -> torch.Tensor:
        """Return x Wᵀ + b, checked."""
        return (operators.linear if torch.compiler.is_compiling() else linear)(x, weight, bias, guard)


class CheckedLinear(_CheckedProjection, Linear):
    """A projection that checks y, dX and dW."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.guard is None:
            return super().forward(input)
        return self._checked(input, self.weight, self.bias, self.guard)


class CheckedScaledBiasRowwiseLinear(_CheckedProjection, ScaledBiasRowwiseLinear):
    """A row-parallel projection with bias that checks y, dX and dW."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.guard is None:
            return super().forward(input)
        weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (self.weight, self.bias))
        return self._checked(input, weight, bias / self.tp_degree, self.guard)


class _CheckedInner:
    """An inner attention that is watched (`fused`), or replaced by attention as matrices (`explicit`). The stock class,
    next in the method resolution order, is the kernel. A subclass says what its masks mean (`_visible`), and sets the
    properties of its kernel."""

    guard: Guard | None = None
    hands_out_lse: Literal["always", "asked", "never"] = "always"
    """When the kernel returns lse, by giving it to an `out_transform`. `asked`: only if the model has an
    `out_transform`, because lse costs extra."""
    wide_sums: bool = False
    """Whether the kernel adds up dK and dV, over all queries and the query heads of a group, in its accumulators."""
    narrow: bool = False
    """Whether the kernel accepts values with fewer columns than the keys have. A second run then takes half as long."""
    reads: torch.dtype | None = None
    """The dtype to which the kernel casts its operands; None: it does not cast. Identities hold for the cast ones."""
    explicit_path: bool = False
    """Whether attention is computed as matrices."""

    def configure(self, section: AttentionCheck) -> None:
        """Choose the path, and adapt the properties of the kernel to this machine. Called before the guard is set."""
        self.explicit_path = section.path == "explicit"
        if getattr(self, "kernel_options", {}).get("BACKEND") == "FLASH":  # accepts certain widths only
            self.narrow = False
        if isinstance(self, FlexAttention | VarlenAttention) and not cpu.has_attention_kernels():  # `cpu_attention`
            self.wide_sums = self.narrow = False
            self.hands_out_lse, self.reads = "asked", None

    def results(self, name: str) -> tuple[str, ...]:
        """Return the names of the results into which faults can be injected."""
        return explicit.RESULTS if self.explicit_path else fused.RESULTS

    def _visible(self, q_BLNH: torch.Tensor, masks: dict[str, Any]) -> Visible:
        """Return the rules of the mask that `masks`, the keyword arguments of the stock forward, describe."""
        raise NotImplementedError

    def kernel(self, mask: torch.Tensor | None, scale: float, with_lse: bool) -> fused.Attend:
        """Return the kernel for a second run; see `guard.Guard.kernel`."""
        assert self.guard is not None
        if mask is None:
            return self._attend({"scale": scale}, with_lse=with_lse)
        known = self.guard.checks.masks.get(mask.data_ptr())
        if known is None:
            raise RuntimeError(
                "attention_check.enable: a compiled layer has a mask that the model was not called with, so its kernel "
                "cannot run again; remove model from compile.components or set attention_check.enable = false."
            )
        return self._attend({"attention_masks": known, "scale": scale}, with_lse=with_lse)

    def _attend(self, given: dict[str, Any], *, with_lse: bool) -> fused.Attend:
        """Return the stock kernel with these keyword arguments."""
        stock: Callable[..., Any] = super().forward  # pyrefly: ignore[missing-attribute] of the class next in line

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            grouped = q.shape[2] != k.shape[2]
            if with_lse:
                return stock(q, k, v, out_transform=lambda out, lse: (out, lse), enable_gqa=grouped, **given)
            return stock(q, k, v, enable_gqa=grouped, **given), None

        return attend

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, out_transform=None, **kwargs):
        """Return what the stock forward returns. The signature is the same."""
        guard = self.guard
        if self.explicit_path:
            visible = self._visible(q_BLNH, kwargs)
            out, lse = explicit.attention(q_BLNH, k_BLNH, v_BLNH, visible, scale=scale, guard=guard)
            return out if out_transform is None else out_transform(out, lse)
        stock: Callable[..., Any] = super().forward  # pyrefly: ignore[missing-attribute] of the class next in line
        if self.hands_out_lse == "never":
            out_transform = None  # the stock forward ignores it too
        if guard is None:
            transform = {} if out_transform is None else {"out_transform": out_transform}
            return stock(q_BLNH, k_BLNH, v_BLNH, scale=scale, **transform, **kwargs)
        kwargs.pop("enable_gqa", None)
        with_lse = self.hands_out_lse == "always" or (self.hands_out_lse == "asked" and out_transform is not None)
        attend = self._attend({**kwargs, "scale": scale}, with_lse=with_lse)
        q, k, v = (x if self.reads is None else x.to(self.reads) for x in (q_BLNH, k_BLNH, v_BLNH))
        plain = kwargs.get("score_mod") is None
        known: dict[str, Any] = {"scale": scale, "guard": guard, "plain_scores": plain, "wide_sums": self.wide_sums}
        if torch.compiler.is_compiling():
            known["mask"] = _told_by(kwargs.get("attention_masks"))
            known["twice"] = plain and kwargs.get("is_causal", True)
            known |= {"hands_out_lse": with_lse, "uses_lse": out_transform is not None}
            out, lse = operators.attention(attend, q, k, v, **known)
        else:
            out, lse = fused.attention(attend, q, k, v, **known)
        out = out.to(q_BLNH.dtype)
        return out if out_transform is None else out_transform(out, lse)


class CheckedFlexAttention(_CheckedInner, FlexAttention):
    """FlexAttention, watched, or replaced by attention as matrices."""

    wide_sums = narrow = True

    def _visible(self, q_BLNH: torch.Tensor, masks: dict[str, Any]) -> Visible:
        if masks.get("score_mod") is not None:
            raise ValueError(
                'attention_check.path = "explicit": this model changes scores by a score_mod, which the '
                'explicit path does not compute; use attention_check.path = "fused".'
            )
        return _seen_by_block_mask(masks["attention_masks"])


class CheckedVarlenAttention(_CheckedInner, VarlenAttention):
    """Variable-length attention, watched, or replaced by attention as matrices."""

    reads = torch.bfloat16

    def _visible(self, q_BLNH: torch.Tensor, masks: dict[str, Any]) -> Visible:
        return visible_in(masks["attention_masks"], q_BLNH.shape[:2], self.window_size)


class CheckedScaledDotProductAttention(_CheckedInner, ScaledDotProductAttention):
    """Scaled dot product attention, watched, or replaced by attention as matrices."""

    hands_out_lse = "never"

    def _visible(self, q_BLNH: torch.Tensor, masks: dict[str, Any]) -> Visible:
        if masks.get("attention_masks") is not None:
            raise ValueError("ScaledDotProductAttention takes no attention_masks, only is_causal.")
        return Visible(causal=masks.get("is_causal", True))


def _told_by(mask: Any) -> torch.Tensor | None:
    """Return a tensor of the mask that identifies it; None for no mask. A graph has no access to the mask object."""
    if isinstance(mask, BlockMask):
        return mask.kv_num_blocks
    return mask.cu_seq_q if isinstance(mask, VarlenMetadata) else None


def _seen_by_block_mask(mask: BlockMask) -> Visible:
    """Return the rules of a BlockMask. Only a `MatrixMask` shows whether it is causal. For other masks, on an
    accelerator, finding out would copy data from the device, so every query goes through all keys."""
    if not isinstance(mask, MatrixMask):
        return Visible(causal=False, mod=mask.mask_mod)
    if mask.seen is None:
        return Visible()
    return Visible(causal=not mask.seen.triu(1).any(), mod=mask.mask_mod)


_CHECKED: dict[Any, type[nn.Module]] = {
    Linear: CheckedLinear,
    ScaledBiasRowwiseLinear: CheckedScaledBiasRowwiseLinear,
    FlexAttention: CheckedFlexAttention,
    VarlenAttention: CheckedVarlenAttention,
    ScaledDotProductAttention: CheckedScaledDotProductAttention,
}
"""torchtitan's modules that can be checked -> their checked counterparts."""


def apply(config: Any, section: AttentionCheck) -> None:
    """Have torchtitan make the model of `config`, a `Trainer.Config`, checkable before it parallelizes the model.

    Call it before the Trainer is made. With `section.enable = false` nothing happens.

    Raises:
        ValueError: the model has no attention, or a part that is of another kind than the plain ones, such as a
            projection that is quantised or fused with a collective; or another setting forbids checks. Names the key.
    """
    if not section.enable:
        return
    spec = config.model_spec
    attentions = [attention for _, attention, _, _ in spec.model.traverse(BaseAttention.Config)]
    if not attentions:
        raise ValueError(f"attention_check.enable: model {spec.name} has no attention; set it to false.")
    kinds = {type(attention.inner_attention) for attention in attentions}
    kinds |= {type(linear) for attention in attentions for _, linear, _, _ in attention.traverse(Linear.Config)}
    if unknown := sorted(kind.__qualname__ for kind in kinds - {module.Config for module in _CHECKED}):
        raise ValueError(f"attention_check.enable: {', '.join(unknown)} cannot be checked; set it to false.")
    _refuse(config)
    compiled = config.compile.enable and "model" in config.compile.components
    if compiled and section.path == "explicit":
        raise ValueError(
            'attention_check.path = "explicit": cannot be compiled; use attention_check.path = "fused" or remove '
            "model from compile.components."
        )
    if compiled:  # selective activation checkpointing keeps the results of plain projections, so also of checked ones
        private.keep_in_checkpointing(torch.ops.everstep.project.default)
    spec.parallelize_fn = functools.partial(_parallelize_checkable, spec.parallelize_fn)


def _parallelize_checkable(parallelize: Callable[..., nn.Module], model: nn.Module, **settings: Any) -> nn.Module:
    make_checkable(model)
    return parallelize(model, **settings)


def make_checkable(model: nn.Module) -> None:
    """Turn plain projections and kernels inside a model's attention into checked ones, still without guards."""
    for module in list(_of_attention(model).values()):
        module.__class__ = _CHECKED.get(type(module), type(module))


def _refuse(config: Any) -> None:
    """Raise ValueError if a setting would make checks wrong or silent."""
    parallelism = config.parallelism
    for is_set, why in (
        (
            torch.accelerator.is_available() and not config.training.disable_cuda_graphs,
            "a recorded graph runs the same kernels in every slot, but checks run in some slots only; set "
            "training.disable_cuda_graphs = true.",
        ),
        (
            parallelism.context_parallel_degree > 1,
            "parallelism.context_parallel_degree > 1 is not supported: the gradient of a key is a sum over the queries "
            "of all ranks, and the checks compare sums on one rank.",
        ),
        (
            parallelism.pipeline_parallel_degree > 1,
            "parallelism.pipeline_parallel_degree > 1 is not supported: a pipeline schedule runs several microbatches "
            "at once, and the checks of a layer can follow only one.",
        ),
        (
            parallelism.tensor_parallel_degree > 1 and parallelism.spmd_backend != "spmd_types",
            "parallelism.tensor_parallel_degree > 1 needs parallelism.spmd_backend = "
            f'"spmd_types", not "{parallelism.spmd_backend}".',
        ),
        (parallelism.spmd_backend == "full_dtensor", 'parallelism.spmd_backend = "full_dtensor" is not supported.'),
        (
            config.debug.spmd_typechecking,
            "debug.spmd_typechecking = true is not supported: the sums of the checks have no SPMD type.",
        ),
    ):
        if is_set:
            raise ValueError(f"attention_check.enable: {why}")


def _of_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules of a model that should be guarded: each linear layer and each kernel inside a
    torchtitan attention, and each module whose class is named like an attention of another kind."""
    found: dict[str, nn.Module] = {}
    within: list[str] = []
    for fqn, module in model.named_modules():
        inside = any(fqn.startswith(prefix) for prefix in within)
        if isinstance(module, BaseAttention):
            within.append(f"{fqn}.")
        elif isinstance(module, FlexAttention | VarlenAttention | ScaledDotProductAttention) or (
            isinstance(module, nn.Linear) if inside else re.search(r"Attention$|DeltaNet$", type(module).__name__)
        ):
            found[fqn] = module
    return found


def coverage(model_parts: Iterable[nn.Module]) -> tuple[str, list[str]]:
    """Return how much of these models' attention is checkable ("12 of 12"), and the names of the modules that are not.
    See `_of_attention`."""
    parts = [item for part in model_parts for item in _of_attention(part).items()]
    missing = [fqn for fqn, module in parts if not isinstance(module, (_CheckedProjection, _CheckedInner))]
    return f"{len(parts) - len(missing)} of {len(parts)}", missing


def _remember_masks(checks: Checks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep a model's masks, before its forward, for the second runs of kernels outside of its compiled blocks."""
    given = [*args, *kwargs.values()]
    masks = [mask for one in given for mask in (one.values() if isinstance(one, dict) else [one])]
    told = ((_told_by(mask), mask) for mask in masks)
    checks.masks = {tensor.data_ptr(): mask for tensor, mask in told if tensor is not None}


def attach(model_parts: Iterable[nn.Module], section: AttentionCheck, *, rank: int = 0, seed: int = 0) -> Checks:
    """Give the checked modules of a built model their guards.

    Args:
        model_parts: as the Trainer holds them, parallelized or not.
        rank: this rank in its group, named in findings.
        seed: the layers to check are drawn from it.

    Returns:
        The checks, which the training step calls before and after it computes a slot.

    Raises:
        ValueError: a part of the attention would not be checked, because `apply` was called after the model was built,
            or because `apply` does not know this kind of attention; or no result matches the fault to inject.
    """
    checks = Checks(section, rank=rank, seed=seed)
    model_parts = list(model_parts)
    checks.coverage, missing = coverage(model_parts)
    if missing:
        raise ValueError(
            f"attention_check.enable: only {checks.coverage} parts of this model's attention can be checked, but not "
            f"{', '.join(missing[:3])}; set attention_check.enable = false."
        )
    for part in model_parts:
        part.register_forward_pre_hook(functools.partial(_remember_masks, checks), with_kwargs=True)
        for fqn, module in part.named_modules():
            if isinstance(module, _CheckedInner):
                module.configure(section)
            if isinstance(module, (_CheckedProjection, _CheckedInner)):
                layer = re.search(r"\b(mtp_)?layers\.(\d+)\.", fqn)
                name = fqn.rsplit(".", 1)[-1]
                number = int(layer.group(2)) if layer else -1
                if layer and layer.group(1):  # layers that predict further tokens get the numbers after the others
                    number += len(list(part.get_submodule("layers").children()))
                module.guard = checks.guard(number, name, module.results(name))
                if isinstance(module, _CheckedInner):
                    module.guard.kernel, module.guard.narrow = module.kernel, module.narrow
    if section.inject.kind and not checks.injector.places:
        raise ValueError(
            f'attention_check.inject.section = "{section.inject.section}": the {section.path} path has no such result.'
        )
    return checks
