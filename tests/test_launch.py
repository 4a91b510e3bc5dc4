"""A run from its config: what is read, how far it goes, how it goes on, what it tells."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from configs import MINIMAL, load_tree
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from toy import PROMPTS, trajectory

from minirl.algos import launch, tiny
from minirl.algos.evaluate import Judged
from minirl.backend import after_draw
from minirl.backends import open_engine
from minirl.checkpoint import latest, save
from minirl.config.loader import load
from minirl.config.run import GrpoRun
from minirl.data.datasets import Dataset, Datasets
from minirl.engine import Engine, Request
from minirl.envs.rewards import Answer
from minirl.log import SILENT, Log, metrics_path, read_metrics
from minirl.ownership import locked
from minirl.parallel import world
from minirl.rng import key_of
from minirl.types import Score

RUN = load_tree(MINIMAL, "grpo.num_generations_per_prompt=512")  # whole updates of any step


def datasets(num: int) -> Datasets:
    return Datasets(Dataset(PROMPTS[:1] * num, seed=0, shuffle=False), None, 0, 0)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 9), st.integers(1, 12))
def test_a_run_takes_whole_steps_until_prompts_or_steps_end(
    num: int, epochs: int, per_step: int, most: int
):
    sizes = {"num_prompts_per_step": per_step, "max_num_epochs": epochs, "max_num_steps": most}
    run = replace(RUN, grpo=replace(RUN.grpo, **sizes))
    left, steps = num * epochs, 0
    while left >= per_step and steps < most:
        left, steps = left - per_step, steps + 1
    assert launch.num_steps(run, datasets(num)) == steps


def test_the_policy_s_tokens_are_those_that_it_drew():
    drawn = trajectory(2)._replace(tokens=(1, 7, 8, 9), sampled=(False, True, False, True))
    assert launch.sampled_tokens(drawn) == [7, 9]


# ---- a run on a random model, ten words, the oracle engine --------------------------------------


SMALL = (
    "grpo={num_prompts_per_step: 2, num_generations_per_prompt: 2, val_at_start: true}",
    "policy.generation={backend: hf, max_new_tokens: 3, stop_token_ids: [9, 5]}",
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=2",
    "policy.max_total_sequence_length=32",
    "policy.precision=float32",
    "env.num_workers=1",
    "logger.num_val_samples_to_print=1",
)
LAST = "grpo.max_num_steps=2"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model and rows."""
    folder = tmp_path_factory.mktemp("run")
    tiny.save_tokenizer(folder)
    tiny.save_random_model(folder, seed=0)
    rows = [{"input": f"say {word}", "output": word} for word in "abcdefghij"]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = "{data_path: %s, split_validation_size: 0.4, env_name: 'operator:eq'}"
    return f"policy.model_name={folder}", f"data.train={data % (folder / 'rows.jsonl')}"


def run_in(files: tuple[str, ...], folder: Path, *overrides: str) -> GrpoRun:
    places = (f"logger.log_dir={folder / 'log'}", f"checkpointing.checkpoint_dir={folder / 'kept'}")
    return load_tree(MINIMAL, *SMALL, *files, *places, *overrides)


def test_the_end_tokens_are_the_models_and_those_that_were_asked_for(
    files: tuple[str, ...], tmp_path: Path
):
    inputs = launch.read_inputs(run_in(files, tmp_path, "policy.generation.temperature=0.5"), 1)
    end = inputs.tokenizer.eos_token_id
    assert inputs.sampling == (0.5, 3, tuple(sorted({end, 9, 5})), ())
    assert inputs.data.validation is not None
    assert (len(inputs.data.train.prompts), len(inputs.data.validation.prompts)) == (5, 5)


def test_every_answer_is_judged_with_its_own_prompt(files: tuple[str, ...], tmp_path: Path):
    inputs = launch.read_inputs(run_in(files, tmp_path), 1)
    prompts = inputs.data.train.prompts[:3]
    [word, other] = inputs.tokenizer(["xyz", "end"], add_special_tokens=False)["input_ids"]
    answers = [
        trajectory(3, truncated=truncated)._replace(
            prompt_id=prompts[i].id, tokens=(1, *tokens), sampled=(False, True, True, True)
        )
        for i, tokens, truncated in ((2, word, True), (0, other, False), (2, other, False))
    ]
    seen: list[Answer] = []

    def reward(asked: Sequence[Answer]) -> list[Score]:
        seen.extend(asked)
        return [Score(float(i)) for i in range(len(asked))]

    scores = launch.score_answers(inputs.tokenizer, reward, prompts, answers)
    assert [s.reward for s in scores] == [0.0, 1.0, 2.0]
    expected = ((2, "xyz", True), (0, "end", False), (2, "end", False))
    assert seen == [Answer(prompts[i], *rest) for i, *rest in expected]


