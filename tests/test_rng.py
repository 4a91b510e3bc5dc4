"""Keys: the same path gives the same draw, any other path another, on every machine."""

from itertools import pairwise
from statistics import fmean

import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.rng import Key, fold_in, generator, key_of

paths = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=6), max_size=4).map(tuple)
keys = st.integers(0, 2**32).map(key_of)


@given(keys, paths, paths)
def test_two_keys_are_equal_exactly_if_their_paths_are(key: Key, one: tuple, other: tuple):
    assert (fold_in(key, *one) == fold_in(key, *other)) == (one == other)


@given(keys, st.integers(0, 99))
def test_a_number_and_its_text_name_different_draws(key: Key, number: int):
    assert fold_in(key, number) != fold_in(key, str(number))


@given(st.integers(0, 2**32), st.integers(0, 2**32), paths)
def test_runs_of_different_seeds_share_no_draw(one: int, other: int, path: tuple):
    found = fold_in(key_of(one), *path) == fold_in(key_of(other), *path)
    assert found == (one == other)


@given(keys, paths)
def test_every_key_seeds_a_generator_and_is_no_path_further(key: Key, path: tuple):
    found = fold_in(key, *path)
    assert 0 <= found < 2**63
    assert generator(found).initial_seed() == found
    assert fold_in(found) != found


def test_keys_are_the_same_on_every_machine():
    # Their numbers are what a resumed run and its peers on other hosts must agree on.
    assert key_of(0) == 492060536513082702
    assert fold_in(key_of(42), 3, "prompt", 7) == 7698620294242592602


def test_a_generator_leaves_the_process_and_other_generators_alone():
    before = torch.get_rng_state()
    first = torch.rand(5, generator=generator(key_of(1)))
    torch.rand(5, generator=generator(key_of(2)))
    assert torch.equal(first, torch.rand(5, generator=generator(key_of(1))))
    assert torch.equal(before, torch.get_rng_state())


def test_neighbouring_keys_draw_independently():
    # A thousand first draws of consecutive samples: mean 1/2, and no two alike.
    draws = [
        torch.rand(1, generator=generator(fold_in(key_of(0), i)), dtype=torch.float64).item()
        for i in range(1000)
    ]
    assert abs(fmean(draws) - 0.5) < 0.04
    assert abs(fmean((a - 0.5) * (b - 0.5) for a, b in pairwise(draws))) < 0.012
    assert len(set(draws)) == len(draws)
