"""Prompts: one template, one BOS where the model has one, and the tokens of what was rendered."""

import contextlib
import json
from dataclasses import dataclass

import huggingface_hub.constants
import pytest
from configs import MINIMAL, edited, load_tree
from hypothesis import given
from hypothesis import strategies as st
from templates import CORES, FAMILIES, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from minirl.config.policy import TokenizerConfig
from minirl.data.chat import (
    decode,
    encode_prompts,
    load_tokenizer,
    stop_token_ids,
    unstopped,
)

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


@pytest.mark.parametrize(
    ("family", "given", "reason"),
    [
        ("qwen3", {"enable_thinkng": False}, "'enable_thinkng' is not.*mean enable_thinking"),
        ("qwen2.5", {"enable_thinking": False}, "'enable_thinking' is not read.*; it reads none"),
        ("qwen2.5", {"date_string": "1 May"}, "'date_string' is not read"),
        ("qwen2.5", {"add_special_tokens": False}, "'add_special_tokens' is not read"),
        ("qwen2.5", {"tools": []}, "'tools' is not read"),
        *(
            ("qwen3", {name: True}, f"'{name}' is not the template's to read")
            for name in (
                "conversation", "chat_template", "tokenize", "add_generation_prompt", "truncation",
                "padding", "max_length", "return_tensors", "return_dict", "continue_final_message",
                "messages", "eos_token", "raise_exception", "strftime_now", "namespace",
            )
        ),
    ],
)  # fmt: skip
def test_an_argument_that_the_template_does_not_read_is_refused(family, given, reason):
    with pytest.raises(ValueError, match=f"policy.tokenizer.chat_template_kwargs: {reason}"):
        encode_prompts(tokenizer_of(FAMILIES[family]), ask("hi"), given)


def test_what_a_template_reads_is_found_however_it_is_written():
    template = (
        "{% macro f() %}{{ a }}{% endmacro %}{% generation %}{{ f() }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.first and not b is defined %}{% set b = 'B' %}"
        "{{ b }}{% endif %}{% break %}{% endfor %}{{ tools[0] }}{# d #}{% set e = 1 %}"
    )
    tokenizer = byte_tokenizer(HABITS[0], template)
    [tokens] = encode_prompts(tokenizer, ask("hi"), {"a": "A", "tools": [{"x": "T"}]})
    assert tokenizer.decode(tokens) == "AB{'x': 'T'}"
    encode_prompts(tokenizer, ask("hi"), {"b": "b", "tools": [{}]})
    for name in ("d", "e", "m", "f", "loop"):
        with pytest.raises(ValueError, match=f"'{name}' is not read"):
            encode_prompts(tokenizer, ask("hi"), {name: 1})


def test_a_tokenizer_without_template_is_refused_by_name(tmp_path):
    byte_tokenizer(HABITS[0], template=None).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    with pytest.raises(ValueError, match=f"{tmp_path}.*no chat template.*chat_template.jinja"):
        encode_prompts(tokenizer, ask("hi"))


def test_a_message_that_spells_bos_is_refused_with_its_index():
    conversations = ask("fine") + ask("a <|bos|> b")
    with pytest.raises(ValueError, match=r"conversation 1 .*'<\|bos\|>'"):
        encode_prompts(byte_tokenizer(HABITS[4]), conversations, None, "refuse")


@pytest.mark.parametrize("space", [" ", "\n", "\n \t"])
@pytest.mark.parametrize("build", [byte_tokenizer, word_tokenizer])
@pytest.mark.parametrize("habit", HABITS[3:])
def test_white_space_before_bos_is_left_out(build, habit, space):
    tokenizer = build(habit)
    usual = encode_prompts(tokenizer, ask("hi"))
    tokenizer.chat_template = space + tokenizer.chat_template
    if space == " " or build is byte_tokenizer:  # the other one has no words for the rest
        assert encode_prompts(tokenizer, ask("hi")) == usual
    tokenizer.chat_template = f"{{{{ bos_token }}}}{space}{tokenizer.chat_template}"
    with pytest.raises(ValueError, match="two BOS"):
        encode_prompts(byte_tokenizer(habit, tokenizer.chat_template), ask("hi"))


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


# ---- the template of the config, the date, the end of an answer ----------------------------------


def test_the_config_names_a_template_its_text_or_none(tmp_path):
    ALL[0][0].save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text("é{{ messages[0].content }}", encoding="utf-8")

    def prompt(**template):
        tokenizer = load_tokenizer(TokenizerConfig(name=str(tmp_path), **template))
        conversation = [{"role": "system", "content": "S"}, *ask("hi")[0]]
        return tokenizer.decode(encode_prompts(tokenizer, [conversation])[0])

    usual = "<|system|>S<|end|><|user|>hi<|end|><|assistant|>"
    assert prompt() == prompt(chat_template="default") == usual
    assert prompt(chat_template=None) == "Shi"
    assert prompt(chat_template="<{{ messages[1].content }}>") == "<hi>"
    assert prompt(chat_template=str(tmp_path / "mine.jinja")) == "éS"
    for wrong in ("no/such.jinja", "chatml", str(tmp_path)):
        with pytest.raises(ValueError, match=f"policy.tokenizer.chat_template='{wrong}'"):
            prompt(chat_template=wrong)
    with pytest.raises(ValueError, match=r"chat template of .* fails: unexpected"):
        prompt(chat_template="{{ messages[ }}")


def test_a_template_keeps_its_braces_through_a_config_and_back():
    text = "{% if messages %}${x} {{ bos_token }}{% endif %}"
    run = load_tree(edited(MINIMAL, {"policy.tokenizer.chat_template": text.replace("$", "\\$")}))
    assert run.policy.tokenizer.chat_template == text
    dated = load_tree(MINIMAL, "policy.tokenizer.chat_template_kwargs={date_string: 2026-01-31}")
    assert dated.policy.tokenizer.chat_template_kwargs == {"date_string": "2026-01-31"}


DATED = "{{ messages[0].content }}{% if tools %}{{ strftime_now('%d %b %Y') }}{% endif %}"


def test_today_s_date_is_asked_for_and_stands_still():
    llama, other = tokenizer_of(FAMILIES["llama 3"]), byte_tokenizer(HABITS[0], DATED)
    for tokenizer, kwargs in ((llama, {}), (other, {"tools": [{}]})):
        with pytest.raises(ValueError, match=r"date_string is None.*today's date.*resumed run"):
            encode_prompts(tokenizer, ask("hi"), kwargs)
    [tokens] = encode_prompts(llama, ask("hi"), {"date_string": "1 May"})
    assert "Today: 1 May\n" in llama.decode(tokens)
    assert other.decode(encode_prompts(other, ask("hi"))[0]) == "hi"
    kwargs = {"tools": [{}], "date_string": "2026-01-31"}
    assert other.decode(encode_prompts(other, ask("hi"), kwargs)[0]) == "hi31 Jan 2026"
    with pytest.raises(ValueError, match="date_string is '1 May'"):
        encode_prompts(other, ask("hi"), kwargs | {"date_string": "1 May"})


ENDS = {"mistral": "</s>", "llama 3": "<|eot_id|>", "gemma": "<end_of_turn>", "tiny": "<|end|>"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("core", CORES)
def test_an_answer_ends_where_its_template_says(name, core):
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name], core)
    end = ENDS.get(name, "<|im_end|>")
    ids = [tokenizer.convert_tokens_to_ids(end), 5000]
    assert unstopped(tokenizer, family.kwargs, ids, ()) is None
    assert unstopped(tokenizer, family.kwargs, ids[1:], ()) == end
    assert unstopped(tokenizer, family.kwargs, [], (end,)) is None


@pytest.mark.parametrize(
    ("template", "stop_strings", "after"),
    [
        ("{{ messages[1].content }}", (), None),
        ("{{ messages[1].content }}\n", (), None),
        ("{{ messages[0].content }}<|user|>", (), None),  # it leaves answers out
        ("{% if messages[1] %}{{ raise_exception('no') }}{% endif %}", (), None),
        ("{{ messages[1].content }}\n\nUser:", (), "User:"),
        ("{{ messages[1].content }}\n\nUser:", ("User:",), None),
    ],
)
def test_a_template_may_end_answers_by_text_or_not_at_all(template, stop_strings, after):
    tokenizer = byte_tokenizer(HABITS[0], template)
    assert unstopped(tokenizer, None, [1], stop_strings) == after


# ---- tokens to text ------------------------------------------------------------------------------


@given(texts=st.lists(st.text(), max_size=4))
def test_sampled_text_is_rendered_as_it_is_without_its_end(texts):
    tokenizer = ALL[2][0]
    assert decode(tokenizer, [spell(tokenizer, text + "<|end|>") for text in texts]) == texts


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("1<|user|>4<|end|>", "1<|user|>4"),
        ("1<|end|>4<|system|><|pad|><|pad|>", "1<|end|>4"),
        ("<|pad|>1<|assistant|>", "<|pad|>1<|assistant|>"),
        ("(4)<|end|>", "(4)"),
        ("(4)", "(4)"),  # the token that ended it is a word of the answer
        ("<|end|>", ""),
    ],
)
def test_only_what_ended_an_answer_has_no_text(sampled, text):
    tokenizer = byte_tokenizer(HABITS[0])
    stops = tokenizer.convert_tokens_to_ids(["<|system|>", ")"])
    assert decode(tokenizer, [spell(tokenizer, sampled)], stops) == [text]


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