def test_a_reward_sees_special_tokens_but_for_the_one_that_ended_the_answer(
    files: tuple[str, ...], tmp_path: Path
):
    inputs = launch.read_inputs(run_in(files, tmp_path), 1)
    stops = inputs.sampling.stop_token_ids
    [tokens] = inputs.tokenizer(["1<|user|>4<|end|>"], add_special_tokens=False)["input_ids"]
    said = trajectory(3)._replace(
        prompt_id=inputs.data.train.prompts[0].id, tokens=tuple(tokens), sampled=(True,) * 4
    )
    seen: list[str] = []

    def reward(asked: Sequence[Answer]) -> list[Score]:
        seen.extend(a.text for a in asked)
        return [Score(0.0) for _ in asked]

    launch.score_answers(inputs.tokenizer, reward, inputs.data.train.prompts, [said], stops)
    launch.show_samples([Judged(said, Score(0.5))], inputs, Log(step=SILENT.step, say=seen.append))
    assert seen[0] == "1<|user|>4"
    assert seen[1].endswith("reward 0.5: '1<|user|>4'")


def test_what_prompts_spell_and_what_does_not_end_answers_is_told(
    files: tuple[str, ...], tmp_path: Path
):
    def told(*overrides: str) -> list[str]:
        run = run_in(files, tmp_path, *overrides)
        said: list[str] = []
        log = Log(step=SILENT.step, say=said.append)
        launch._announce_text(launch.read_inputs(run, 1), run, log)
        return said

    assert told() == []
    (tmp_path / "system.txt").write_text("<|end|>42")
    system = f"data.train.system_prompt_file={tmp_path / 'system.txt'}"
    [spelled] = told(system)
    assert spelled.startswith("10 rows spell special tokens")
    literal = "policy.tokenizer.special_tokens_in_messages"
    with pytest.raises(ValueError, match=rf"data.train: row \d .*'<\|end\|>'.*{literal}=literal"):
        told(system, f"{literal}=refuse")
    (tmp_path / "turns.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"
    )
    [ending] = told(f"policy.tokenizer.chat_template={tmp_path / 'turns.jinja'}")
    assert "writes '<|user|>' after an answer" in ending
    assert "policy.generation.stop_token_ids" in ending


def unused(prompts: object, trajectories: object) -> list[Score]:
    raise AssertionError("nothing is scored here")


def test_engine_and_trainer_open_with_the_weights_of_the_last_checkpoint(
    files: tuple[str, ...], tmp_path: Path
):
    run = run_in(files, tmp_path)
    inputs = launch.read_inputs(run, 1)
    with world() as axis:
        with launch.open_parts(run, inputs, unused, axis) as (state, parts):
            assert (state.step, state.updates, state.cursor) == (0, 0, 0)
            moved = dataclasses.replace(after_draw(state, 5), step=3, updates=7)
            save(parts.backend, moved, tmp_path / "kept", axis, {})
        with launch.open_parts(run, inputs, unused, axis) as (state, parts):
            assert (state.step, state.updates, state.cursor) == (3, 7, 5)
            [said] = parts.engine.generate([Request((5, 6), key_of(0))], inputs.sampling)
            assert said.version == 7
        off = run_in(files, tmp_path, "checkpointing.enabled=false")
        with launch.open_parts(off, inputs, unused, axis) as (state, _):
            assert state.step == 0


