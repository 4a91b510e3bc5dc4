"""A run's checkpoint becomes the model that it is: bit for bit, and in transformers and vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import make_rows, make_samples, make_work
from disk import largest_file
from engines import GREEDY, config, greedy, requests, save_models, tokens_of
from models import policy_config, save_model
from parity import SIZES, Layout, policy
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from minirl.algos import export
from minirl.algos.export import Exported, check_paths, to_hugging_face, to_megatron
from minirl.backend import TokenHead
from minirl.backends import open_backend
from minirl.backends.hf_files import as_in_checkpoint, weight_types
from minirl.config.policy import PolicyConfig
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    names = {
        family: save_model(root / family, family, **SIZES)
        for family in ("qwen3", "llama", "qwen3_moe")
    }
    names["bfloat16"] = save_model(root / "bfloat16", "qwen3", **SIZES)
    rewrite(Path(names["bfloat16"]), lambda w: {k: x.bfloat16() for k, x in w.items()})
    names["twice"] = save_model(root / "twice", "qwen3", **SIZES)
    rewrite(
        Path(names["twice"]),
        lambda w: {
            **w,
            "lm_head.weight": w["model.embed_tokens.weight"].clone(),
            "model.rotary_emb.inv_freq": torch.arange(16.0),
        },
    )
    for folder in names.values():
        (Path(folder) / "tokenizer.json").write_text("{}")
        (Path(folder) / "generation_config.json").write_text('{"eos_token_id": 7}')
    return names


def rewrite(folder: Path, change: Any) -> None:
    save_file(
        change(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def read(folder: str | Path) -> dict[str, torch.Tensor]:
    return {k: x for f in Path(folder).glob("*.safetensors") for k, x in load_file(f).items()}


def cfg_of(model: str, megatron: dict[str, Any] | None) -> PolicyConfig:
    return policy(Layout("", 1, megatron), model, packed=False)


def save_and_export(
    axis: Axis, cfg: PolicyConfig, root: Path, updates: int, **kwargs: Any
) -> tuple[Exported, torch.Tensor]:
    """A state after some updates: what was exported, and the log-probs that it gives."""
    backend, state = open_backend(cfg, axis, key_of(0))
    data = backend.data_axis
    for i in range(updates):
        samples = make_samples(4, seed=i)[data.rank :: data.size]
        state, _ = backend.update_(state, [make_work(samples)])
    rows = [make_rows(make_samples(4, seed=9))]
    seen = backend.logprobs(state, rows, TokenHead(), "policy")[0].logprobs
    saved = root / "step_1"
    if axis.rank == 0:
        saved.mkdir(parents=True)
    torch.distributed.barrier()
    backend.save(state, saved)
    torch.distributed.barrier()  # the first rank writes last
    return to_hugging_face(cfg, saved, root / "model", axis, **kwargs), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megatron"),
    [
        ("qwen3", TP2),
        ("llama", PP2),
        ("bfloat16", None),
        ("qwen3_moe", None),
        ("twice", None),
    ],
    ids=["megatron TP2", "megatron PP2", "dtensor bfloat16", "dtensor MoE", "dtensor, doubled"],
)
def test_a_model_comes_back_bit_for_bit(
    models: dict[str, str], name: str, megatron: dict[str, Any] | None, tmp_path: Path
):
    found, _ = run_ranks(
        2, save_and_export, cfg_of(models[name], megatron), tmp_path, 0, max_shard_size="40KB"
    )[0]
    expected, got = read(models[name]), read(found.folder)
    assert got.keys() == expected.keys()
    assert all(x.dtype == got[k].dtype for k, x in expected.items())
    assert all(torch.equal(x, got[k]) for k, x in expected.items())
    assert found.untrained == (("model.rotary_emb.inv_freq",) if name == "twice" else ())
    index = json.loads((found.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (found.folder / file).read_text() == (Path(models[name]) / file).read_text()
    assert not (tmp_path / "model.part").exists()
    assert len({file.stat().st_mode for file in found.folder.iterdir()}) == 1, "who may read it"


def transformers_logprobs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = make_rows(make_samples(4, seed=9)).tokens
    with torch.no_grad():
        logs = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logs.gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megatron"),
    [("qwen3", TP2), ("qwen3_moe", {}), ("qwen3_moe", None)],
    ids=["megatron TP2", "megatron MoE", "dtensor MoE"],
)
def test_what_was_trained_is_what_transformers_loads(
    models: dict[str, str], name: str, megatron: dict[str, Any] | None, tmp_path: Path
):
    ranks = 1 if megatron == {} else 2
    cfg = cfg_of(models[name], megatron)
    found, seen = run_ranks(ranks, save_and_export, cfg, tmp_path, 1)[0]
    assert weight_types(found.folder) == weight_types(Path(models[name]))
    for i, n in enumerate(make_rows(make_samples(4, seed=9)).lengths.tolist()):
        got = transformers_logprobs(found.folder)[i, : n - 1]
        torch.testing.assert_close(got, seen[i, : n - 1], rtol=1e-5, atol=2e-5)
        before = transformers_logprobs(Path(models[name]))[i, : n - 1]
        assert (got - before).abs().max() > 1e-3


@pytest.mark.slow
def test_what_was_trained_is_what_vllm_loads(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    from minirl.backends import vllm

    source = save_models(tmp_path_factory)["qwen3"]
    cfg = policy_config(str(source))
    found, _ = run_ranks(1, save_and_export, cfg, tmp_path, 3)[0]
    model = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    asked = requests(2, length=20)
    engine = vllm.open_engine(config(), str(found.folder))
    try:
        got = tokens_of(engine, asked, GREEDY)
    finally:
        engine.close()
    assert got == greedy(model, asked, GREEDY.max_tokens)
    first = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert got != greedy(first, asked, GREEDY.max_tokens)


# ---- what is refused ----------------------------------------------------------------------------


def test_an_existing_folder_is_not_written_over(tmp_path: Path):
    step, out = tmp_path / "step_1", tmp_path / "out"
    step.mkdir()
    check_paths(step, out)
    out.mkdir()
    check_paths(step, out)
    (out / "file").touch()
    for taken in (out, out / "file"):
        with pytest.raises(ValueError, match=r"--out: .*exists already"):
            check_paths(step, taken)


def test_a_checkpoint_is_one_step_of_a_run(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--checkpoint: there is no folder"):
        check_paths(tmp_path / "step_1", tmp_path / "out")
    (tmp_path / "step_3").mkdir()
    with pytest.raises(ValueError, match=r"folder of a run: name one of its steps, .*step_3'"):
        check_paths(tmp_path, tmp_path / "out")


def test_a_quantised_model_is_no_pattern_to_write_by(tmp_path: Path):
    save_file({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'w': 'F8_E4M3'.*not quantised"):
        weight_types(tmp_path)


def test_a_full_disk_is_named_with_the_model_to_be(models: dict[str, str], tmp_path: Path):
    weights = read(models["qwen3"])
    with largest_file(4096), pytest.raises(ValueError, match=r"out\.part' cannot be written: File"):
        export._write(models["qwen3"], Path(models["qwen3"]), weights, tmp_path / "out", "5GB")
    assert not (tmp_path / "out").exists()


def test_a_copy_beside_the_index_is_not_read(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert weight_types(tmp_path).keys() == {"a", "b"}
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_types(tmp_path).keys() == {"a"}


def test_names_that_are_a_checkpoints_own_stay_as_they_are(models: dict[str, str]):
    weights = read(models["qwen3_moe"])
    got = as_in_checkpoint(models["qwen3_moe"], dict(weights), weights.keys())
    assert got.keys() == weights.keys()
    assert all(got[k] is x for k, x in weights.items())


def test_a_conversion_ahead_is_for_the_megatron_backend(models: dict[str, str]):
    with pytest.raises(ValueError, match=r"set policy.megatron_cfg.enabled=true"):
        to_megatron(cfg_of(models["qwen3"], None), SOLO)


def test_a_trained_weight_without_a_name_in_the_model_s_files_is_refused(
    models: dict[str, str], tmp_path: Path
):
    from minirl.algos import export

    source = Path(models["qwen3"])
    weights = {**read(source), "model.extra.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"no weights of these names.*'model.extra.weight'"):
        export._write(str(source), source, weights, tmp_path / "out", "5GB")
    assert not (tmp_path / "out").exists()
