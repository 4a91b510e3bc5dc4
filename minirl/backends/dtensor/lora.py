"""LoRA on the FSDP2 backend: frozen weights W, and trained adapters B A beside some of them.

An adapted layer computes W x + alpha / dim B A x. In: a model that nothing has cut yet. Out: the
same with adapters (by the peft library), how they are cut along with their layers, and what leaves
the model: merged weights under the names of the base model, and a folder that peft loads.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minirl.backends.dtensor.plans import Part, Plan
from minirl.config.dtensor import LoraConfig
from minirl.config.policy import PolicyConfig
from minirl.parallel import Axis
from minirl.rng import Key, fold_in, generator

KEY = "policy.dtensor_cfg.lora_cfg"
FILE = "adapter_model.safetensors"
"""What peft calls its file of weights."""
NAME = "default"
"""What peft calls an adapter that has no other name."""


class Lora(NamedTuple):
    """The adapters of a model."""

    config: Any
    """A `peft.LoraConfig`, whose class is not typed."""
    facts: dict[str, object]
    """JSON that a checkpoint of them must agree with: sizes, layers, and the weights W."""


def attach_(model: Any, cfg: PolicyConfig, key: Key) -> Lora | None:
    """Adds adapters that change nothing yet (B is zero), and freezes the rest; None: switched off.

    A is drawn by `key`: the same on every rank.

    Raises:
        ValueError: names of layers that fit none, or none that is left.
    """
    keys = cfg.dtensor_cfg.lora_cfg
    if not keys.enabled:
        return None
    import peft

    layers = choose(model, keys)
    facts: dict[str, object] = {
        "dim": keys.dim,
        "alpha": keys.alpha,
        "layers": layers,
        "base": fingerprint(model),
    }
    untyped: Any = peft
    config = untyped.LoraConfig(
        r=keys.dim,
        lora_alpha=keys.alpha,
        target_modules=layers,
        lora_dropout=keys.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=cfg.model_name,
    )
    with torch.random.fork_rng(devices=[]):  # peft draws an A of its own
        untyped.inject_adapter_in_model(config, model, adapter_name=NAME)
    for name, layer in adapted(model).items():
        a = layer.lora_A[NAME].weight
        draw = generator(fold_in(key, "lora", name))
        if keys.lora_A_init == "xavier":
            nn.init.xavier_normal_(a, generator=draw)
        else:
            nn.init.kaiming_uniform_(a, a=5**0.5, generator=draw)
    model.eval()
    return Lora(config, facts)


def choose(model: Any, keys: LoraConfig) -> list[str]:
    """The names of the layers that get adapters, in the model's order.

    A given name (`*` stands for anything) is that of a layer, or the end of it after a dot. All
    linear layers are those but the output embedding: it may be tied to the input's. The experts of
    a mixture are no linear layers, but one tensor for all of them: they and their router stay.

    Raises:
        ValueError: a name that fits no linear layer, a tied output embedding, or nothing is left.
    """
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    output = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    if keys.match_all_linear:
        chosen = [name for name in linear if name != output]
    else:
        chosen = _fitting(linear, keys.target_modules, "target_modules")
    if output in chosen and model.config.tie_word_embeddings:
        raise ValueError(
            f"{KEY}.target_modules: {output!r} is tied to the input embedding, and merged weights "
            "could not be; leave it out"
        )
    excluded = _fitting(chosen, keys.exclude_modules, "exclude_modules")
    left = [name for name in chosen if name not in excluded]
    if not left:
        raise ValueError(f"{KEY}.exclude_modules {keys.exclude_modules} leaves no layer; name less")
    return left


def _fitting(names: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        fits = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")}
        if not fits:
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"{KEY}.{key}: {pattern!r} fits no linear layer; choose from {ends}, or give a "
                "longer part of a layer's name, with * for anything"
            )
        found |= fits
    return [name for name in names if name in found]


def fingerprint(model: nn.Module) -> str:
    """A digest of all weights, for a model that nothing has cut: names, shapes, sums of bits.

    It is as fast as memory. It tells other weights, but not the same ones in another order within
    a tensor.
    """
    facts = [
        (name, tuple(p.shape), int(p.detach().contiguous().view(torch.int32).sum()))
        for name, p in model.named_parameters()
    ]
    return hashlib.blake2b(repr(sorted(facts)).encode(), digest_size=16).hexdigest()


def adapted(model: Any) -> dict[str, Any]:
    """The layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}