def test_the_engine_is_closed_whatever_happens(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[bool] = []

    def watched(cfg: Any) -> Engine:
        return dataclasses.replace(open_engine(cfg), close=lambda: closed.append(True))

    monkeypatch.setattr(launch, "open_engine", watched)
    run = run_in(files, tmp_path)
    inputs = launch.read_inputs(run, 1)
    with (
        world() as axis,
        pytest.raises(KeyError, match="mid-run"),
        launch.open_parts(run, inputs, unused, axis),
    ):
        raise KeyError("mid-run")
    assert closed == [True]


def test_a_run_logs_validates_saves_and_says_what_it_has_left_to_do(
    files: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    goals = ((1, "; steps 1 to 1"), (2, "; steps 2 to 2"), (2, "; all 2 steps were taken"))
    for most, ahead in goals:
        run = run_in(files, tmp_path, f"grpo.max_num_steps={most}")
        launch.run_grpo(run)
        text = capsys.readouterr().out
        going_on = ahead != "; steps 1 to 1"
        step = tmp_path / "kept" / f"step_{1 if ahead == '; steps 2 to 2' else 2}"
        assert (f"resumed from {step} at step {step.name[-1]}\n" in text) == going_on
        change = "grpo.max_num_steps: 1 when it was saved, 2 now"
        assert (f"changed since: {change}\n" in text) == (ahead == "; steps 2 to 2")
        [first] = [line for line in text.splitlines() if "training prompts" in line]
        assert first.startswith("5 training prompts, 5 for validation (0 of them also in training")
        assert ahead in first
        assert "learning curve" in text
        assert (": reward 0: " in text) == (most == 1)
    lines = read_metrics(metrics_path(tmp_path / "log"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["val/accuracy"] == 0.0
    assert sorted(f.name for f in (tmp_path / "kept").glob("step_*")) == ["step_1", "step_2"]
    assert load(tmp_path / "log" / "config.yaml", [], GrpoRun) == run

    # Another run in the same folders is refused, in all that differs, and leaves them as they are.
    before = contents(tmp_path)
    other = run_in(files, tmp_path, "grpo.seed=7", "loss_fn.ratio_clip_min=0.1")
    with pytest.raises(ValueError, match="was saved by another run") as refused:
        launch.run_grpo(other)
    lines = str(refused.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "grpo.seed: 42 when it was saved, 7 now",
        "loss_fn.ratio_clip_min: 0.2 when it was saved, 0.1 now",
        "name another folder; or, to go on from it all the same, set "
        "checkpointing.allowed_changes: [grpo.seed, loss_fn.ratio_clip_min]",
    ]
    assert contents(tmp_path) == before
    allowed = "checkpointing.allowed_changes=[grpo.seed, loss_fn]"
    launch.run_grpo(
        run_in(files, tmp_path, "grpo.seed=7", "loss_fn.ratio_clip_min=0.1", allowed, LAST)
    )
    assert "resumed from" in capsys.readouterr().out

    # So is one whose reward function or checkpoint is not there, or while another is in them.
    before = contents(tmp_path)
    (tmp_path / "kept" / "step_2" / "identity.json").rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=r"has no identity\.json"):
        launch.run_grpo(run)
    (tmp_path / "aside").rename(tmp_path / "kept" / "step_2" / "identity.json")
    with pytest.raises(ValueError, match="cannot be loaded"):
        launch.run_grpo(run_in(files, tmp_path, "data.train.env_name='operator:nothing'"))
    with (
        locked(tmp_path / "kept", "checkpointing.checkpoint_dir"),
        pytest.raises(ValueError, match=r"checkpoint_dir: .*kept' is in use by process \d+ on"),
    ):
        launch.run_grpo(run)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file but locks, which name whoever is there."""
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


def test_a_run_ends_where_its_data_ends_and_goes_on_when_it_may_pass_over_them_again(
    files: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # 5 prompts of which about half differ: two passes are 5 draws of 2.
    (tmp_path / "halves.py").write_text(
        "def reward(completion, example):\n    return float(len(completion) % 2)\n"
    )
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.num_generations_per_prompt=4")
    ends = ("grpo.val_at_end=true", "grpo.val_at_start=false", "grpo.val_period=0")
    sizes = ("policy.train_global_batch_size=8", "data.train.env_name='halves:reward'")
    sys.path.insert(0, str(tmp_path))
    try:
        for name, all_epochs in (("parts", (3, 6)), ("whole", (6,))):
            for epochs in all_epochs:
                places = (
                    f"logger.log_dir={tmp_path / name}",
                    f"checkpointing.checkpoint_dir={tmp_path / name}",
                )
                run = run_in(
                    files, tmp_path, *sampling, *ends, *sizes, *places,
                    f"grpo.max_num_epochs={epochs}", "logger.num_val_samples_to_print=0",
                )  # fmt: skip
                launch.run_grpo(run)
                text = capsys.readouterr().out
                assert text.count("the data ends here") == 1, text
                assert text.count(" at most") == 1
                step, folder = cast("tuple[int, Path]", latest(tmp_path / name))
                cursor = json.loads((folder / "state.json").read_text())["cursor"]
                assert 0 < cursor <= epochs * 5
                lines = read_metrics(metrics_path(tmp_path / name))
                assert [(x["step"], "val/accuracy" in x) for x in lines[-2:]] == [
                    *((step, False), (step, True)),
                ]
    finally:
        sys.path.remove(str(tmp_path))
    parts, whole = (read_metrics(metrics_path(tmp_path / n)) for n in ("parts", "whole"))
    trained = [[x for x in lines if "train/loss" in x] for lines in (parts, whole)]
    assert len(trained[0]) == len(trained[1]) > 1
    for one, other in zip(*trained, strict=True):
        assert one["train/loss"] == other["train/loss"]
        assert one["train/reward_mean"] == other["train/reward_mean"]


@pytest.mark.parametrize(
    ("model", "tokenizer", "warned"),
    [(32_000, 102, True), (151_936, 151_665, False), (262_208, 262_145, False), (128, 102, False)],
)
def test_a_vocabulary_that_is_mostly_without_text_is_warned_of(model, tokenizer, warned):
    found = launch.vocabulary_warnings(model, tokenizer)
    assert len(found) == warned
    assert all(f"{model - tokenizer} of the model's {model} tokens" in line for line in found)


# ---- the curve ----------------------------------------------------------------------------------


def curve_of(tmp_path: Path, *lines: dict[str, float | None]) -> str:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return launch.learning_curve(path)


def test_the_curve_shows_accuracy_and_reward_where_they_are_known(tmp_path: Path):
    text = curve_of(
        tmp_path,
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "train/reward_mean": 0.5, "val/accuracy": None},
    )
    assert "val/accuracy" in text
    assert "train/reward_mean" in text
    assert "val/accuracy_greedy" not in text
    assert curve_of(tmp_path) == "no step was taken"
    assert curve_of(tmp_path, {"step": 1, "train/loss": 0.5}) == "no step was taken"
