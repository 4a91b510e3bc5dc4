"""A run from its config: what is read, how far it goes, how it goes on, what it tells."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from minirl.checkpoint import save
from minirl.config import GrpoRun
from minirl.data import Dataset, Datasets
from minirl.engine import Engine, Request
from minirl.loader import load
from minirl.log import SILENT, Log, metrics_path, read_metrics
from minirl.parallel import world
from minirl.rewards import Answer
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
            save(parts.backend, moved, tmp_path / "kept", axis)
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
        [first] = [line for line in text.splitlines() if "training prompts" in line]
        assert first.startswith("5 training prompts, 5 for validation (0 of them also in training")
        assert ahead in first
        assert "learning curve" in text
        assert (": reward 0: " in text) == (most == 1)
    lines = read_metrics(metrics_path(tmp_path / "log"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["val/accuracy"] == 0.0
    assert sorted(f.name for f in (tmp_path / "kept").iterdir()) == ["step_1", "step_2"]
    assert load(tmp_path / "log" / "config.yaml", [], GrpoRun) == run


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
