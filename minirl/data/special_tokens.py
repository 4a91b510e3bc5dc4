"""Special tokens in text: what a tokenizer takes for control, in prompts that must not obey it.

In: a tokenizer, conversations, and a function that renders them by the chat template. Out: tokens,
of which the special ones are the template's, whatever the messages say. A token that a tokenizer
merely added, such as `<think>` where it is not special, is text.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from minirl.config.loader import refuse
from minirl.config.policy import SpecialTokensInMessages


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message]
Tokens: TypeAlias = tuple[int, ...]


if TYPE_CHECKING:

    class Tokenizer(Protocol):
        """What minirl uses of a Hugging Face tokenizer. Called, it maps texts to `input_ids`."""

        name_or_path: str
        chat_template: str | dict[str, str] | None
        bos_token: str | None
        bos_token_id: int | None
        eos_token_id: int | None
        pad_token_id: int | None
        unk_token_id: int | None
        special_tokens_map: Mapping[str, str]
        added_tokens_decoder: Mapping[int, Any]
        add_tokens: Callable[[list[Any]], int]
        convert_tokens_to_ids: Callable[[str], int]
        get_chat_template: Callable[..., str]
        apply_chat_template: Callable[..., list[str]]
        get_vocab: Callable[[], Mapping[str, int]]
        batch_decode: Callable[..., list[str]]
        __call__: Callable[..., Mapping[str, list[list[int]]]]

else:
    # At run time there is nothing to check against: Hugging Face serves the special tokens through
    # `__getattr__`, which `isinstance` does not see.
    Tokenizer = object


RenderFn: TypeAlias = Callable[[Sequence[Conversation]], list[str]]


def tokens_of(tokenizer: Tokenizer, texts: Sequence[str], **settings: bool) -> list[Tokens]:
    """Each text's tokens; the tokenizer adds none unless `settings` say so."""
    settings = {"add_special_tokens": False, **settings}
    rows = tokenizer(list(texts), return_attention_mask=False, verbose=False, **settings)
    return [tuple(row) for row in rows["input_ids"]]


def encode(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    render: RenderFn,
    names: Sequence[str],
    in_messages: SpecialTokensInMessages,
) -> list[Tokens]:
    """The tokens of each conversation as rendered, its special ones written by the template alone.

    What messages spell of them is tokenised as any other text, or refused. A conversation that
    spells none has the tokens that the tokenizer gives what it renders as.

    Raises:
        ValueError: a message spells a special token, and that is to be refused or cannot be text;
            the error has the conversation's name.
    """
    texts = render(conversations)
    tokens, pattern = tokens_of(tokenizer, texts), _pattern(tokenizer)
    suspects = _suspects(tokenizer, conversations, render, tokens)
    asked = [(conversations[i], texts[i]) for i in suspects]
    as_text = _as_text(tokenizer, asked, render) if asked else []
    for i, row in zip(suspects, as_text, strict=True):
        spelled = sorted(_spelled(pattern, conversations[i]))
        facts = f"{names[i]} contains {' and '.join(map(repr, spelled)) or 'control tokens'}"
        if row is None:
            raise ValueError(
                f"{facts}, which tokenizer {tokenizer.name_or_path!r} and its chat template cannot "
                "keep as text; remove it from the data"
            )
        refuse(
            in_messages == "refuse" and (bool(spelled) or row != tokens[i]),
            f"{facts}, special to tokenizer {tokenizer.name_or_path!r}; remove it from the data, "
            "or keep it as text with policy.tokenizer.special_tokens_in_messages=literal",
        )
        tokens[i] = row
    return tokens


