"""How a run that fails ends under torchrun: its message once, at the end of what is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from configs import MINIMAL

from minirl.algos import tiny

pytestmark = pytest.mark.slow

TORCHRUN = [
    str(Path(sys.executable).with_name("torchrun")),
    "--nproc-per-node",
    "2",
    "--standalone",
]
SCRIPT = """
import os, sys, time
from pathlib import Path
from minirl.log import user_errors
from minirl.parallel import barrier, world

case, rank = sys.argv[1], int(os.environ["RANK"])
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
with user_errors():
    if case == "both":
        time.sleep(0 if rank else 2)
        raise ValueError("grpo.seed is 7,\\nand must be 8")
    with world() as axis, user_errors(folder):
        if rank == 1:
            raise KeyError("only the second rank has it")
        barrier(axis)
"""


def start(*arguments: str | Path, modules: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(modules)])},
    )


def end_of(process: subprocess.Popen[str], *message: str) -> None:
    """It fails, and ends shortly with the lines of the message, which are nowhere else."""
    text, _ = process.communicate(timeout=600)
    lines = [line.strip() for line in text.splitlines()]
    assert process.returncode == 1, text
    assert lines[-1].strip("=") == "", text
    assert lines[-1 - len(message) : -1] == [f"traceback : {message[0]}", *message[1:]], text
    for line in message:
        assert text.count(line) == 1, text
    report = next(
        i for i, line in enumerate(lines) if "Sending process" in line or "failed (" in line
    )
    assert len(lines) - report < 50, text
    assert "minirl" not in "".join(line for line in lines if line.startswith("File "))


def test_the_message_comes_last_and_once_whichever_rank_fails_first(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    folder = tmp_path / "run"
    folder.mkdir()
    both = start(tmp_path / "script.py", "both")
    one = start(tmp_path / "script.py", "one", folder)
    usage = start("bin/grpo.py", "--confg", "x")
    end_of(both, "error: grpo.seed is 7,", "and must be 8")
    trace = f"traceback: {folder}/traceback-rank1.txt"
    end_of(one, "error: KeyError: 'only the second rank has it'", trace)
    assert "raise KeyError(" in (folder / "traceback-rank1.txt").read_text()
    end_of(
        usage,
        "error: No such option: --confg (Possible options: --config, --print-config) "
        "(--help shows the command)",
    )


REWARD = """
calls = 0

def reward(completion, example):
    global calls
    calls += 1
    if calls > 3:
        raise OSError("the judge is away")
    return float(len(completion))
"""
RUN = (
    "grpo={num_prompts_per_step: 2, num_generations_per_prompt: 2, val_period: 0}",
    "policy.generation={backend: hf, max_new_tokens: 3}",
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=2",
    "policy.max_total_sequence_length=32",
    "policy.precision=float32",
    "env.num_workers=1",
    "checkpointing.save_period=1",
)


def test_a_reward_function_that_fails_in_the_second_step_is_told_at_the_end(tmp_path: Path):
    tiny.save_tokenizer(tmp_path)
    tiny.save_random_model(tmp_path, seed=0)
    rows = [{"input": f"say {word}", "output": word} for word in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "judging_here.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(json.dumps(MINIMAL))
    places = {
        "policy.model_name": tmp_path,
        "data.train": f"{{_override_: true, data_path: {tmp_path / 'rows.jsonl'}, "
        "env_name: 'judging_here:reward'}",
        "logger.log_dir": tmp_path / "log",
        "checkpointing.checkpoint_dir": tmp_path / "kept",
    }
    given = [*RUN, *(f"{key}={value}" for key, value in places.items())]
    process = start("bin/grpo.py", "--config", tmp_path / "run.yaml", *given, modules=tmp_path)
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 1, text
    assert text.count("OSError: the judge is away") == 1, text
    lines = text.rstrip().splitlines()
    assert "OSError: the judge is away" in lines[-3], text
    named = Path(lines[-2].split("traceback: ")[1])
    assert named.parent == tmp_path / "log"
    assert "the judge is away" in named.read_text()
    assert (tmp_path / "kept" / "step_1").is_dir()
    assert len(text.splitlines()) < 70, text
