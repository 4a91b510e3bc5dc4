"""How the layers of a model are cut for tensor parallelism, by family, as data.

A plan gives modules a part: `column` and `row` are the two halves of a pair of linear layers (one
sum over ranks a pair), `embedding` and `output` cut the vocabulary, `heads` are norms of single
heads (whose gradient is a sum over the ranks' heads), `norm` the others, `block` what reads the
whole sequence where the rest holds parts of it (as attention if its name begins so). Of a mixture,
`experts` are dealt out, `mixture` is the block around them, which adds up what they make, and
`whole` is its router. Adapters add `summed` and `spread`: see `lora.cut_plan`.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3; Korthikanti et al. 2022
(sequence parallelism), arXiv:2205.05198, section 4.2.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from minirl.backends.dtensor.experts import Share
from minirl.backends.dtensor.optim import imported
from minirl.config.megatron_fit import num_experts

Given: TypeAlias = Literal[
    "column",
    "row",
    "embedding",
    "output",
    "heads",
    "norm",
    "block",
    "experts",
    "mixture",
    "whole",
]
"""What a plan may say."""
Part: TypeAlias = Given | Literal["summed", "spread"]
Plan: TypeAlias = Mapping[str, Part]

LAYER = "model.layers.*."
LLAMA: Plan = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "output",
    f"{LAYER}input_layernorm": "norm",
    f"{LAYER}post_attention_layernorm": "norm",
    f"{LAYER}self_attn": "block",
    f"{LAYER}self_attn.q_proj": "column",
    f"{LAYER}self_attn.k_proj": "column",
    f"{LAYER}self_attn.v_proj": "column",
    f"{LAYER}self_attn.o_proj": "row",
    f"{LAYER}mlp": "block",
    f"{LAYER}mlp.gate_proj": "column",
    f"{LAYER}mlp.up_proj": "column",
    f"{LAYER}mlp.down_proj": "row",
}
QWEN3: Plan = {
    **LLAMA,
    f"{LAYER}self_attn.q_norm": "heads",
    f"{LAYER}self_attn.k_norm": "heads",
}
GEMMA3: Plan = {
    **QWEN3,
    f"{LAYER}pre_feedforward_layernorm": "norm",
    f"{LAYER}post_feedforward_layernorm": "norm",
}
QWEN3_MOE: Plan = {
    **{name: part for name, part in QWEN3.items() if ".mlp" not in name},
    f"{LAYER}mlp": "mixture",
    f"{LAYER}mlp.gate": "whole",
    f"{LAYER}mlp.experts": "experts",
}
"""Every layer a mixture."""
WORDS: dict[str, Part] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "heads",
}
"""Our parts, by transformers' names. What gathers or splits inside a pair is not among them."""
PLANS: dict[str, Plan] = {
    **{"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA},
    **{"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "gemma3_text": GEMMA3},
}
"""By `model_type` of the Hugging Face config."""


def find_plan(model_type: str, custom: str | None) -> Plan:
    """The plan at the import path `custom` (`package.module:NAME`), else the family's.

    A family that has none here gets Hugging Face's own plan of its linear layers.

    Raises:
        ValueError: the path leads to no plan, or the family has none that is understood here.
    """
    key = "policy.dtensor_cfg.custom_parallel_plan"
    if custom is None:
        known = PLANS.get(model_type) or _hugging_face_plan(model_type)
        if known is not None:
            return known
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size: models of type {model_type!r} have no plan "
            f"here ({sorted(PLANS)}), nor one of Hugging Face's that is understood; write one and "
            f"name it by {key}, or use megatron_cfg"
        )
    module, _, name = custom.partition(":")
    plan = imported(module, name, key) if module and name else None
    parts = get_args(Given)
    if isinstance(plan, Mapping) and all(part in parts for part in cast("Plan", plan).values()):
        return cast("Plan", plan)
    raise ValueError(
        f"{key}: {custom!r} names no plan: give package.module:NAME of a mapping from module names "
        f"(with * for a number) to one of {parts}"
    )


def _hugging_face_plan(model_type: str) -> Plan | None:
    """The plan in transformers' config of the family, if all of it can be said in our parts.

    It names linear layers and norms of heads; `whole_parts` adds what it leaves out.
    """
    from transformers import AutoConfig

    try:
        config = cast(Any, AutoConfig).for_model(model_type)
    except ValueError:
        return None
    theirs = cast("dict[str, str]", config.base_model_tp_plan or {})
    if not theirs or not set(theirs.values()) <= WORDS.keys():
        return None
    layers: dict[str, Part] = {f"model.{name}": WORDS[word] for name, word in theirs.items()}
    return {**layers, "model.embed_tokens": "embedding", "lm_head": "output"}


def whole_parts(model: Any, plan: Plan) -> dict[str, Part]:
    """Modules with parameters of their own that `plan` leaves out: each rank computes them."""
    found: dict[str, Part] = {}
    for name, module in model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        adapted = "lora_" in name or name.endswith(".base_layer")  # by its layer's name, later
        if pattern not in plan and not adapted and dict(module.named_parameters(recurse=False)):
            found[pattern] = "norm"
    return found


def styles(plan: Plan, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The plan in torch's terms."""
    stream = Shard(1) if sequence_parallel else Replicate()
    found: dict[Part, ParallelStyle] = {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=stream, use_local_output=not sequence_parallel),
        "embedding": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=stream,
            use_local_output=not sequence_parallel,
        ),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1)),
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
        "norm": SequenceParallel() if sequence_parallel else Whole(),
        "experts": Share(),
        "mixture": PrepareModuleInputOutput(
            input_layouts=stream,
            desired_input_layouts=Replicate(),
            output_layouts=Partial(),
            desired_output_layouts=stream,
            use_local_output=not sequence_parallel,
        ),
        "summed": RowwiseParallel(),
        "whole": Whole(),
        "spread": Whole(stream if sequence_parallel else None),
    }
    gathered: Any = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
    by_name: Any = {
        "input_kwarg_layouts": {"hidden_states": Shard(1)},
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()},
    }
    result: dict[str, ParallelStyle] = {}
    for name, part in plan.items():
        if part != "block":
            result[name] = found[part]
        elif sequence_parallel:
            attention = name.rpartition(".")[2].startswith(("self_attn", "attention"))
            result[name] = PrepareModuleInput(**(by_name if attention else gathered))
    return result


