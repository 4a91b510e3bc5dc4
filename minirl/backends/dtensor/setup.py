"""Builds what the FSDP2 backend trains: the mesh of ranks, and the model, cut and sharded over it.

Two meshes lie over the same ranks: (copy, shard, tensor) for parameters, where shards and parts of
a sequence are one side, since both need all of them; and (data, context, tensor) for rows. Ranks
that cut a layer between them are the nearest neighbours. Experts have a third, (outside, expert).
"""

import re
import warnings
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from minirl.backends.attention import causal_attention
from minirl.backends.dtensor import experts, plans
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.backends.dtensor.fit import check_causal, plan_for
from minirl.backends.hf_model import load_options
from minirl.backends.layout import Layout, layout_of
from minirl.backends.vocab_parallel import Shard as VocabularyShard
from minirl.config.dtensor import DTensorConfig, data_parallel_size
from minirl.config.policy import PolicyConfig
from minirl.parallel import Axis

# A decoder layer below this size is sharded together with the root: its own all-gathers and
# reduce-scatters would cost latency (a third of an update of 2 small layers over gloo) and
# save no memory worth the name.
UNIT_PARAMETERS = 2**20
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUTER = re.compile(r"\.(gate|router)\.(weight|bias)$")
"""What the parameters of a mixture's routers are called."""
ATTENTION = "minirl_documents"
"""What our attention is called among transformers' implementations."""

Model: TypeAlias = Any
"""A `transformers.PreTrainedModel`, whose calls are not typed."""


