"""Prompts: one template, one BOS where the model has one, and the tokens of what was rendered."""

import contextlib
import json
from dataclasses import dataclass

import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from minirl.chat import (
    decode,
    encode_prompts,
    load_tokenizer,
    stop_token_ids,
)
from minirl.policy_config import TokenizerConfig

TURNS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if hint is defined %}{{ hint }}{% endif %}"
    "{% endif %}"
)
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|system|>", "<|assistant|>"]
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text()}),
    min_size=1,
    max_size=3,
)


@dataclass(frozen=True)
class Habit:
    """Who writes BOS."""

    known: bool
    by_tokenizer: bool
    by_template: bool

    @property
    def num_bos(self) -> int:
        return int(self.by_tokenizer or self.by_template)


HABITS = [
    Habit(known=False, by_tokenizer=False, by_template=False),
    Habit(known=True, by_tokenizer=False, by_template=False),
    Habit(known=True, by_tokenizer=True, by_template=False),
    Habit(known=True, by_tokenizer=False, by_template=True),
    Habit(known=True, by_tokenizer=True, by_template=True),
]


def byte_tokenizer(habit: Habit, template: str | None = TURNS) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which can spell any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    core.train_from_iterator(["the sun and the nuns spell words"], trainer)
    return _finish(core, habit, template)


def word_tokenizer(habit: Habit, template: str | None = TURNS) -> PreTrainedTokenizerFast:
    """One token a character of ASCII; anything else is unknown."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return _finish(core, habit, template)


def _finish(core: Tokenizer, habit: Habit, template: str | None) -> PreTrainedTokenizerFast:
    if habit.by_tokenizer:
        core.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", core.token_to_id("<|bos|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>" if habit.known else None,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[3:],
    )
    if template is not None:
        tokenizer.chat_template = "{{ bos_token }}" * habit.by_template + template
    return tokenizer


ALL = [(build(habit), habit) for build in (byte_tokenizer, word_tokenizer) for habit in HABITS]


def ask(text: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}]]


def spell(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("tokenizer", "habit"), ALL)
@given(conversation=MESSAGES)
def test_a_prompt_has_one_bos_where_the_model_has_one(tokenizer, habit, conversation):
    # field failure 60
    [tokens] = encode_prompts(tokenizer, [conversation])
    bos = tokenizer.convert_tokens_to_ids("<|bos|>")
    assert tokens.count(bos) == habit.num_bos
    assert habit.num_bos == 0 or tokens[0] == bos


@pytest.mark.parametrize("habit", HABITS)
@given(conversation=MESSAGES)
def test_a_prompt_spells_what_the_template_renders(habit, conversation):
    tokenizer = byte_tokenizer(habit)
    [tokens] = encode_prompts(tokenizer, [conversation])
    body = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in conversation)
    expected = "<|bos|>" * habit.num_bos + body + "<|assistant|>"
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == expected


@given(conversations=st.lists(MESSAGES, max_size=4))
def test_a_batch_is_encoded_as_its_members_are(conversations):
    tokenizer = ALL[4][0]
    alone = [encode_prompts(tokenizer, [conversation])[0] for conversation in conversations]
    assert encode_prompts(tokenizer, conversations) == alone


def test_arguments_of_the_template_reach_it():
    tokenizer = byte_tokenizer(HABITS[0])
    [tokens] = encode_prompts(tokenizer, ask("hi"), {"hint": "hmm"})
    assert tokenizer.decode(tokens).endswith("<|assistant|>hmm")


def test_an_argument_that_minirl_sets_is_refused():
    with pytest.raises(ValueError, match="chat_template_kwargs: 'tokenize'"):
        encode_prompts(byte_tokenizer(HABITS[0]), ask("hi"), {"tokenize": True})


def test_a_tokenizer_without_template_is_refused_by_name(tmp_path):
    byte_tokenizer(HABITS[0], template=None).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    with pytest.raises(ValueError, match=f"{tmp_path}.*no chat template.*chat_template.jinja"):
        encode_prompts(tokenizer, ask("hi"))


def test_a_message_that_spells_bos_is_refused_with_its_index():
    conversations = ask("fine") + ask("a <|bos|> b")
    with pytest.raises(ValueError, match=r"conversation 1 .*'<\|bos\|>'"):
        encode_prompts(byte_tokenizer(HABITS[4]), conversations)


def test_a_template_that_writes_bos_twice_is_refused():
    tokenizer = byte_tokenizer(HABITS[3], template="{{ bos_token }}" + TURNS)
    with pytest.raises(ValueError, match="two BOS"):
        encode_prompts(tokenizer, ask("hi"))


def test_a_template_that_renders_nothing_is_refused():
    with pytest.raises(ValueError, match="conversation 0 as an empty prompt"):
        encode_prompts(byte_tokenizer(HABITS[0], template="{# nothing #}"), ask("hi"))


def test_what_a_template_refuses_is_reported():
    tokenizer = byte_tokenizer(HABITS[0], template="{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        encode_prompts(tokenizer, ask("hi"))


@given(texts=st.lists(st.text(), max_size=4))
def test_sampled_text_is_rendered_as_it_is_without_special_tokens(texts):
    tokenizer = ALL[2][0]
    assert decode(tokenizer, [spell(tokenizer, text + "<|end|>") for text in texts]) == texts


def test_a_space_before_punctuation_stays():
    tokenizer = ALL[7][0]
    assert decode(tokenizer, [spell(tokenizer, "I do n't , he 's .")]) == ["I do n't , he 's ."]


def test_a_token_outside_the_vocabulary_has_no_text():
    tokenizer = ALL[0][0]
    assert decode(tokenizer, [[*spell(tokenizer, "sun"), 5000]]) == ["sun"]


@pytest.mark.parametrize(
    ("given", "expected"), [(None, (1,)), (7, (1, 7)), ([9, 1, 7], (1, 7, 9)), ([], (1,))]
)
def test_every_end_token_counts(given, expected):
    # field failure 18
    assert stop_token_ids(ALL[0][0], given) == expected


def test_no_end_token_at_all_is_refused():
    tokenizer = byte_tokenizer(HABITS[0])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end token"):
        stop_token_ids(tokenizer, None)


def test_a_negative_end_token_is_refused():
    with pytest.raises(ValueError, match="-1"):
        stop_token_ids(ALL[0][0], [-1, 3])


def test_a_saved_tokenizer_is_loaded_with_its_template(tmp_path):
    tokenizer = ALL[4][0]
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    assert encode_prompts(loaded, ask("the sun")) == encode_prompts(tokenizer, ask("the sun"))


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy.tokenizer.name=.*nowhere.*no such folder"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path / "nowhere")))


def test_a_folder_without_tokenizer_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path)))


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(TokenizerConfig(name=str(tmp_path)))


def test_an_unknown_hub_name_is_refused(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="name='nobody/nothing'"):
        load_tokenizer(TokenizerConfig(name="nobody/nothing"))


def test_code_beside_a_tokenizer_is_never_run(tmp_path):
    ALL[0][0].save_pretrained(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Custom: ...\n")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    file.write_text(json.dumps(config | {"tokenizer_class": "Custom"}))
    with contextlib.suppress(ValueError):
        load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    assert not ran.exists()
