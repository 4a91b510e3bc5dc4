"""The keys of `policy.sequence_packing` and `policy.dynamic_batching`, and what they exclude."""

from itertools import product
from typing import Any

import pytest
from configs import MEGATRON, MINIMAL, edited, load_tree, message
from test_layout import COST, KEY

from minirl.backends.layout import layout_of
from minirl.config.policy import length_unit
from minirl.config.run import check_launch
from minirl.data.plan import Plan, plan_step
from minirl.parallel import Axis

PACKED = "policy.sequence_packing.enabled=true"
DYNAMIC = "policy.dynamic_batching.enabled=true"
VPP = [
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2",
]
CP = "policy.megatron_cfg.context_parallel_size=3"

RULES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        MEGATRON,
        [PACKED, DYNAMIC],
        ["policy.sequence_packing.enabled and policy.dynamic_batching.enabled", "set one to false"],
    ),
    (
        MEGATRON,
        [DYNAMIC, *VPP],
        ["virtual_pipeline_model_parallel_size (is 2)", "use policy.sequence_packing"],
    ),
    (
        MEGATRON,
        [PACKED, "policy.sequence_packing.train_mb_tokens=511"],
        [
            "policy.sequence_packing.train_mb_tokens 511 has no room for one sample of",
            "max_total_sequence_length 512; use at least 512",
        ],
    ),
    (
        MEGATRON,
        [PACKED, CP, "policy.sequence_packing.logprob_mb_tokens=512"],
        [
            "policy.sequence_packing.logprob_mb_tokens 512 has no room",
            "512 (filled up to a multiple of 6: 516); use at least 516",
        ],
    ),
    (
        MINIMAL,
        [DYNAMIC, "policy.dynamic_batching.train_mb_tokens=64"],
        ["policy.dynamic_batching.train_mb_tokens 64 has no room", "multiple of 64: 512)"],
    ),
    (
        MINIMAL,
        [
            DYNAMIC,
            "policy.dynamic_batching.sequence_length_round=200",
            "policy.dynamic_batching.logprob_mb_tokens=512",
        ],
        ["policy.dynamic_batching.logprob_mb_tokens 512 has no room", "multiple of 200: 600)"],
    ),
    (
        MEGATRON,
        ["policy.sequence_packing.algorithm=best_fit"],
        ["policy.sequence_packing.algorithm", "best_fit"],
    ),
    (
        MEGATRON,
        ["policy.sequence_packing.sequence_length_round=64"],
        ["policy.sequence_packing.sequence_length_round", "no key: a packed sample"],
    ),
    (
        MEGATRON,
        ["policy.sequence_packing.microbatch_order=packer"],
        ["policy.sequence_packing.microbatch_order", "longest samples run first"],
    ),
    (
        MINIMAL,
        ["policy.dynamic_batching.train_mb_tokens=0"],
        ["policy.dynamic_batching.train_mb_tokens = 0"],
    ),
]


@pytest.mark.parametrize(
    ("tree", "overrides", "parts"), RULES, ids=[" ".join(rule[1]) for rule in RULES]
)
def test_contradictions_are_refused_by_name(tree, overrides, parts):
    text = message(tree, *overrides)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(
    ("tree", "overrides"),
    [
        (MEGATRON, [PACKED, *VPP]),
        (MEGATRON, [DYNAMIC]),
        (MINIMAL, [DYNAMIC]),
        (MINIMAL, [PACKED]),
        # Recipes inherit: without `enabled` the rest is not read.
        (MINIMAL, ["policy.sequence_packing.train_mb_tokens=1"]),
        (MINIMAL, ["policy.dynamic_batching.logprob_mb_tokens=1"]),
        (MEGATRON, [PACKED, "policy.dynamic_batching.train_mb_tokens=1"]),
        (MEGATRON, [PACKED, CP, "policy.sequence_packing.train_mb_tokens=516"]),
    ],
)
def test_what_is_no_contradiction_is_accepted(tree, overrides):
    load_tree(tree, *overrides)


