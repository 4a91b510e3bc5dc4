"""`model_overrides` go into the provider by name, of the right type, and nothing else changes."""

import copy
import dataclasses
import enum
import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.backends.megatron.bridge import ROOT, open_bridge
from minirl.backends.megatron.overrides import merge_overrides, refuse_decided
from minirl.config.megatron import MegatronConfig

PATH = "policy.megatron_cfg.model_overrides"
FIRST_CLASS = MegatronConfig.__struct_fields__


class Backend(enum.Enum):
    flash = 1
    unfused = 2


@dataclasses.dataclass
class Inner:
    width: int = 4
    name: str = "inner"
    enabled: bool = False


class Plain:
    """A config object that is no dataclass."""

    def __init__(self) -> None:
        self.depth = 2
        self.inner = Inner()
        self._hidden = 1


@dataclasses.dataclass
class Provider:
    """One field of each kind that Bridge's providers have."""

    flag: bool = True
    count: int = 3
    rate: float = 0.5
    label: str = "a"
    maybe: Optional[int] = None  # noqa: UP045 # the spelling of the providers
    choice: Literal["x", "y"] = "x"
    number_or_list: Union[int, list[int]] = 1  # noqa: UP007 # as above
    pair: Optional[tuple[int, int]] = None  # noqa: UP045 # as above
    dtype: torch.dtype = torch.float32
    backend: Backend = Backend.flash
    act: Optional[Callable[[torch.Tensor], torch.Tensor]] = None  # noqa: UP045 # as above
    table: Optional[dict[str, Any]] = None  # noqa: UP045 # as above
    names: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})
    inner: Inner = dataclasses.field(default_factory=Inner)
    absent: Optional[Inner] = None  # noqa: UP045 # as above
    plain: Plain = dataclasses.field(default_factory=Plain)
    fixed: int = dataclasses.field(default=7, init=False)
    _private: int = 0


def refusal(overrides: dict[str, Any], provider: Any = None) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        merge_overrides(provider or Provider(), overrides, FIRST_CLASS)
    return str(caught.value)


# ---- what is merged -----------------------------------------------------------------------------

VALUES = {
    "flag": st.booleans(),
    "count": st.integers(),
    "rate": st.floats(allow_nan=False) | st.integers(),
    "label": st.text(),
    "maybe": st.none() | st.integers(),
    "choice": st.sampled_from(["x", "y"]),
    "number_or_list": st.integers() | st.lists(st.integers(), max_size=3),
}


@settings(max_examples=50)
@given(overrides=st.fixed_dictionaries({}, optional=VALUES))
def test_given_fields_have_their_values_and_all_others_stay(overrides):
    before = Provider()
    kept = copy.deepcopy(before)
    merged = merge_overrides(before, overrides, FIRST_CLASS)
    for field in dataclasses.fields(Provider):
        if field.name not in ("plain", *overrides):
            assert getattr(merged, field.name) == getattr(kept, field.name)
        if field.name in overrides:
            assert getattr(merged, field.name) == overrides[field.name]
        if field.name != "plain":
            assert getattr(before, field.name) == getattr(kept, field.name)


def test_nested_mappings_follow_nested_objects_and_copy_them():
    before = Provider()
    overrides = {"inner": {"width": 8}, "plain": {"depth": 5, "inner": {"name": "z"}}}
    merged = merge_overrides(before, overrides, FIRST_CLASS)
    assert merged.inner == Inner(width=8)
    assert (merged.plain.depth, merged.plain.inner) == (5, Inner(name="z"))
    assert (before.inner, before.plain.depth, before.plain.inner) == (Inner(), 2, Inner())


def test_a_mapping_is_a_value_where_the_field_takes_mappings():
    merged = merge_overrides(Provider(), {"table": {"q": [1]}, "names": {"b": 2}}, FIRST_CLASS)
    assert merged.table == {"q": [1]}
    assert merged.names == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("dtype", "bfloat16", torch.bfloat16),
        ("backend", "unfused", Backend.unfused),
        ("pair", [1, 2], (1, 2)),
        ("rate", 2, 2),
        ("act", None, None),
        ("absent", None, None),
    ],
)
def test_values_are_read_as_yaml_means_them(name, given, expected):
    assert getattr(merge_overrides(Provider(), {name: given}, FIRST_CLASS), name) == expected


