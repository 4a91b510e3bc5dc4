"""A small model made from nothing, for a run that needs no download and no GPU.

It has the Qwen3 architecture (2 layers, hidden 64, 0.1 M parameters), a tokenizer of one token a
character with a chat template, and is warm-started by a short SFT on reasoning-gym's
`spell_backward`. The warm-up is a mixture: each demonstration copies the word *forward* with
probability one half, and spells it backward otherwise. So the base model has the skill but not
the preference for it, and only the verifier's reward can choose. Words that the recipes hold out
for validation are never shown.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec

from minirl.algos import sft
from minirl.backend import after_draw
from minirl.backends.dtensor.backend import open_backend
from minirl.config.policy import OptimizerConfig, ScheduleConfig, TokenizerConfig
from minirl.config.run import GrpoRun
from minirl.data.chat import Tokenizer, load_tokenizer
from minirl.data.datasets import draw, load_datasets
from minirl.files import writing
from minirl.log import say
from minirl.parallel import Axis
from minirl.rng import fold_in, key_of
from minirl.types import Prompt

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
SPECIAL = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPTIMIZER = OptimizerConfig(
    name="torch.optim.AdamW",
    kwargs={"lr": 2e-3, "betas": [0.9, 0.98], "weight_decay": 0.01},
)
WARM_UP = ScheduleConfig(
    name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.05, "total_iters": 20}
)
FORMAT = 1
"""Raised when what `make` writes changes, so that a cached model of an older format is redone."""
BATCH_SIZE = 64
SFT_STEPS = 600


def make(run: GrpoRun, axis: Axis, *, seed: int, steps: int = SFT_STEPS) -> bool:
    """Writes the warm-started checkpoint into `policy.model_name`, in Hugging Face format.

    It is shown the training side of `data` only. Returns False, having done nothing, when the
    folder already holds the result of the same arguments. Written aside and renamed, so a folder
    that exists is complete.

    Raises:
        ValueError: the folder holds something else.
    """
    folder = Path(run.policy.model_name)
    facts = {"format": FORMAT, "seed": seed, "steps": steps, "data": msgspec.to_builtins(run.data)}
    stamp = folder / "tiny.json"
    if stamp.exists() and json.loads(stamp.read_text()) == facts:
        return False
    if folder.exists() and not stamp.exists():
        raise ValueError(
            f"policy.model_name: {str(folder)!r} exists and is no tiny model; name another folder"
        )
    say(f"making {folder} by {steps} steps of SFT, once ...")
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    with writing(aside):
        aside.mkdir(parents=True)
        save_tokenizer(aside)
        save_random_model(aside, seed)
        warm_start(aside, run, axis, seed=seed, steps=steps)
        (aside / stamp.name).write_text(json.dumps(facts))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    return True


def save_tokenizer(folder: Path) -> None:
    """One token for each printable ASCII character and newline; one for the task's instruction."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_random_model(folder: Path, seed: int, **sizes: int) -> None:
    """A Qwen3 of 2 layers with tied embeddings for the tokenizer in `folder`.

    `sizes` are fields of its Hugging Face config, in place of the tiny ones.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = load_tokenizer(TokenizerConfig(name=str(folder)))
    small = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
    }
    config = cast(Any, Qwen3Config)(
        **{**small, **sizes},
        vocab_size=len(SPECIAL) + len(CHARACTERS) + 1,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=SPECIAL.index("<|pad|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_in(key_of(seed), "weights"))
        Qwen3ForCausalLM(config).save_pretrained(folder)


def warm_start(folder: Path, run: GrpoRun, axis: Axis, *, seed: int, steps: int) -> None:
    """SFT on the mixture: reads the model in `folder` and writes its weights back."""
    from safetensors import torch as safetensors

    tokenizer = load_tokenizer(TokenizerConfig(name=str(folder)))
    train = load_datasets(run.data, tokenizer, None, seed).train
    policy = msgspec.structs.replace(
        run.policy, model_name=str(folder), optimizer=OPTIMIZER, scheduler=[WARM_UP]
    )
    backend, state = open_backend(policy, axis, key_of(seed))
    draws = random.Random(fold_in(key_of(seed), "mixture"))
    for _ in range(steps):
        prompts, cursor = draw(train, state.cursor, BATCH_SIZE)
        shown = [demonstration(prompt, tokenizer, draws) for prompt in prompts]
        state = after_draw(state, cursor)
        state, _ = sft.step(state, [sft.collate(shown, pad_id=0)], backend)
    weights = {name: tensor.clone() for name, tensor in backend.export(state)}
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def demonstration(prompt: Prompt, tokenizer: Tokenizer, draws: random.Random) -> sft.Demonstration:
    """The word backward, or with probability one half as it is."""
    backward = str(prompt.example["answer"])
    said = backward if draws.random() < 0.5 else backward[::-1]
    [answer] = tokenizer([said], add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id is not None
    return sft.Demonstration(prompt.tokens, (*answer, tokenizer.eos_token_id))
