"""Whether a model can be trained, cut, packed and adapted as the FSDP2 backend's settings say.

Before weights are read: from the model's config, its class, and its modules on no device. Only
whether it is causal is measured.
"""

from collections.abc import Mapping
from typing import Any

import torch

from minirl.backends.dtensor import experts, plans
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.config.dtensor import DTensorConfig
from minirl.config.megatron_fit import num_experts, text_facts
from minirl.hf import causal_class, read_config, skeleton

ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}
"""Kinds of layers that our attention can stand in for; windows have a rule of their own."""


def check_layout(keys: DTensorConfig, facts: Mapping[str, Any], *, packed: bool) -> None:
    """Refuses a layout that the model, by its Hugging Face config `facts`, cannot be cut into.

    Raises:
        ValueError: no plan, heads or experts that cannot be dealt out, or attention to a window.
    """
    model = text_facts(facts)
    if keys.tensor_parallel_size > 1:
        _plan_of(facts, keys)
    number, size = num_experts(facts), keys.expert_parallel_size
    if size > 1 and number % size:
        raise ValueError(
            f"policy.dtensor_cfg.expert_parallel_size {size} does not divide the model's {number} "
            "experts; set it to 1 or a divisor"
        )
    if size > 1 and not number:
        raise ValueError(
            f"policy.dtensor_cfg.expert_parallel_size is {size}, but the model has no experts; "
            "set it to 1"
        )
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    if window is not None and (keys.context_parallel_size > 1 or packed):
        raise ValueError(
            f"policy.model_name: the model attends to a window of {window} tokens, which packed "
            "rows and rows that are cut over ranks have no attention for; set "
            "policy.sequence_packing.enabled to false and "
            "policy.dtensor_cfg.context_parallel_size to 1"
        )


def check_modules(keys: DTensorConfig, name: str) -> None:
    """Refuses plans, experts and adapters that do not fit a model's modules, without its weights.

    `name` is a model's folder or hub name.

    Raises:
        ValueError: names the key and what there is.
    """
    lora, tensor, experts_cut = (
        keys.lora_cfg.enabled,
        keys.tensor_parallel_size > 1,
        keys.expert_parallel_size > 1,
    )
    if not (lora or tensor or experts_cut):
        return
    model = skeleton(read_config(name))
    if tensor:
        plan_for(model, keys)
    if experts_cut:
        experts.check_experts(model, keys.expert_parallel_size)
    if lora:
        dtensor_lora.choose(model, keys.lora_cfg)


def check_documents(name: str) -> None:
    """Refuses packed or cut rows for a model whose layers would let sequences see each other.

    `name` is a model's folder or hub name. Its attention has to be exchangeable, and all of its
    layers attention: a recurrence or a convolution runs on from one sequence into the next.

    Raises:
        ValueError: names the model's class and layers.
    """
    config = read_config(name)
    facts: dict[str, list[str]] = config.get_text_config().to_dict()
    kinds: set[str] = set()
    for name_of_list in ("layer_types", "layers_block_type", "block_types"):
        kinds.update(facts.get(name_of_list) or ())
    strange = sorted(kinds - ATTENTION_LAYERS)
    model = causal_class(config)
    if strange or model is None or not model._supports_attention_backend:
        layers = f"layers of the kinds {strange}" if strange else "an attention of its own, or none"
        raise ValueError(
            f"policy.model_name: models of type {config.model_type!r} have {layers}, which would "
            "carry one sequence of a packed or cut row into the next; set "
            "policy.sequence_packing.enabled to false and "
            "policy.dtensor_cfg.context_parallel_size to 1"
        )


def check_causal(model: Any) -> None:
    """Refuses a model whose positions see what follows, by a forward over eight tokens.

    Configs do not tell: `is_decoder` is false in those of some decoders.

    Raises:
        ValueError: they do, or the model gives NaN, or its forward writes into its weights.
    """
    kind = f"models of type {model.config.model_type!r}, as config.json has them,"
    size = model.config.get_text_config().vocab_size
    tokens = torch.randint(size, (1, 8), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    tokens[1, -1] = (tokens[1, -1] + 1) % size
    before = [p._version for p in model.parameters()]
    try:
        with torch.no_grad():
            one, other = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    except (AssertionError, RuntimeError, ValueError):
        if torch.cuda.is_available():
            return  # layers whose kernels run on GPUs only: recurrences, which cannot look ahead
        raise
    if [p._version for p in model.parameters()] != before:
        raise ValueError(f"policy.model_name: {kind} change their weights when they are run")
    if one.isnan().any():
        raise ValueError(
            "policy.model_name: the model's log-probs of ordinary tokens are NaN; its weights are "
            "damaged"
        )
    if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"policy.model_name: {kind} attend to both sides, so their log-probs would see what "
            "follows; use a causal language model"
        )


def plan_for(model: Any, keys: DTensorConfig) -> plans.Plan:
    """The plan by which a model is cut.

    Raises:
        ValueError: there is none, or it does not fit the model.
    """
    plan = _plan_of(model.config.to_dict(), keys)
    names = {name for name, _ in model.named_modules()}
    absent = [n for n, part in plan.items() if part in ("embedding", "output") and n not in names]
    if absent:
        raise ValueError(
            "policy.dtensor_cfg.tensor_parallel_size: the plan cuts the vocabulary at "
            f"{absent}, which models of type {model.config.model_type!r} do not have; name a plan "
            "by policy.dtensor_cfg.custom_parallel_plan"
        )
    return plan


def _plan_of(facts: Mapping[str, Any], keys: DTensorConfig) -> plans.Plan:
    model = text_facts(facts)
    plan = plans.find_plan(facts["model_type"], keys.custom_parallel_plan)
    if keys.sequence_parallel and "block" not in plan.values():
        raise ValueError(
            "policy.dtensor_cfg.sequence_parallel: the plan for models of type "
            f"{facts['model_type']!r} does not say which blocks read whole sequences; set it "
            "to false, or name a plan by policy.dtensor_cfg.custom_parallel_plan"
        )
    mixed = num_experts(facts) and plans.has_dense_layers(model)
    if mixed and keys.custom_parallel_plan is None:
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size is {keys.tensor_parallel_size}, but some "
            "layers of the model are mixtures and others dense, which the plan for models of type "
            f"{facts['model_type']!r} cannot tell apart; set it to 1, or name a plan by "
            "policy.dtensor_cfg.custom_parallel_plan"
        )
    plans.check_heads(model, keys.tensor_parallel_size)
    return plan
