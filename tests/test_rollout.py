import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import save_model

from minirl.backends import hf_generate
from minirl.config.policy import GenerationConfig, VllmConfig
from minirl.engine import Engine, Request, Sampling
from minirl.rng import fold_in, generator, key_of
from minirl.rollout.sample import collate, rollout
from minirl.types import Completion, Prompt, Trajectory

END = 1
SAMPLING = Sampling(temperature=1.0, max_tokens=6, stop_token_ids=(END,))


def nothing() -> None:
    pass


def toy_engine(asked: list[Request]) -> Engine:
    """Draws uniform tokens from each request's seed and remembers the requests."""

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        asked.extend(requests)
        completions = []
        for request in requests:
            draws = torch.randint(0, 50, (sampling.max_tokens,), generator=generator(request.seed))
            tokens = draws.tolist()
            truncated = END not in tokens
            tokens = tokens if truncated else tokens[: tokens.index(END) + 1]
            completions.append(
                Completion(tuple(tokens), (-math.log(50),) * len(tokens), truncated, 7)
            )
        return completions

    return Engine(generate, lambda weights, version: None, nothing, nothing, nothing)


def prompts_of(ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(i, tuple(range(2, 3 + i % 5)), {}) for i in ids]


def sample(prompts: Sequence[Prompt], *, n: int = 2, first_group: int = 0, step: int = 0, seed=0):
    asked: list[Request] = []
    trajectories = rollout(
        toy_engine(asked),
        prompts,
        SAMPLING,
        num_generations=n,
        key=key_of(seed),
        first_group=first_group,
        step=step,
    )
    return trajectories, asked


prompt_ids = st.lists(st.integers(0, 10**6), max_size=6)