def freeze_(model: nn.Module) -> None:
    """Only adapters are trained. Before anything is computed: FSDP then asks once, and for good."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model for the duration, to the bit; for use without gradients."""
    layers = adapted(model).values()
    trained = [p for p in model.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    # peft has frozen the adapters too, which FSDP would take for good; see `freeze_`.
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def cut_plan(plan: Plan, model: Any) -> Plan:
    """The plan by the names of this model's modules, adapters included.

    Columns: A in full on every rank, B cut as W is. Rows: A cut as W is, its product summed over
    ranks; B in full. Both are exact, and only products of width `dim` travel.
    """
    layers = adapted(model)
    found: dict[str, Part] = {}
    for name, _ in model.named_modules():
        part = _part(name, plan)
        if part is not None and name in layers:
            found[f"{name}.base_layer"] = part
            found[f"{name}.lora_A.{NAME}"] = "summed" if part == "row" else "whole"
            found[f"{name}.lora_B.{NAME}"] = "spread" if part == "row" else "column"
        elif part is not None:
            found[name] = part
    return found


def _part(name: str, plan: Plan) -> Part | None:
    steps = name.split(".")
    for pattern, part in plan.items():
        wanted = pattern.split(".")
        if len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted)):
            return part
    return None


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the base model, in full, with W + alpha / dim B A in the place of W.

    The live weights stay as they are, to the bit. Collective, one tensor at a time.
    """
    layers = adapted(model)
    for name, parameter in model.named_parameters():
        stem, inside, last = name.partition(".base_layer.")
        layer = layers.get(stem)
        if inside and layer is not None:
            value = full(parameter)
            if last == "weight":
                a, b = (full(part[NAME].weight) for part in (layer.lora_A, layer.lora_B))
                value = value + (b @ a) * layer.scaling[NAME]
            yield f"{stem}.{last}", value
        elif not _is_adapter(name):
            yield name, full(parameter)


def _is_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"))


def full(parameter: Tensor) -> Tensor:
    """The whole of a parameter that may be sharded; itself, if one rank has it. Collective."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def save(folder: Path, adapters: Mapping[str, Tensor], lora: Lora, axis: Axis) -> None:
    """Writes the adapters, by their names in the model, into `folder` as peft does.

    Collective: every rank of `axis` calls this.
    """
    from safetensors import torch as safetensors

    tensors = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": full(p).cpu().contiguous()
        for name, p in adapters.items()
    }
    if axis.rank == 0:
        safetensors.save_file(tensors, folder / FILE, metadata={"format": "pt"})
        lora.config.save_pretrained(str(folder))


def check_facts(folder: Path, saved: Mapping[str, object] | None, lora: Lora | None) -> None:
    """Refuses a checkpoint of other adapters.

    Raises:
        ValueError: says what differs.
    """
    here = None if lora is None else lora.facts
    if saved == here:
        return
    if saved is None or here is None:
        raise ValueError(
            f"{str(folder)!r} was saved {'without' if saved is None else 'with'} LoRA: set "
            f"{KEY}.enabled as it was, or start a new run"
        )
    wrong = [k for k in here if saved.get(k) != here[k]]
    told = {
        "base": "the weights of policy.model_name",
        "layers": f"the layers that {KEY} chooses",
        **{k: f"{KEY}.{k} ({saved.get(k)} there, {here[k]} here)" for k in ("dim", "alpha")},
    }
    raise ValueError(
        f"{str(folder)!r} belongs to another base model or other adapters: it differs in "
        f"{' and in '.join(told[k] for k in wrong)}; set them as they were, or start a new run"
    )
