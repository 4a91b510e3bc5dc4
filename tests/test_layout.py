"""Which rows form the micro-batches of which rank: every row once, the same updates anywhere."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import policy_config

from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import (
    DTensorConfig,
    DynamicBatchingConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from minirl.cost import Cost
from minirl.data.packing import round_up
from minirl.data.plan import Plan, by_length, plan_step, put_back, slices, take, take_rows
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of
from minirl.types import Batch, Rows

LONGEST, COST, KEY = 24, Cost(1.0, 0.1), key_of(5)
LOGPROB = 3
"""A pass for log-probs takes this many times the rows of a training pass."""


def policy(kind: str, batch: int, *, micro: int = 2, **fields: Any) -> PolicyConfig:
    """A policy whose micro-batches are cut in one of three ways, `fields` being of that section."""
    changes: dict[str, Any] = {
        "max_total_sequence_length": LONGEST,
        "train_global_batch_size": batch,
        "train_micro_batch_size": micro,
        "logprob_batch_size": LOGPROB * micro,
    }
    if kind == "packing":
        changes |= {
            "optimizer": None,
            "dtensor_cfg": DTensorConfig(enabled=False),
            "megatron_cfg": MegatronConfig(
                enabled=True,
                context_parallel_size=2,
                optimizer=MegatronOptimizerConfig(lr=1e-3),
            ),
            "sequence_packing": SequencePackingConfig(enabled=True, **fields),
        }
    if kind == "dynamic":
        fields = {"sequence_length_round": 3, **fields}
        changes["dynamic_batching"] = DynamicBatchingConfig(enabled=True, **fields)
    return policy_config("a/model", **changes)


def plans(lengths: list[int], cfg: PolicyConfig, ranks: int) -> list[Plan]:
    return [plan_step(lengths, cfg, Axis(r, ranks, None), COST, KEY) for r in range(ranks)]


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: list[int]
    batch: int
    ranks: int
    micro: int
    updates: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sizes that any of the three ways accepts, and lengths."""
    updates, ranks, micro, each = (draw(st.integers(1, n)) for n in (3, 3, 3, 3))
    batch = ranks * micro * each
    num = updates * batch
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=num, max_size=num))
    return Case(lengths, batch, ranks, micro, updates)


KINDS = ("fixed", "packing", "dynamic")


@pytest.mark.parametrize("kind", KINDS)
@given(case=cases())
def test_every_update_takes_its_own_rows_once_on_any_number_of_ranks(kind: str, case: Case):
    found = plans(case.lengths, policy(kind, case.batch, micro=case.micro), case.ranks)
    for u in range(case.updates):
        rows = [p.rows[i] for p in found for part in p.updates[u] for i in part]
        assert sorted(rows) == list(range(u * case.batch, (u + 1) * case.batch))
    for p in found:
        assert sorted(i for update in p.updates for part in update for i in part) == list(
            range(len(p.rows))
        )
        assert sorted(i for part in p.logprobs for i in part) == list(range(len(p.rows)))


@pytest.mark.parametrize("kind", KINDS)
@given(case=cases())
def test_all_ranks_have_equally_many_micro_batches(kind: str, case: Case):
    found = plans(case.lengths, policy(kind, case.batch, micro=case.micro), case.ranks)
    assert len({len(p.logprobs) for p in found}) == 1
    for u in range(case.updates):
        assert len({len(p.updates[u]) for p in found}) == 1
        # None of which is empty on every rank.
        assert all(any(parts) for parts in zip(*(p.updates[u] for p in found), strict=True))


@pytest.mark.parametrize("stage", ["train", "logprob"])
@pytest.mark.parametrize("kind", ["packing", "dynamic"])
@given(case=cases(), more=st.integers(0, 60) | st.none())
def test_no_micro_batch_holds_more_tokens_than_allowed(
    kind: str, stage: str, case: Case, more: int | None
):
    # 24 is a multiple of 4 (context parallelism) and of 3 (rounding) already.
    given = {} if more is None else {f"{stage}_mb_tokens": LONGEST + more}
    rows = case.micro if stage == "train" else LOGPROB * case.micro
    allowed = LONGEST * rows if more is None else LONGEST + more
    cfg = policy(kind, case.batch, micro=case.micro, **given)
    multiple = 4 if kind == "packing" else 3
    for p in plans(case.lengths, cfg, case.ranks):
        for part in [x for u in p.updates for x in u] if stage == "train" else p.logprobs:
            filled = [round_up(case.lengths[p.rows[i]], multiple) for i in part]
            read = sum(filled) if kind == "packing" else len(part) * max(filled, default=0)
            assert read <= allowed


