"""From conversations to the tokens of a prompt, and from sampled tokens to text: once each, here.

The chat template is rendered and tokenised by this module alone, and the tokeniser is told not to
add special tokens, so no prompt begins with two. The special tokens of a prompt are the template's:
a message that spells some stays text, and no message adds, moves or removes one. What a model
sampled is rendered for reward functions and logs; nothing is ever tokenised again.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

from minirl.config.loader import refuse
from minirl.config.policy import SpecialTokensInMessages, TokenizerConfig
from minirl.data.special_tokens import Conversation, Tokens, encode, tokens_of
from minirl.data.special_tokens import Message as Message
from minirl.data.special_tokens import Tokenizer as Tokenizer
from minirl.files import shorten

KWARGS = "policy.tokenizer.chat_template_kwargs"
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def load_tokenizer(cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `policy.tokenizer.name` names, with the chat template that is asked for.

    A folder is read as it is. Any other name is looked up in the local Hugging Face cache, and
    on the hub only if it is not there. Code that ships with a tokenizer is never run.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer, the name is not found, or the
            chat template is neither a template nor a readable file.
    """
    tokenizer, template = _load(cfg), cfg.chat_template
    if template is None:
        tokenizer.chat_template = PASSTHROUGH
    elif template.lower() != "default":
        tokenizer.chat_template = template if "{" in template else _template_file(template)
    return tokenizer


def _template_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"policy.tokenizer.chat_template={name!r}: no Jinja template, which has braces, and no "
            f"file of one ({error}); give one of the two, default, or null for the messages alone"
        ) from error


def _load(cfg: TokenizerConfig) -> Tokenizer:
    name, key = cfg.name, f"policy.tokenizer.name={shorten(cfg.name)!r}"
    folder = Path(name).expanduser()
    # Not pathlib's question, which fails where a name is too long.
    if os.path.isdir(folder):
        files = ("tokenizer_config.json", "tokenizer.json")
        if not any((folder / file).is_file() for file in files):
            raise ValueError(
                f"{key}: the folder holds neither {files[0]} nor {files[1]}; name a folder that "
                "`save_pretrained` of a tokenizer has written"
            )
        return _from_pretrained(str(folder), key, local=True)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{key}: there is no such folder; give an existing one or a hub name")
    try:
        return _from_pretrained(name, key, local=True)
    except ValueError:
        return _from_pretrained(name, key, local=False)