class Whole(ParallelStyle):
    """A module that every rank computes in full, with its parameters as replicated DTensors.

    It gives plain tensors, or, with `output`, a DTensor that is placed like that.
    """

    def __init__(self, output: Placement | None = None) -> None:
        """Keeps what is given."""
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(part.named_parameters(recurse=False)):
                whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                kept = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                part.register_parameter(key, kept)

        def enter(part: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            if isinstance(inputs[0], DTensor):
                return inputs[0].redistribute(placements=[Replicate()])
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def leave(part: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            if isinstance(output, tuple):
                return tuple(leave(part, x, mesh) for x in cast("tuple[DTensor, ...]", output))
            if self.output is not None:
                return output.redistribute(placements=[self.output])
            return output.to_local(grad_placements=[Replicate()])

        untyped: Any = distribute_module
        return cast(nn.Module, untyped(module, device_mesh, replicate, enter, leave))


def tie_again(model: Any) -> None:
    """One parameter for input and output embeddings, where the model had one."""
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def unplanned(model: nn.Module) -> list[str]:
    """Parameters that no part of the plan reached."""
    return [n for n, p in model.named_parameters() if not isinstance(p, DTensor) and p.numel()]


def check_heads(model: Mapping[str, Any], size: int) -> None:
    """Refuses a model, by its Hugging Face config, whose heads or experts cannot be dealt out.

    Raises:
        ValueError: names the numbers and what divides them.
    """
    heads = model["num_attention_heads"]
    facts = {
        "attention heads": heads,
        "key-value heads": model.get("num_key_value_heads") or heads,
    }
    if num_experts(model):
        facts["experts"] = num_experts(model)
    if has_dense_layers(model):
        facts["columns of the feed-forward layers"] = model["intermediate_size"]
    for name, number in facts.items():
        if number % size:
            raise ValueError(
                f"policy.dtensor_cfg.tensor_parallel_size {size} does not divide the model's "
                f"{number} {name}; use a divisor of all of "
                f"{sorted({int(x) for x in facts.values()})}: "
                f"{[n for n in range(1, heads + 1) if not any(x % n for x in facts.values())]}"
            )


def has_dense_layers(model: Mapping[str, Any]) -> bool:
    """Whether a layer of the model, by its Hugging Face config, is no mixture of experts."""
    return bool(
        not num_experts(model)
        or model.get("mlp_only_layers")
        or model.get("decoder_sparse_step", 1) > 1
        or model.get("first_k_dense_replace")
    )