@given(case=cases())
def test_fixed_micro_batches_have_their_size_and_ranks_contiguous_rows(case: Case):
    each, cfg = case.batch // case.ranks, policy("fixed", case.batch, micro=case.micro)
    for r, p in enumerate(plans(case.lengths, cfg, case.ranks)):
        starts = range(r * each, len(case.lengths), case.batch)
        assert p.rows == [row for start in starts for row in range(start, start + each)]
        assert {len(part) for update in p.updates for part in update} == {case.micro}
        *full, last = map(len, p.logprobs)
        assert all(size == LOGPROB * case.micro for size in full)
        assert 0 < last <= LOGPROB * case.micro


@pytest.mark.parametrize("kind", ["packing", "dynamic"])
@given(case=cases())
def test_micro_batches_come_longest_rows_first(kind: str, case: Case):
    for p in plans(case.lengths, policy(kind, case.batch), case.ranks):
        assert p.width == (1 if kind == "packing" else 3)
        for parts in (*p.updates, p.logprobs):
            longest = [max((case.lengths[p.rows[i]] for i in part), default=0) for part in parts]
            assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("kind", ["packing", "dynamic"])
@given(case=cases())
def test_ranks_share_each_update_by_work(kind: str, case: Case):
    found = plans(case.lengths, policy(kind, case.batch), case.ranks)
    works = [COST.of(n) for n in case.lengths]
    total = 0.0
    for u in range(case.updates):
        loads = [sum(works[p.rows[i]] for x in p.updates[u] for i in x) for p in found]
        assert max(loads) - min(loads) <= max(works[u * case.batch : (u + 1) * case.batch]) + 1e-9
        total += max(loads)
    expected = total * case.ranks / sum(works)
    assert found[0].efficiency["rank_imbalance"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@given(case=cases())
def test_non_padding_is_real_tokens_over_those_read(kind: str, case: Case):
    found = plans(case.lengths, policy(kind, case.batch, micro=case.micro), case.ranks)
    multiple = {"fixed": 1, "packing": 4, "dynamic": 3}[kind]

    def read(p: Plan, parts: list[list[int]]) -> int:
        filled = [[round_up(case.lengths[p.rows[i]], multiple) for i in part] for part in parts]
        if kind == "packing":
            return sum(map(sum, filled))
        return sum(len(part) * max(part) for part in filled if part)

    real = sum(case.lengths)
    training = sum(read(p, [part for u in p.updates for part in u]) for p in found)
    passes = sum(read(p, p.logprobs) for p in found)
    for p in found:
        assert p.efficiency["training_non_padding"] == pytest.approx(real / training)
        assert p.efficiency["logprobs_non_padding"] == pytest.approx(real / passes)


@given(lengths=st.lists(st.integers(1, 9), max_size=9), tokens=st.integers(9, 40))
def test_no_other_cut_into_padded_rows_needs_fewer_parts(lengths: list[int], tokens: int):
    falling = sorted(lengths, reverse=True)
    fewest = [0]  # of the first n rows, by every cut
    for n in range(1, len(falling) + 1):
        fewest.append(1 + min(fewest[at] for at in range(n) if (n - at) * falling[at] <= tokens))
    assert len(by_length(range(len(lengths)), lengths, tokens, 1)) == fewest[-1]


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, and a micro-batch has at most 8"):
        by_length([0, 1], [3, 9], 8, 1)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 samples"):
        plan_step([1] * 6, policy("fixed", 4), SOLO, COST, KEY)
    with pytest.raises(ValueError, match="3 ranks"):
        plan_step([1] * 8, policy("fixed", 4), Axis(0, 3, None), COST, KEY)
    assert len(plan_step([1] * 8, policy("packing", 4), Axis(0, 3, None), COST, KEY).rows) == 4


def test_a_shuffled_plan_depends_on_its_key():
    cfg = policy("packing", 8, algorithm="first_fit_shuffle")
    lengths = [n % LONGEST + 1 for n in range(3, 83, 5)]
    one, again, other = (plan_step(lengths, cfg, SOLO, COST, key) for key in (KEY, KEY, key_of(6)))
    assert one == again != other


@given(st.integers(0, 20), st.integers(1, 7))
def test_slices_are_consecutive_full_but_for_the_last_and_cover_all(num_rows: int, size: int):
    parts = list(slices(num_rows, size))
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == num_rows
    assert all(n == size for n in lengths[:-1])
    assert all(0 < n <= size for n in lengths[-1:])


# ---- tensors ------------------------------------------------------------------------------------


def batch_of(lengths: list[int], *, with_reference: bool) -> Batch:
    num, width = len(lengths), max(2, *lengths)
    numbers = torch.arange(num * (width - 1), dtype=torch.float64).view(num, width - 1)
    return Batch(
        rows=Rows(torch.arange(num * width).view(num, width), torch.tensor(lengths)),
        token_mask=numbers % 2 == 0,
        sample_mask=torch.arange(num) % 3 == 0,
        generation_logprobs=numbers + 1000,
        prev_logprobs=numbers + 2000,
        reference_logprobs=numbers + 3000 if with_reference else None,
        advantages=numbers + 4000,
        rewards=torch.arange(float(num)),
    )


rows_of_some = st.lists(st.integers(1, 6), min_size=2, max_size=8)


@pytest.mark.parametrize("with_reference", [False, True])
@given(lengths=rows_of_some, width=st.integers(1, 4), data=st.data())
def test_taking_keeps_every_real_token_and_no_useless_column(
    with_reference: bool, lengths: list[int], width: int, data: st.DataObject
):
    batch = batch_of(lengths, with_reference=with_reference)
    part = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    micro, longest = take(batch, part, width), max(lengths[i] for i in part)
    assert micro.rows.lengths.tolist() == [lengths[i] for i in part]
    columns = micro.rows.tokens.shape[1]
    assert columns == round_up(max(2, longest), width)
    assert (micro.reference_logprobs is None) != with_reference
    for name, whole in {**batch._asdict(), "rows": batch.rows.tokens}.items():
        found = micro.rows.tokens if name == "rows" else getattr(micro, name)
        if whole is None:
            continue
        if whole.ndim == 2:
            real = min(found.shape[1], whole.shape[1])
            assert found.shape[1] == (columns if name == "rows" else columns - 1)
            assert found[:, :real].tolist() == whole[part, :real].tolist(), name
            assert not found[:, real:].any()
        else:
            assert found.tolist() == whole[part].tolist(), name


@given(lengths=rows_of_some)
def test_rows_are_not_widened_unless_asked(lengths: list[int]):
    batch = batch_of(lengths, with_reference=True)
    part = range(len(lengths))
    assert take_rows(batch.rows, part).tokens.shape[1] == max(2, *lengths)
    assert take(batch, part).rows.tokens.shape[1] == max(2, *lengths)
    assert take(batch, part).advantages.shape[1] == max(2, *lengths) - 1


@given(lengths=rows_of_some, width=st.integers(1, 4))
def test_taking_nothing_is_one_short_row_that_is_left_out(lengths: list[int], width: int):
    micro = take(batch_of(lengths, with_reference=True), [], width)
    assert micro.sample_mask.tolist() == [False]
    assert micro.rows.lengths.tolist() == [1]
    assert micro.rows.tokens.shape == (1, round_up(2, width))


@given(lengths=rows_of_some, width=st.integers(1, 4), data=st.data())
def test_what_was_taken_apart_is_put_back(lengths: list[int], width: int, data: st.DataObject):
    batch = batch_of(lengths, with_reference=False)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    found = [take(batch, part, width).prev_logprobs for part in parts]
    whole = put_back(parts, found, batch.prev_logprobs.shape)
    real = torch.arange(1, whole.shape[1] + 1) < batch.rows.lengths[:, None]
    assert whole[real].tolist() == batch.prev_logprobs[real].tolist()
