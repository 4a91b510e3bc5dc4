"""vLLM alone: what it does to the process, among several ranks, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import DRAWN, VOCABULARY, config, requests, save_models, save_tokenizer

from minirl.backends import vllm
from minirl.backends.vllm_arguments import OWNED
from minirl.parallel import world


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *OWNED.items(),
        ("max_num_seq", "did you mean max_num_seqs"),
        ("é", "remove it"),
    ],
)
def test_vllm_kwargs_that_would_be_ignored_are_refused(folders, name, reason):
    with pytest.raises(ValueError, match=rf"policy\.generation\.vllm_kwargs\.{name}\b.*{reason}"):
        vllm.open_engine(config(vllm_kwargs={name: 3}), str(folders["qwen3"]))


def test_the_trainers_process_group_must_exist_first(monkeypatch, folders):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but no process group exists"):
        vllm.open_engine(config(), str(folders["qwen3"]))


RANKS_SCRIPT = """
import os, random, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from minirl.backends import hf_generate, vllm
from minirl.config.policy import GenerationConfig, VllmConfig
from minirl.engine import Sampling
from minirl.parallel import gather, world
from minirl.rng import key_of
from minirl.rollout.sample import rollout
from minirl.types import Prompt

cfg = GenerationConfig(
    max_new_tokens=8,
    vllm_cfg=VllmConfig(precision="float32", max_model_len=128, enforce_eager=True),
)
sampling = Sampling(1.0, 8, (1,))
with world(60.0) as axis:
    trainers = dist.new_group([0, 1])
    before = dict(os.environ), random.getstate()
    engine = vllm.open_engine(cfg, sys.argv[1])
    assert (dict(os.environ), random.getstate()) == before
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    oracle = hf_generate.open_engine(cfg, sys.argv[1])
    prompts = [Prompt(i, tuple(range(2 + i, 72 + i)), {}) for i in range(4)]
    noise = torch.Generator().manual_seed(0)
    for version in range(3):
        ask = dict(num_generations=2, key=key_of(0), step=version)
        mine = prompts[2 * axis.rank : 2 * axis.rank + 2]
        got = gather(rollout(engine, mine, sampling, first_group=2 * axis.rank, **ask), axis)
        want = rollout(oracle, prompts, sampling, first_group=0, **ask)
        assert [t.tokens for t in got] == [t.tokens for t in want], version
        assert {t.version for t in got} == {version}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=noise))
        dist.barrier(group=trainers)
        engine.load_(model.named_parameters(), version + 1)
        oracle.load_(model.named_parameters(), version + 1)
    engine.close()
print("rank", axis.rank, "finished")
"""


@pytest.mark.slow
def test_two_ranks_sample_refit_twice_and_end_cleanly(folders, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS_SCRIPT)
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(script), str(folders["qwen3"])),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d finished", done.stdout)) == [
        "rank 0 finished",
        "rank 1 finished",
    ]
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_an_engine_leaves_no_trace_and_can_follow_another(folders):
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return module.forward

    with world():
        before = dict(os.environ), torch.set_num_threads, torch.get_rng_state()
        cfg = config(vllm_kwargs={"max_num_seqs": 3})
        cfg = msgspec.structs.replace(
            cfg, vllm_cfg=msgspec.structs.replace(cfg.vllm_cfg, precision="bfloat16")
        )
        engine = vllm.open_engine(cfg, str(folders["llama"]))
        answers = engine.generate(requests(7), DRAWN)
        assert len({a.tokens for a in answers}) == 7
        assert (dict(os.environ), torch.set_num_threads) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert len(compiled) == 1  # the trainer may compile, though the engine does not
        engine.close()


@pytest.mark.slow
def test_weights_that_a_cpu_engine_would_take_wrongly_are_refused(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=2,
            num_experts_per_tok=1,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
        )
    )
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with world():
        engine = vllm.open_engine(config(), str(tmp_path))
        with pytest.raises(ValueError, match=r"policy\.generation\.backend=hf"):
            engine.load_(model.named_parameters(), 1)
        engine.close()


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