def num_spelled(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> int:
    """How many conversations hold the text of a special token in a message."""
    pattern = _pattern(tokenizer)
    return sum(bool(_spelled(pattern, conversation)) for conversation in conversations)


def _special(tokenizer: Tokenizer) -> dict[int, Any]:
    return {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """The text of any special token; of several at one place the longest, as tokenizers do."""
    texts = sorted((str(token) for token in _special(tokenizer).values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _spelled(pattern: re.Pattern[str], conversation: Conversation) -> set[str]:
    return {text for message in conversation for text in pattern.findall(message["content"])}


def _suspects(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    render: RenderFn,
    tokens: Sequence[Tokens],
) -> list[int]:
    """Which prompts have other special tokens than if the messages said "a", or spell some.

    The token of what has no token of its own does not count.
    """
    shapes = [tuple((m["role"], m["content"].strip() and "a") for m in c) for c in conversations]
    distinct = list(dict.fromkeys(shapes))
    plain = [[Message(role=role, content=content) for role, content in s] for s in distinct]
    ids, pattern = _special(tokenizer).keys() - {tokenizer.unk_token_id}, _pattern(tokenizer)

    def special(row: Tokens) -> list[int]:
        return [token for token in row if token in ids]

    rows = tokens_of(tokenizer, render(plain))
    usual = {shape: special(row) for shape, row in zip(distinct, rows, strict=True)}
    return [
        i
        for i, (shape, row) in enumerate(zip(shapes, tokens, strict=True))
        if special(row) != usual[shape] or _spelled(pattern, conversations[i])
    ]


def _as_text(
    tokenizer: Tokenizer, asked: Sequence[tuple[Conversation, str]], render: RenderFn
) -> list[Tokens | None]:
    """The tokens of conversations if all that messages spell is text; given with their renderings.

    Special tokens in messages are hidden from the template behind characters that occur nowhere
    else, so those in what it renders are its own. They too become such characters, which a copy of
    the tokenizer has as tokens, alike but not special; the copy takes special tokens for text.

    None where that fails: the template reads what was hidden or makes a special token out of a
    message's text, or the tokenizer finds one although it was told not to.
    """
    pattern, special = _pattern(tokenizer), _special(tokenizer)
    used = set("".join(text + "".join(m["content"] for m in c) for c, text in asked))
    unused = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used)
    hidden = {str(token): next(unused) for token in special.values()}
    own = {str(token): next(unused) for token in special.values()}

    def rendered(change: Callable[[str], str]) -> list[str]:
        changed = [
            [Message(role=m["role"], content=change(m["content"])) for m in conversation]
            for conversation, _ in asked
        ]
        return [pattern.sub(lambda found: own[found[0]], text) for text in render(changed)]

    masked = rendered(lambda text: pattern.sub(lambda found: hidden[found[0]], text))
    harmless = rendered(lambda text: f"a{pattern.sub('a', text)}a" if text.strip() else text)
    shown = [text.translate({ord(c): t for t, c in hidden.items()}) for text in masked]
    spelled = {ord(char): text for text, char in own.items()}
    apart, ids = _with_stand_ins(tokenizer, own)
    real = {ids[own[str(token)]]: i for i, token in special.items()}
    known = (special.keys() - {tokenizer.unk_token_id}) | real.keys()
    result: list[Tokens | None] = []
    rows = tokens_of(apart, shown, split_special_tokens=True)
    for row, text, usual, (_, plain) in zip(rows, shown, harmless, asked, strict=True):
        written = [ids[c] for c in text if c in ids]
        holds = (
            text.translate(spelled) == plain
            and written == [ids[c] for c in usual if c in ids]
            and written == [token for token in row if token in known]
        )
        result.append(tuple(real.get(token, token) for token in row) if holds else None)
    return result


def _with_stand_ins(
    tokenizer: Tokenizer, stand_ins: Mapping[str, str]
) -> tuple[Tokenizer, dict[str, int]]:
    """A copy that has characters for special tokens as tokens that are not special; their ids."""
    from tokenizers import AddedToken

    apart = copy.deepcopy(tokenizer)
    added = [
        AddedToken(
            stand_ins[str(token)],
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=False,
        )
        for token in _special(tokenizer).values()
    ]
    apart.add_tokens(added)
    return apart, {char: apart.convert_tokens_to_ids(char) for char in stand_ins.values()}