def test_what_hangs_on_a_provider_beside_its_fields_stays():
    before = Provider()
    before.hooks = ["hook"]  # type: ignore[attr-defined] # as Bridge does
    merged: Any = merge_overrides(before, {"count": 1}, FIRST_CLASS)
    assert merged.hooks == ["hook"]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "path", "part"),
    [
        ({"cuont": 1}, "cuont", f"configurable field on Megatron Bridge config Provider; did you "
         f"mean {PATH}.count"),
        ({"inner": {"widht": 1}}, "inner.widht", f"config Inner; did you mean {PATH}.inner.width?"),
        ({"plain": {"inner": {"nmae": 1}}}, "plain.inner.nmae", f"{PATH}.plain.inner.name"),
        ({"plain": {"_hidden": 2}}, "plain._hidden", "does not match"),
        ({"zzz": 1}, "zzz", "remove it"),
        ({"fixed": 1}, "fixed", "does not match a configurable field"),
        ({"_private": 1}, "_private", "does not match a configurable field"),
        ({"count": {"a": 1}}, "count", "a mapping cannot replace 3"),
        ({"absent": {"width": 1}}, "absent", "a mapping cannot replace None"),
        ({"inner": 3}, "inner", "expected Inner"),
        ({"flag": 1}, "flag", "expected bool"),
        ({"count": True}, "count", "expected int"),
        ({"count": 1.0}, "count", "expected int"),
        ({"count": None}, "count", "expected int"),
        ({"rate": True}, "rate", "expected float"),
        ({"rate": "0.5"}, "rate", "expected float"),
        ({"label": 1}, "label", "expected str"),
        ({"maybe": "1"}, "maybe", "expected Optional[int]"),
        ({"choice": "z"}, "choice", "expected Literal['x', 'y']"),
        ({"number_or_list": [1, "2"]}, "number_or_list", "expected Union[int, list[int]]"),
        ({"pair": [1, 2, 3]}, "pair", "expected Optional[tuple[int, int]]"),
        ({"dtype": "bf16"}, "dtype", "expected dtype"),
        ({"backend": "fused"}, "backend", "expected Backend"),
        ({"act": "torch.relu"}, "act", "expected Optional[collections.abc.Callable"),
        ({"inner": {"width": "8"}}, "inner.width", "expected int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_full_path(overrides, path, part):
    text = refusal(overrides)
    assert text.split()[0] == f"{PATH}.{path}"
    assert part in text


@pytest.mark.parametrize("name", [x for x in FIRST_CLASS if x != "enabled"])
def test_what_has_a_key_of_its_own_is_refused_at_any_depth(name):
    own = f"conflicts with policy.megatron_cfg.{name}"
    assert refusal({name: 1}).startswith(f"{PATH}.{name} {own}")
    assert refusal({"inner": {name: 1}}).startswith(f"{PATH}.inner.{name} {own}")


def test_a_nested_switch_is_no_duplicate_of_the_backends():
    assert merge_overrides(Provider(), {"inner": {"enabled": True}}, FIRST_CLASS).inner.enabled


def test_a_provider_is_not_touched_by_what_is_refused():
    before = Provider()
    refusal({"count": 9, "inner": {"width": "x"}}, before)
    assert (before.count, before.inner) == (3, Inner())


def test_overrides_that_the_backend_would_overwrite_are_refused():
    decided = {"bf16": True, "params_dtype": torch.float32}
    refuse_decided({"bf16": True, "params_dtype": "float32", "other": 1}, decided)
    with pytest.raises(ValueError, match=rf"^{PATH}\.bf16 is False, but .* make it True"):
        refuse_decided({"bf16": False}, decided)
    with pytest.raises(ValueError, match=r"params_dtype is 'bfloat16', but .* it 'float32'"):
        refuse_decided({"params_dtype": "bfloat16"}, decided)


# ---- the provider of the installed Bridge -------------------------------------------------------


@pytest.fixture(scope="module")
def provider() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is not installed
        with pytest.raises(ValueError, match=r"model_name"):
            open_bridge("none", "qwen2")
        made = importlib.import_module(f"{ROOT}.models.gpt_provider").GPTModelProvider
        return made(num_layers=2, hidden_size=64, num_attention_heads=2)


@pytest.mark.slow
def test_the_installed_provider_takes_what_the_documentation_shows(provider):
    merged = merge_overrides(provider, {"masked_softmax_fusion": False}, FIRST_CLASS)
    assert not merged.masked_softmax_fusion
    assert type(merged) is type(provider)
    assert merged.num_layers == 2


@pytest.mark.slow
def test_every_scalar_of_the_installed_provider_may_be_given_as_it_is(provider):
    for field in dataclasses.fields(provider):
        value = getattr(provider, field.name)
        if type(value) in (bool, int, float, str) and field.name not in FIRST_CLASS:
            merged = merge_overrides(provider, {field.name: value}, FIRST_CLASS)
            assert getattr(merged, field.name) == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"masked_softmax_fusoin": False}, f"did you mean {PATH}.masked_softmax_fusion"),
        ({"activation_func": "silu"}, "expected Callable"),
        ({"attention_backend": "flsh"}, "expected AttnBackend"),
        ({"layernorm_epsilon": "1e-5"}, "expected float"),
        ({"quant_recipe": {"matchers": []}}, "a mapping cannot replace None"),
    ],
)
def test_the_installed_provider_refuses_what_does_not_fit(provider, overrides, part):
    assert part in refusal(overrides, provider)
