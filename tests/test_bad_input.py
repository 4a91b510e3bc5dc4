"""What a user can get wrong is refused by bin/grpo.py in one sentence, before any model loads."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from minirl.algos import tiny

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "bin" / "recipes" / "grpo_tiny_cpu.yaml"
PATHS = [
    *("policy.model_name", "policy.tokenizer.name", "policy.optimizer.name"),
    *("policy.dtensor_cfg.custom_parallel_plan", "data.train.dataset_name", "data.train.data_path"),
    *("data.train.prompt_file", "data.train.system_prompt_file", "data.train.env_name"),
    *("checkpointing.checkpoint_dir", "logger.log_dir"),
]
"""Every key that names a file, a folder or a module."""


def _command(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bin_{name}", ROOT / "bin" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tokenizer(folder)
    tiny.save_random_model(folder, seed=0)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input": f"{i} + 1?", "output": str(i + 1)}) for i in range(20)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def refusal(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs the command with overrides, on rows of our own, and returns why it refuses."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"defaults: {RECIPE}\n"
        f"policy: {{model_name: {model}}}\n"
        "data: {train: {_override_: true, "
        f"data_path: {rows}, split_validation_size: 0.3}}}}\n"
        f"logger: {{log_dir: {tmp_path / 'run'}}}\n"
    )

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model is about to load")

    monkeypatch.setattr("minirl.algos.launch.open_backend", no_model)
    app = typer.Typer()
    app.command()(_command("grpo").main)

    def run(*overrides: str, num_ranks: int = 1) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        result = CliRunner().invoke(app, ["--config", str(config), *overrides])
        assert result.exit_code == 2, (result.output, result.exception)
        assert result.output.startswith("error: ")
        return result.output

    return run


def test_a_missing_model_folder(refusal: Callable[..., str]):
    assert "no folder './nowhere'" in refusal(
        "policy.model_name=./nowhere", "policy.tokenizer.name=x"
    )


def test_a_folder_without_config_json(refusal: Callable[..., str], tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(f"policy.model_name={tmp_path / 'empty'}")


def test_a_folder_with_pickled_weights_only(refusal: Callable[..., str], tmp_path: Path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "has no *.safetensors" in refusal(f"policy.model_name={folder}")


def test_a_tokenizer_without_chat_template(refusal: Callable[..., str], tmp_path: Path):
    folder = tmp_path / "bare"
    folder.mkdir()
    tiny.save_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(f"policy.tokenizer.name={folder}")


def test_a_tokenizer_of_a_larger_model(refusal: Callable[..., str], tmp_path: Path, model: Path):
    folder = tmp_path / "larger"
    folder.mkdir()
    tiny.save_tokenizer(folder)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    file = folder / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["model"]["vocab"]["+"] = size
    file.write_text(json.dumps(vocabulary))
    assert f"has the token {size}, but the model's vocabulary is {size}" in refusal(
        f"policy.tokenizer.name={folder}"
    )


def test_a_dataset_without_the_named_column(refusal: Callable[..., str]):
    message = refusal("data.train.input_key=question")
    assert "'question'" in message
    assert "['input', 'output']" in message


def test_an_empty_dataset(refusal: Callable[..., str], rows: Path):
    rows.write_text("")
    assert "empty" in refusal()


def test_a_missing_data_file(refusal: Callable[..., str], rows: Path):
    rows.unlink()
    assert "no such file" in refusal()


def test_batch_sizes_that_do_not_divide(refusal: Callable[..., str]):
    assert "use a divisor" in refusal(
        "policy.train_global_batch_size=192", "policy.train_micro_batch_size=64"
    )
    assert "train_micro_batch_size 100 does not divide" in refusal(
        "policy.train_micro_batch_size=100"
    )


def test_more_ranks_than_prompts(refusal: Callable[..., str]):
    assert "64 ranks are more than grpo.num_prompts_per_step 32" in refusal(num_ranks=64)


def test_ranks_that_cannot_share_the_prompts(refusal: Callable[..., str]):
    assert "cannot be shared equally by 3 ranks" in refusal(num_ranks=3)


def test_group_size_one(refusal: Callable[..., str]):
    assert "num_generations_per_prompt is 1" in refusal("grpo.num_generations_per_prompt=1")


def test_temperature_zero(refusal: Callable[..., str]):
    assert "temperature is 0" in refusal("policy.generation.temperature=0")


def test_a_negative_learning_rate(refusal: Callable[..., str]):
    assert "lr is -1.0" in refusal("policy.optimizer.kwargs.lr=-1.0")


def test_a_misspelt_key_gets_its_name(refusal: Callable[..., str]):
    message = refusal("grpo.num_promts_per_step=3")
    assert "grpo.num_promts_per_step" in message
    assert "num_prompts_per_step" in message


def test_an_unwritable_run_folder(refusal: Callable[..., str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    message = refusal(f"logger.log_dir={tmp_path / 'file' / 'run'}")
    assert "logger.log_dir" in message
    assert "cannot be written" in message


@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_a_folder_without_a_name(refusal: Callable[..., str], key: str):
    message = refusal(f"{key}=''")
    assert f'{key} = ""' in message
    assert "length >= 1" in message


def test_an_unwritable_checkpoint_folder(refusal: Callable[..., str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    place = f"checkpointing.checkpoint_dir={tmp_path / 'file'}"
    assert "checkpointing.checkpoint_dir" in refusal("checkpointing.enabled=true", place)


def test_a_file_that_is_not_utf8(refusal: Callable[..., str], rows: Path):
    rows.write_bytes(b'{"input": "caf\xe9", "output": "1"}')
    assert "is not UTF-8" in refusal()


def test_half_a_character(refusal: Callable[..., str], rows: Path):
    rows.write_text('{"input": "\\ud83d", "output": "1"}\n')
    assert "half of a character" in refusal()


def test_a_reward_function_that_is_not_there(refusal: Callable[..., str]):
    assert "cannot be loaded" in refusal("data.train.env_name=json:nothing")


def test_a_reward_function_that_is_none(refusal: Callable[..., str]):
    told = refusal("data.train.env_name=judging:short")
    assert "env_name='judging:short' cannot be used" in told
    assert "takes 1 positional argument but 2 were given" in told


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.train.env_name=my/rewards.py:score", "a file; write rewards:score, and start with"),
        ("data.train.env_name=rewards.py:score", "PYTHONPATH=. torchrun"),
        ("policy.optimizer.name=os.path.join", "belongs to Python's standard library"),
        (
            "policy.scheduler[0].kwargs.start_factor=",
            "write the whole list, policy.scheduler=[...]",
        ),
        (
            "policy.generation.vllm_kwargs.max_num_seq=3",
            "did you mean max_num_seqs",
        ),
        ("policy.generation.vllm_kwargs.seed=3", "every sample has its own, from grpo.seed"),
        ("grpo.seed=" + "7" * 5000, "an integer too long to be one"),
        ("policy.optimizer.kwargs.betas=" + "[" * 200 + "]" * 200, "nested too deep"),
        ("logger.log_dir=" + "x" * 5000, "cannot be written (File name too long)"),
        ("data.train.data_path=" + "x" * 5000 + ".jsonl", "there is no such file"),
        ("policy.tokenizer.name=" + "x/" * 5000, "there is no such folder"),
        ("grpo.n\udcffm=3", "it is not UTF-8"),
        ("grpo.größe=3", "grpo.größe: unknown key"),
        ("data.train.input_key=''", "has only the columns ['input', 'output']"),
        (
            "data.train.data_path=日本.jsonl",
            "data.train.data_path='日本.jsonl': there is no such file",
        ),
        ("data.train.dataset_name=a/b", "data.train={_override_: true, data_path: FILE}"),
        *(
            (f'{key}="a\\0b"', f'{key} = "a\\u0000b": a name or a path cannot hold a NUL')
            for key in PATHS
        ),
    ],
)
def test_what_no_run_can_use_is_refused_in_few_words(
    refusal: Callable[..., str], override: str, part: str
):
    message = refusal(override)
    assert part in message
    assert "Traceback" not in message
    assert len(message) < 1200


def test_weights_that_were_cut_short_or_quantised(
    refusal: Callable[..., str], tmp_path: Path, model: Path
):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "bytes, but its header says" in refusal(f"policy.model_name={folder}")
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, weights)
    assert "start from a model that is not" in refusal(f"policy.model_name={folder}")


def test_validation_without_data_for_it(refusal: Callable[..., str]):
    assert "split_validation_size" in refusal("data.train.split_validation_size=0")


def test_an_optimizer_or_a_schedule_that_does_not_exist(refusal: Callable[..., str]):
    assert "policy.optimizer.name" in refusal("policy.optimizer.name=torch.optim.AdamV")
    schedule = "policy.scheduler=[{name: torch.optim.lr_scheduler.Nothing}]"
    assert "policy.scheduler" in refusal(schedule)


def test_fewer_prompts_than_a_step(refusal: Callable[..., str]):
    assert "not one step" in refusal("grpo.max_num_epochs=1")


def test_a_home_folder_that_no_shell_expanded(refusal: Callable[..., str]):
    assert "'~' is not expanded" in refusal("policy.model_name=~/model")


def test_overlong_prompts(refusal: Callable[..., str]):
    assert "filter_overlong_prompts" in refusal("data.max_input_seq_length=3")


def test_the_config_can_be_printed_without_a_run(model: Path):
    app = typer.Typer()
    app.command()(_command("grpo").main)
    result = CliRunner().invoke(app, ["--config", str(RECIPE), "grpo.seed=5", "--print-config"])
    assert result.exit_code == 0
    assert "seed: 5" in result.output
    assert "max_model_len: 32" in result.output


def test_the_command_line_is_the_same_from_a_shell():
    """One real process: status 2, one sentence, no traceback."""
    import subprocess

    done = subprocess.run(
        [sys.executable, ROOT / "bin" / "grpo.py", "--config", "nowhere.yaml"],
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "0"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr
