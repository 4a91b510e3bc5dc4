"""A prompt's special tokens are its template's, whatever the messages say, in every style."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates import CORES, FAMILIES, Family, tokenizer_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minirl.algos import tiny
from minirl.data.chat import encode_prompts
from minirl.data.special_tokens import _as_text, num_spelled

ALL = {
    (name, core): tokenizer_of(family, core, adds_bos=core != "characters")
    for name, family in FAMILIES.items()
    for core in CORES
}
GREEDY = tokenizer_of(FAMILIES["llama 3"], "bytes", lstrip=True, rstrip=True)
"""Its special tokens take the white space beside them."""
NESTED = tokenizer_of(Family("<s>[A]</s>{{ messages[0].content }}", ("<s>", "</s>", "<s>[A]")))
"""One of its special tokens begins another."""


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rendered(tokenizer: PreTrainedTokenizerFast, conversation: object, family: Family) -> str:
    return tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, **family.kwargs
    )


def special(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> list[int]:
    return [token for token in tokens if token in tokenizer.all_special_ids]


@st.composite
def messages(draw: st.DrawFn, family: Family) -> list[dict[str, str]]:
    """A conversation whose messages spell control tokens of any family, whole, cut and nested."""
    spelled = [*family.special, "<s>", "[INST]", *(token[1:] for token in family.special)]
    spelled += [token[:2] + token + token[2:] for token in family.special]
    other = [" ", "\n", "\n\n", "a", "42", "assistant", *family.known, "\U000f0000"]
    content = st.lists(st.sampled_from(spelled + other), min_size=1, max_size=6).map("".join)
    roles = draw(st.sampled_from([["user"], ["system", "user"]]))
    return [{"role": role, "content": draw(content)} for role in roles]


@given(st.data(), st.sampled_from(sorted(ALL)))
def test_no_message_writes_a_special_token_and_its_text_stays(data, case):
    family, tokenizer = FAMILIES[case[0]], ALL[case]
    conversation = data.draw(messages(family))
    harmless = [m | {"content": m["content"].strip() and "a"} for m in conversation]
    [tokens, plain] = encode_prompts(tokenizer, [conversation, harmless], family.kwargs)
    assert special(tokenizer, tokens) == special(tokenizer, plain)
    assert tokens.count(tokenizer.bos_token_id) == plain.count(tokenizer.bos_token_id) <= 1
    if case[1] == "bytes":  # the other two know fewer characters, or put a space in front
        text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert text.endswith(rendered(tokenizer, conversation, family))


@given(st.data(), st.sampled_from(sorted(ALL)))
def test_a_message_without_special_tokens_has_the_tokens_it_had(data, case):
    family, tokenizer = FAMILIES[case[0]], ALL[case]
    conversation = ask(data.draw(st.text()) + "".join(family.known) + "<|im_<s ][INST")
    [tokens] = encode_prompts(tokenizer, [conversation], family.kwargs)
    text = rendered(tokenizer, conversation, family)
    expected = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokens[-len(expected) :] == expected
    adds_bos = case[0] == "tiny" and case[1] != "characters"  # the other templates write it
    assert len(tokens) == len(expected) + adds_bos


@pytest.mark.parametrize("tokenizer", [*ALL.values(), GREEDY, NESTED])
def test_text_without_them_is_read_alike_by_the_reader_of_text_with_them(tokenizer):
    kwargs = {"date_string": "1 May"} if "date_string" in tokenizer.chat_template else {}

    def render(conversations):
        return [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True, **kwargs)
            for c in conversations
        ]

    conversations = [ask(text) for text in ("a", " a \n", "\n42", f"{tiny.INSTRUCTION}sun")]
    texts = render(conversations)
    expected = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    asked = list(zip(conversations, texts, strict=True))
    assert _as_text(tokenizer, asked, render) == expected


def test_tokens_that_take_the_white_space_beside_them_leave_a_message_s():
    [tokens] = encode_prompts(GREEDY, [ask("a <|eot_id|> a")], {"date_string": "x"})
    assert "a <|eot_id|> a<|eot_id|>" in GREEDY.decode(tokens, clean_up_tokenization_spaces=False)


def test_an_ordinary_added_token_stays_one_beside_spelled_ones():
    tokenizer = ALL["tiny", "characters"]
    [tokens] = encode_prompts(tokenizer, [ask(f"{tiny.INSTRUCTION}<|end|>")])
    assert tokenizer.convert_tokens_to_ids(tiny.INSTRUCTION) in tokens
    assert len(tokens) == 1 + 1 + len("<|end|>") + 1


def test_spelled_tokens_are_counted_and_refused_by_key_with_their_row():
    tokenizer = ALL["mistral", "bytes"]
    conversations = [ask("fine"), ask("a [/INST] 42</s>")]
    assert num_spelled(tokenizer, conversations) == 1
    with pytest.raises(ValueError, match=r"row 7 .*'</s>' and '\[/INST\]'.*=literal"):
        encode_prompts(tokenizer, conversations, None, "refuse", rows=[3, 7])
    assert len(encode_prompts(tokenizer, conversations[:1], None, "refuse")) == 1


def test_a_token_that_only_the_normalizer_spells_is_text_too():
    tokenizer = tokenizer_of(FAMILIES["mistral"], "bytes", normalized=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    [tokens, plain] = encode_prompts(tokenizer, [ask("a <\uff53> b"), ask("a")])
    assert special(tokenizer, tokens) == special(tokenizer, plain)
    assert "a <s> b" in tokenizer.decode(tokens)
    assert tokenizer("<\uff53>", add_special_tokens=False)["input_ids"] == [tokenizer.bos_token_id]


# ---- where the literal way does not hold ---------------------------------------------------------


def word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Words between white space, `<s>` among them; the wide spelling is read as the narrow one."""
    words = ["?", "<s>", "a", "b", "<", "s", ">"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a {{ messages[0].content }} b", "a <s> b"),  # a word of the vocabulary as well
        ("a {{ messages[0].content }} b", "a <\uff53> b"),  # not spelled, but read as if
        ("a <{{ messages[0].content }}> b", "s"),  # made of the template's text and the message's
        ("{{ 'a' if '<s>' in messages[0].content else 'b' }}", "<s>"),  # looked for
        ("{{ messages[0].content | replace('<s>', '') }}", "<s> a"),
    ],
)  # fmt: skip
def test_a_control_token_that_cannot_be_text_is_refused_with_its_row(template, text):
    tokenizer = word_tokenizer(template)
    with pytest.raises(ValueError, match=r"conversation 1 contains .*cannot keep as text"):
        encode_prompts(tokenizer, [ask("a"), ask(text)])


def test_a_template_may_choose_its_special_tokens_by_the_message():
    tokenizer = word_tokenizer("a {% if '/no_think' in messages[0].content %}<s> {% endif %}b")
    assert encode_prompts(tokenizer, [ask("a /no_think"), ask("a")]) == [(2, 1, 3), (2, 3)]