@given(prompt_ids, st.integers(1, 4), st.integers(0, 100))
def test_a_trajectory_is_its_prompt_then_what_was_sampled(ids, n, first_group):
    prompts = prompts_of(ids)
    trajectories, asked = sample(prompts, n=n, first_group=first_group)
    assert len(trajectories) == len(ids) * n
    for row, t in enumerate(trajectories):
        prompt = prompts[row // n]
        given_length = len(prompt.tokens)
        assert asked[row].tokens == prompt.tokens == t.tokens[:given_length]
        assert (t.prompt_id, t.group, t.sample) == (prompt.id, first_group + row // n, row % n)
        assert t.sampled == tuple(i >= given_length for i in range(len(t.tokens)))
        assert set(t.generation_logprobs[:given_length]) == {0.0}
        assert set(t.generation_logprobs[given_length:]) == {-math.log(50)}
        assert t.version == 7
        assert t.truncated == (t.tokens[-1] != END)


# field failure 57
@given(prompt_ids, st.integers(1, 4))
def test_every_sample_of_a_step_has_its_own_seed(ids, n):
    _, asked = sample(prompts_of(ids), n=n)
    assert len({r.seed for r in asked}) == len(asked)


@given(st.integers(0, 9), st.integers(0, 9))
def test_seeds_differ_between_steps_and_between_runs(step, seed):
    seeds = {
        sample(prompts_of([3]), n=1, step=step + ds, seed=seed + dr)[1][0].seed
        for ds in (0, 1)
        for dr in (0, 1)
    }
    assert len(seeds) == 4


@given(st.lists(st.integers(0, 50), min_size=4, max_size=8), st.sampled_from([1, 2, 4]))
def test_samples_do_not_depend_on_the_number_of_ranks(ids, ranks):
    each = len(ids) // ranks
    prompts = prompts_of(ids[: each * ranks])
    whole, _ = sample(prompts)
    parts = [
        t
        for rank in range(ranks)
        for t in sample(prompts[rank * each : (rank + 1) * each], first_group=rank * each)[0]
    ]
    assert parts == whole


def test_real_samples_differ_between_samples_and_between_prompts(tmp_path):
    cfg = GenerationConfig(
        max_new_tokens=12, vllm_cfg=VllmConfig(precision="float32", max_model_len=32)
    )
    engine = hf_generate.open_engine(cfg, save_model(tmp_path))
    same = (2, 3, 4)
    trajectories = rollout(
        engine,
        [Prompt(0, same, {}), Prompt(1, same, {}), Prompt(0, same, {})],
        Sampling(1.0, 12, ()),
        num_generations=4,
        key=key_of(0),
        first_group=0,
        step=0,
    )
    assert len({t.tokens for t in trajectories}) == 12


tokens = st.integers(0, 9)


@st.composite
def trajectories(draw) -> list[Trajectory]:
    rows = []
    for i in range(draw(st.integers(1, 5))):
        row = draw(
            st.lists(st.tuples(tokens, st.booleans(), st.floats(-9, 0, width=32)), max_size=12)
        )
        first = draw(tokens)
        rows.append(
            Trajectory(
                group=i,
                sample=0,
                prompt_id=i,
                tokens=(first, *(t for t, _, _ in row)),
                sampled=(False, *(s for _, s, _ in row)),
                generation_logprobs=(math.nan, *(p if s else math.nan for _, s, p in row)),
                truncated=False,
                version=0,
            )
        )
    return rows


# field failures 16, 17, 37
@given(trajectories(), tokens)
def test_position_t_holds_what_concerns_token_t_plus_1(rows, pad):
    batch = collate(rows, pad_token_id=pad)
    width = max(len(r.tokens) for r in rows)
    assert batch.rows.tokens.shape == (len(rows), width)
    assert batch.token_mask.shape == batch.generation_logprobs.shape == (len(rows), width - 1)
    for i, r in enumerate(rows):
        assert batch.rows.lengths[i] == len(r.tokens)
        for t in range(width):
            assert batch.rows.tokens[i, t] == (r.tokens[t] if t < len(r.tokens) else pad)
        for t in range(width - 1):
            trained = t + 1 < len(r.tokens) and r.sampled[t + 1]
            assert bool(batch.token_mask[i, t]) is trained
            expected = r.generation_logprobs[t + 1] if trained else 0.0
            assert batch.generation_logprobs[i, t] == expected


@given(trajectories())
def test_no_token_id_is_special(rows):
    # Field failure 17: a mask made from ids drops an end token whose id is the padding's.
    a, b = collate(rows, pad_token_id=0), collate(rows, pad_token_id=9)
    assert torch.equal(a.token_mask, b.token_mask)
    assert torch.equal(a.rows.lengths, b.rows.lengths)
    assert torch.equal(a.generation_logprobs, b.generation_logprobs)


def test_the_end_token_is_trained_even_if_it_pads():
    ended = next(t for s in range(99) for t in sample(prompts_of([s]))[0] if not t.truncated)
    longer = ended._replace(
        tokens=(*ended.tokens, 5, 6),
        sampled=(*ended.sampled, True, True),
        generation_logprobs=(*ended.generation_logprobs, -1.0, -1.0),
    )
    batch = collate([ended, longer], pad_token_id=END)
    last = len(ended.tokens) - 1
    assert ended.tokens[last] == END
    assert batch.token_mask[0].tolist() == [*ended.sampled[1:], False, False]
    assert batch.token_mask[0, last - 1]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (1, 2)},
        {"sampled": (False, True, True, True)},
        {"generation_logprobs": (0.0,)},
        {"sampled": (True, True, True)},
        {"tokens": (), "sampled": (), "generation_logprobs": ()},
    ],
)
def test_collate_refuses_a_trajectory_that_is_not_one(change):
    good = Trajectory(4, 2, 0, (1, 2, 3), (False, True, True), (0.0, -1.0, -1.0), False, 0)
    collate([good])
    with pytest.raises(ValueError, match="group 4 sample 2"):
        collate([good, good._replace(**change)])


def test_collate_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="no trajectory"):
        collate([])


def test_the_seed_path_is_documented_by_its_value():
    _, asked = sample(prompts_of([11]), n=1, first_group=5, step=3)
    assert asked[0].seed == fold_in(key_of(0), 3, 11, 5, 0)