def _from_pretrained(name: str, key: str, *, local: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return cast(
            Tokenizer,
            AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{key}: no tokenizer could be loaded from there: {error}") from error


def encode_prompts(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens_in_messages: SpecialTokensInMessages = "literal",
    rows: Sequence[int] | None = None,
) -> list[Tokens]:
    """The tokens after which the assistant's answer begins, one tuple per conversation.

    Each prompt starts with exactly one BOS if the template writes it or the tokenizer would add it
    (white space that a template writes before it is left out); otherwise it has none, whether or
    not the tokenizer knows such a token.

    Its special tokens are the template's alone. Where a message spells one, it is tokenised as any
    other text, or refused. `rows` are the numbers of the conversations in errors.

    Raises:
        ValueError: there is no chat template, the template refuses a conversation or renders
            nothing for it, it does not read an argument, it writes today's date or BOS twice, or a
            message spells a special token that is refused or cannot be kept as text.
    """
    if not conversations:
        return []
    names = [f"row {i}" for i in rows or ()] or [
        f"conversation {i}" for i in range(len(conversations))
    ]
    tokens = encode(
        tokenizer,
        conversations,
        partial(_render, tokenizer, chat_template_kwargs),
        names,
        special_tokens_in_messages,
    )
    bos = (tokenizer.bos_token_id,)
    adds_bos = tokens_of(tokenizer, [""], add_special_tokens=True)[0][:1] == bos
    return [_prompt(tokenizer, *pair, adds_bos) for pair in zip(names, tokens, strict=True)]


def _prompt(tokenizer: Tokenizer, name: str, row: Tokens, adds_bos: bool) -> Tokens:
    """A rendered conversation, with BOS where it belongs."""
    template, start = f"the chat template of {tokenizer.name_or_path!r}", _bos_at(tokenizer, row)
    if start is not None:
        row = row[start:]
        refuse(
            _bos_at(tokenizer, row[1:]) is not None,
            f"{template} begins {name} with two BOS tokens {tokenizer.bos_token!r}; write it once "
            "in the template",
        )
    elif adds_bos and tokenizer.bos_token_id is not None:
        row = (tokenizer.bos_token_id, *row)
    refuse(not row, f"{template} renders {name} as an empty prompt; there is nothing to continue")
    return row


def _bos_at(tokenizer: Tokenizer, row: Tokens) -> int | None:
    """Where BOS stands, if nothing but white space is before it."""
    if tokenizer.bos_token_id not in row:
        return None
    at = row.index(tokenizer.bos_token_id)
    return None if _texts(tokenizer, [row[:at]])[0].strip() else at


# --------------------------------------------------------------------------------- chat templates


def _render(
    tokenizer: Tokenizer,
    given: Mapping[str, Any] | None,
    conversations: Sequence[Conversation],
    *,
    add_generation_prompt: bool = True,
) -> list[str]:
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {name!r} has no chat template, which turns prompts into tokens; take the "
            "model's chat variant, or name a template in policy.tokenizer.chat_template, or put "
            "a chat_template.jinja beside its tokenizer.json"
        )
    arguments = _arguments(tokenizer, given or {})
    with _template_errors(name):
        return tokenizer.apply_chat_template(
            [list(conversation) for conversation in conversations],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **arguments,
        )


@contextmanager
def _template_errors(name: str) -> Iterator[None]:
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise ValueError(f"the chat template of {name!r} fails: {error}") from error


def _arguments(tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template gets besides the messages: `given`, and a date that stands still.

    Raises:
        ValueError: one of them does not reach the template, or the template does not read it.
    """
    from jinja2 import meta, nodes
    from transformers.utils import chat_template_utils

    with _template_errors(tokenizer.name_or_path):
        source = tokenizer.get_chat_template(tools=given.get("tools"))
        environment = cast(Any, chat_template_utils)._compile_jinja_template(source).environment
        tree: nodes.Template = environment.parse(source)
    read = meta.find_undeclared_variables(tree)  # without the environment's own functions
    if any(name.name == "strftime_now" for name in tree.find_all(nodes.Name)):
        read.add("date_string")
    taken = {*signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    taken = (taken | {*environment.globals, "messages"}) - {"tools", "documents"}
    names = sorted(read - taken)
    for name in given:
        refuse(name in taken, f"{KWARGS}: {name!r} is not the template's to read; remove it")
        near = " or ".join(get_close_matches(name, names))
        hint = f"did you mean {near}?" if near else f"it reads {', '.join(names) or 'none'}"
        refuse(
            name not in names,
            f"{KWARGS}: {name!r} is not read by the chat template of {tokenizer.name_or_path!r}; "
            f"{hint}",
        )

    def strftime_now(form: str) -> str:
        day = given.get("date_string")
        try:
            return date.fromisoformat(str(day)).strftime(form)
        except ValueError as error:
            raise ValueError(
                f"{KWARGS}: date_string is {day!r}, and the chat template of "
                f"{tokenizer.name_or_path!r} writes today's date, with which a resumed run would "
                "train on other prompts; set it, for example {date_string: '2026-01-31'}"
            ) from error

    return {**given, "strftime_now": strftime_now}


ANSWER = "Quetzalcoatl"


def unstopped(
    tokenizer: Tokenizer,
    chat_template_kwargs: Mapping[str, Any] | None,
    stop_token_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> str | None:
    """What the chat template writes after an answer, if that does not end one.

    None also where it writes nothing but white space there, or takes no answers. An answer ends
    with the first token of it, or with any stop string in it.
    """
    said = [Message(role="user", content="a"), Message(role="assistant", content=ANSWER)]
    try:
        [text] = _render(tokenizer, chat_template_kwargs, [said], add_generation_prompt=False)
    except ValueError:  # Prompts were rendered before, so it is the answer that it refuses.
        return None
    _, found, after = text.rpartition(ANSWER)
    after = after.strip()
    first = tokens_of(tokenizer, [after])[0][:1]
    ends = any(stop in after for stop in stop_strings) or set(first) <= set(stop_token_ids)
    return after if found and after and not ends else None


# ------------------------------------------------------------------------------- tokens to text


def decode(
    tokenizer: Tokenizer, completions: Sequence[Sequence[int]], stop_token_ids: Sequence[int] = ()
) -> list[str]:
    """The text of sampled tokens, without the token that ended it and padding behind it.

    What ends a text is the tokenizer's EOS and those of `stop_token_ids` that its vocabulary was
    extended by: a stop token that is a word, such as `}`, is part of the answer. Any other special
    token keeps its text, so `1</think>4` is never 14; white space stays as it is.

    A token outside the tokenizer's vocabulary (models pad theirs) has no text.
    """
    if not completions:
        return []
    added = tokenizer.added_tokens_decoder
    ends = {
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        *(i for i in stop_token_ids if i in added),
    }
    kept: list[list[int]] = []
    for tokens in completions:
        size = len(tokens)
        while size and tokens[size - 1] in ends:
            size -= 1
        kept.append(list(tokens[:size]))
    return _texts(tokenizer, kept)


def _texts(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    return tokenizer.batch_decode(
        [list(row) for row in rows], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Tokens from this id on have no text."""
    return max(tokenizer.get_vocab().values()) + 1


def stop_token_ids(
    tokenizer: Tokenizer, generation_eos_ids: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: the tokenizer's EOS and those of the model.

    `generation_eos_ids` is `eos_token_id` of the model's generation config, which may list several.

    Raises:
        ValueError: there is none, or one is negative.
    """
    given = [generation_eos_ids] if isinstance(generation_eos_ids, int) else generation_eos_ids
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = tuple(sorted({*own, *(given or ())}))
    if not ids:
        raise ValueError(
            f"neither tokenizer {tokenizer.name_or_path!r} nor the model's generation config names "
            "an end token; set eos_token of the one or eos_token_id of the other"
        )
    if ids[0] < 0:
        raise ValueError(f"end token id {ids[0]} is negative; correct generation_config.json")
    return ids