class Meshes(NamedTuple):
    """How the ranks cooperate."""

    data: Axis
    parameters: DeviceMesh | None
    """Over which FSDP shards; with copies it has two sides. None: nothing is sharded."""
    experts: DeviceMesh | None
    """Sides `outside` and `expert`: over which FSDP shards experts, and over which they are cut."""
    tensor: DeviceMesh | None
    context: dist.ProcessGroup | None
    layout: Layout

    def vocabulary(self, size: int) -> VocabularyShard:
        """Which of `size` columns of the logits are this rank's."""
        if self.tensor is None:
            return VocabularyShard(0)
        columns = -(-size // self.tensor.size())
        return VocabularyShard(self.tensor.get_local_rank() * columns, self.tensor.get_group())


def open_meshes(cfg: PolicyConfig, axis: Axis, device: torch.device) -> Meshes:
    """The groups of a layout. Collective: every launched rank calls this."""
    keys = cfg.dtensor_cfg
    tensor, context, copies = (
        keys.tensor_parallel_size,
        keys.context_parallel_size,
        keys.dp_replicate_size,
    )
    data = data_parallel_size(keys, axis.size)
    if data == axis.size and copies == 1 and keys.expert_parallel_size == 1:
        assert axis.group is not None
        whole = DeviceMesh.from_group(axis.group, device.type)
        layout = layout_of(1, 1, 0, packed=cfg.sequence_packing.enabled, sequence_parallel=False)
        return Meshes(axis, whole, None, None, None, layout)
    sharded = init_device_mesh(
        device.type,
        (copies, data // copies * context, tensor),
        mesh_dim_names=("copy", "shard", "tensor"),
    )
    shared = init_device_mesh(
        device.type, (data, context, tensor), mesh_dim_names=("data", "context", "tensor")
    )
    return Meshes(
        data=Axis(shared.get_local_rank("data"), data, shared.get_group("data")),
        parameters=sharded["copy", "shard"] if copies > 1 else sharded["shard"],
        experts=_expert_mesh(keys, axis, device),
        tensor=sharded["tensor"] if tensor > 1 else None,
        context=shared.get_group("context") if context > 1 else None,
        layout=layout_of(
            tensor,
            context,
            shared.get_local_rank("context"),
            packed=cfg.sequence_packing.enabled,
            sequence_parallel=keys.sequence_parallel,
        ),
    )


def _expert_mesh(keys: DTensorConfig, axis: Axis, device: torch.device) -> DeviceMesh | None:
    size = keys.expert_parallel_size
    if size == 1:
        return None
    return init_device_mesh(
        device.type, (axis.size // size, size), mesh_dim_names=("outside", "expert")
    )


def load_model(cfg: PolicyConfig, meshes: Meshes) -> Model:
    """The model in float32 on the CPU, in evaluation mode, before anything is cut.

    Raises:
        ValueError: the checkpoint lacks weights of the model, or holds them in other shapes, or
            the model is not causal.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    untyped: Any = AutoModelForCausalLM
    options, _ = load_options(cfg.model_name, cfg.generation.vllm_cfg.max_model_len)
    model, report = untyped.from_pretrained(
        cfg.model_name,
        dtype=torch.float32,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told apart below, by name
        **options,
    )
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ValueError(
            f"policy.model_name: the checkpoint {cfg.model_name!r} lacks weights that its "
            f"config.json asks for, or has them in other shapes: {wrong[:5]} ({len(wrong)} in all)"
        )
    # Which tokens are padding is told by lengths. Left alone, the embedding of the tokenizer's
    # padding token, often also the end token, would get no gradient.
    model.get_input_embeddings().padding_idx = None
    model.eval()
    check_causal(model)
    if cfg.dtensor_cfg.freeze_moe_router:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(ROUTER.search(name) is None)
    if needs_own_attention(meshes):
        use_own_attention_(model)
    return model


def use_own_attention_(model: Model) -> None:
    """Makes the model's layers attend within sequences that lie one after the other."""
    from transformers import AttentionInterface

    cast(Any, AttentionInterface).register(ATTENTION, document_attention)
    model.set_attn_implementation(ATTENTION)


def needs_own_attention(meshes: Meshes) -> bool:
    """Whether rows hold several sequences, or parts of one."""
    return meshes.layout.packed or meshes.context is not None


def document_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of `causal_attention`.

    Shapes: [batch, heads, tokens, width] to [batch, tokens, heads, width]. `options` are those of
    the model's forward, `document_lengths` and `context_group` among them, and the layer's own.

    Raises:
        ValueError: the layer has a mask of its own, attends to a window, caps its scores or adds
            a sink to them.
    """
    if attention_mask is not None:
        raise ValueError(
            "policy.model_name: the model makes a mask of its own, which policy.sequence_packing "
            "and policy.dtensor_cfg.context_parallel_size cannot use; use neither"
        )
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise ValueError(
                f"policy.model_name: a layer's attention has {option} set, which "
                "policy.sequence_packing and policy.dtensor_cfg.context_parallel_size cannot do; "
                "use neither"
            )
    tokens_first = [x.permute(2, 0, 1, 3) for x in (query, key, value)]
    found: Tensor = causal_attention(
        tokens_first[0],
        tokens_first[1],
        tokens_first[2],
        options["document_lengths"],
        options["context_group"],
        scaling,
    )
    return cast(Any, found.transpose(0, 1)).unflatten(-1, (query.shape[1], -1)), None


def shard_(model: Model, cfg: PolicyConfig, meshes: Meshes) -> None:
    """Cuts layers, shards parameters, moves everything to its device."""
    keys = cfg.dtensor_cfg
    # The output is a view of a DTensor's local part, and nothing here writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if meshes.tensor is not None:
        _cut_(model, keys, meshes.tensor)
    layers = _layers(model)
    if keys.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # what transformers asks; the modules inside stay as they are
    policy = MixedPrecisionPolicy()
    if cfg.precision != "float32":
        policy = MixedPrecisionPolicy(param_dtype=HALVES[cfg.precision], reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if keys.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if meshes.experts is not None:
        for mixture in experts.cut_(model, meshes.experts["expert"]):
            fully_shard(
                mixture,
                mesh=meshes.experts["outside"],
                mp_policy=policy,
                offload_policy=offload,
                shard_placement_fn=lambda _: Shard(1),
            )
    for unit in [m for m in layers if sum(p.numel() for p in m.parameters()) >= UNIT_PARAMETERS]:
        fully_shard(unit, mesh=meshes.parameters, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=meshes.parameters, mp_policy=policy, offload_policy=offload)
    for unit in units(model):
        # Sums, not means: losses are already divided by the counts of the global batch. The
        # setters do not recurse, and gloo knows the plain sum only.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _layers(model: Model) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _cut_(model: Model, keys: DTensorConfig, mesh: DeviceMesh) -> None:
    plan = plan_for(model, keys)
    if keys.custom_parallel_plan is None and model.config.model_type not in plans.PLANS:
        whole: plans.Plan = {**plan, **plans.whole_parts(model, plan)}
        plan = whole
    if keys.lora_cfg.enabled:
        plan = dtensor_lora.cut_plan(plan, model)
    cut: Any = parallelize_module
    cut(model, mesh, plans.styles(plan, sequence_parallel=keys.sequence_parallel))
    plans.tie_again(model)
    missed = plans.unplanned(model)
    if missed:
        raise ValueError(
            f"policy.dtensor_cfg: the plan for tensor parallelism leaves out {missed[:5]} "
            f"({len(missed)} in all), whose gradients would differ between ranks; add them"
        )


def units(model: Model) -> list[FSDPModule]:
    """The modules that FSDP gathers one by one."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]