UNEVEN = ["policy.train_micro_batch_size=3", "policy.logprob_batch_size=5"]


@pytest.mark.parametrize(("tree", "switch"), [(MEGATRON, PACKED), (MINIMAL, DYNAMIC)])
def test_batch_sizes_need_not_divide_when_micro_batches_are_cut_by_tokens(tree, switch):
    assert "does not divide" in message(tree, *UNEVEN)
    check_launch(load_tree(tree, switch, *UNEVEN), 4)


def test_every_rank_needs_a_sample_of_each_update():
    run = load_tree(MINIMAL, DYNAMIC, "policy.train_global_batch_size=4")
    check_launch(run, 4)
    with pytest.raises(ValueError, match=r"size 4 is less .* 8 ranks; use at least 8"):
        check_launch(run, 8)


def test_the_sizes_of_micro_batches_need_no_interleaving_when_cut_by_tokens():
    check_launch(load_tree(MEGATRON, PACKED, *VPP, "policy.train_micro_batch_size=256"), 2)


@pytest.mark.parametrize("tree", [MEGATRON, MINIMAL], ids=["megatron", "dtensor"])
@pytest.mark.parametrize(
    ("tensor", "context", "parallel"), list(product((1, 2, 4), (1, 2, 3), (True, False, None)))
)
def test_lengths_are_filled_up_as_the_backends_fill_them(tree, tensor, context, parallel):
    of_megatron = tree is MEGATRON
    if (tensor == 1 and parallel) or (parallel is None and not of_megatron):
        return
    section = "megatron_cfg" if of_megatron else "dtensor_cfg"
    key = "tensor_model_parallel_size" if of_megatron else "tensor_parallel_size"
    sizes = {key: tensor, "context_parallel_size": context, "sequence_parallel": parallel}
    run = load_tree(edited(tree, {f"policy.{section}.{k}": x for k, x in sizes.items()}))
    shared = tensor > 1 if parallel is None else parallel
    expected = layout_of(tensor, context, 0, packed=True, sequence_parallel=shared)
    assert length_unit(run.policy) == expected.unit


# ---- no key is without effect -------------------------------------------------------------------

LENGTHS = [(37 * n) % 480 + 20 for n in range(64)]
SMALL = [
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=2",
]


def plan(tree: dict[str, Any], *overrides: str) -> Plan:
    run = load_tree(edited(tree, {}), *SMALL, *overrides)
    return plan_step(LENGTHS, run.policy, Axis(0, 2, None), COST, KEY)


@pytest.mark.parametrize(
    ("tree", "switch", "key", "field"),
    [
        (MEGATRON, PACKED, "policy.sequence_packing.train_mb_tokens=2048", "updates"),
        (MEGATRON, PACKED, "policy.sequence_packing.logprob_mb_tokens=2048", "logprobs"),
        (MEGATRON, PACKED, "policy.sequence_packing.algorithm=concatenative", "updates"),
        (MEGATRON, PACKED, "policy.train_micro_batch_size=4", "updates"),
        (MEGATRON, PACKED, "policy.logprob_batch_size=4", "logprobs"),
        (MINIMAL, DYNAMIC, "policy.dynamic_batching.train_mb_tokens=2048", "updates"),
        (MINIMAL, DYNAMIC, "policy.dynamic_batching.logprob_mb_tokens=2048", "logprobs"),
        (MINIMAL, DYNAMIC, "policy.dynamic_batching.sequence_length_round=8", "width"),
        (MINIMAL, DYNAMIC, "policy.train_micro_batch_size=4", "updates"),
        (MINIMAL, DYNAMIC, "policy.logprob_batch_size=4", "logprobs"),
    ],
)
def test_every_key_changes_the_plan(tree, switch, key, field):
    one, other = plan(tree, switch), plan(tree, switch, key)
    assert getattr(one, field) != getattr(other, field)


def test_without_switches_the_plan_has_fixed_rows():
    found = plan(MINIMAL)
    assert {len(part) for update in found.updates for part in update} == {2}
    assert plan(MINIMAL, DYNAMIC).updates != found.updates
