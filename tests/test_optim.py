"""Optimizers and schedules by import path: torch's own, with the rates that the YAML says."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import policy_config
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LRScheduler

from minirl.backends.dtensor import optim
from minirl.config.policy import OptimizerConfig, PolicyConfig, ScheduleConfig

LINEAR = "torch.optim.lr_scheduler.LinearLR"
CONSTANT = "torch.optim.lr_scheduler.ConstantLR"


def config(
    name: str = "torch.optim.SGD", schedule: list[ScheduleConfig] | None = None, **kwargs: Any
) -> PolicyConfig:
    optimizer = OptimizerConfig(name, {"lr": 1.0, **kwargs})
    return policy_config("some/model", optimizer=optimizer, scheduler=schedule)


def weight() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    parameter.grad = torch.tensor([0.5, 0.25])
    return parameter


def rates(cfg: PolicyConfig, steps: int) -> list[float]:
    """The learning rate of each step."""
    optimizer, schedule = optim.build(cfg, [weight()])
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            optim.advance_(schedule)
    return found


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [(SGD, {"momentum": 0.9}), (AdamW, {"betas": [0.5, 0.6], "weight_decay": 0.3, "fused": True})],
)
def test_the_optimizer_is_torchs_own_with_the_arguments_of_the_yaml(
    cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]
):
    ours, theirs = weight(), weight()
    built, schedule = optim.build(config(f"torch.optim.{cls.__name__}", **kwargs), [ours])
    plain = cls([theirs], lr=1.0, **kwargs)
    assert type(built) is cls
    assert schedule is None
    for _ in range(3):
        built.step()
        plain.step()
    assert torch.equal(ours, theirs)


def test_all_parameters_are_one_group_in_order():
    parameters = [weight(), weight(), weight()]
    built, _ = optim.build(config(), parameters)
    [group] = built.param_groups
    assert all(a is b for a, b in zip(group["params"], parameters, strict=True))


def test_without_a_schedule_the_rate_is_constant():
    assert rates(config(), 4) == rates(config(schedule=[]), 4) == [1.0] * 4


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4))
def test_each_schedule_begins_at_its_milestone(parts: list[tuple[int, int]]):
    """Every part holds its own constant factor until the next one begins."""
    schedule = [ScheduleConfig(CONSTANT, {"factor": f / 9, "total_iters": 99}) for _, f in parts]
    lengths = [length for length, _ in parts]
    joints = [sum(lengths[:i]) for i in range(1, len(parts))]
    if joints:
        schedule.append(ScheduleConfig(milestones=joints))
    expected = [factor / 9 for length, factor in parts for _ in range(length)]
    assert rates(config(schedule=schedule), len(expected)) == pytest.approx(expected)


def test_a_schedule_advances_before_the_first_update_without_a_warning():
    ramp = ScheduleConfig(LINEAR, {"start_factor": 0.5, "total_iters": 2})
    optimizer, schedule = optim.build(config(schedule=[ramp]), [weight()])
    assert schedule is not None
    optim.advance_(schedule)
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_other_warnings_of_a_schedule_are_shown():
    class Complaining(LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch:
                warnings.warn("something else", stacklevel=1)
            return [1.0]

    with pytest.warns(UserWarning, match="something else"):
        optim.advance_(Complaining(SGD([weight()], lr=1.0)))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config("torch.optim.Adamw"), r"policy\.optimizer\.name: 'torch.optim.Adamw' is no Opt"),
        (config("torch.optim.AdamW", beta=1), r"policy\.optimizer\.kwargs: AdamW refuses .*'beta'"),
        (config(momentum=-1.0), r"policy\.optimizer\.kwargs: SGD refuses .*-1.0"),
        (
            config(schedule=[ScheduleConfig("torch.optim.SGD")]),
            r"policy\.scheduler\[0\]\.name: 'torch.optim.SGD' is no LRScheduler",
        ),
        (
            config(schedule=[ScheduleConfig("torch.optim.lr_scheduler.ReduceLROnPlateau")]),
            r"policy\.scheduler: the schedule cannot be advanced by step\(\) alone",
        ),
        (config("os.path.join"), r"cannot import 'os\.path': it belongs to Python's standard lib"),
        (config("collections.OrderedDict"), r"optimizer\.name: cannot import 'collections': it be"),
        (config("antigravity.SGD"), r"it belongs to Python's standard library"),
        (config("torch.nn.Linear"), r"no Optimizer but <class 'torch.nn.*'>; give the import"),
        (config("torch.nn.functional.gelu"), r"no Optimizer but <built-in function gelu>"),
        (config("torch.optim.Optimizer"), r"is no Optimizer but <class .*; give the import path"),
        (config("torch.optim.LBFGS"), r"optimizer\.name: LBFGS cannot take a step from gradients"),
        (config("torch.optim.SparseAdam"), r"SparseAdam cannot take a step from gradients alone"),
        (config(".a.SGD"), r"policy\.optimizer\.name: cannot import '\.a': it is no name of a mod"),
        (config("SGD"), r"policy\.optimizer\.name: 'SGD' is no Optimizer but nothing"),
        (config("nowhere.SGD"), r"cannot import 'nowhere' \(No module named 'nowhere'\)"),
        (config("my/opt.py.SGD"), r"a file; write opt, and .* PYTHONPATH=my torchrun"),
        (config("a." * 3000 + "SGD"), r"cannot import 'a\.a.*\.\.\. \(5999 characters\)'"),
        (
            config(schedule=[ScheduleConfig("functools.partial")]),
            r"policy\.scheduler\[0\]\.name: cannot import 'functools': it belongs to Python's",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_key_before_a_model_is_loaded(
    cfg: PolicyConfig, message: str
):
    with pytest.raises(ValueError, match=message) as caught:
        optim.check(cfg)
    assert len(str(caught.value)) < 600


def test_what_can_run_passes_the_check():
    ramp = ScheduleConfig(LINEAR, {"total_iters": 2})
    optim.check(config("torch.optim.Muon"))
    optim.check(config(schedule=[ramp, ramp, ScheduleConfig(milestones=[3])]))
