"""From conversations to the tokens of a prompt, and from sampled tokens to text: once each, here.

The chat template is rendered and tokenised by this module alone, and the tokeniser is told not to
add special tokens, so no prompt begins with two. What a model sampled is rendered for reward
functions and logs; nothing is ever tokenised again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from minirl.files import shorten
from minirl.policy_config import TokenizerConfig


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


if TYPE_CHECKING:

    class Tokenizer(Protocol):
        """What minirl uses of a Hugging Face tokenizer. Called, it maps texts to `input_ids`."""

        name_or_path: str
        chat_template: str | dict[str, str] | None
        bos_token: str | None
        bos_token_id: int | None
        eos_token_id: int | None
        apply_chat_template: Callable[..., list[str]]
        batch_decode: Callable[..., list[str]]
        __call__: Callable[..., Mapping[str, list[list[int]]]]

else:
    # At run time there is nothing to check against: Hugging Face serves the special tokens through
    # `__getattr__`, which `isinstance` does not see.
    Tokenizer = object


def load_tokenizer(cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `policy.tokenizer.name` names; code that ships with it is never run.

    A folder is read as it is. Any other name is looked up in the local Hugging Face cache, and
    on the hub only if it is not there.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer, or the name is not found.
    """
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
    conversations: Sequence[Sequence[Message]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[int, ...]]:
    """The tokens after which the assistant's answer begins, one tuple per conversation.

    Each prompt starts with exactly one BOS if the template writes it or the tokenizer would add it;
    otherwise it has none, whether or not the tokenizer knows such a token.

    Raises:
        ValueError: there is no chat template, the template refuses a conversation or renders
            nothing for it, its argument is taken, it writes BOS twice, or a message spells BOS.
    """
    if not conversations:
        return []
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    for index, conversation in enumerate(conversations):
        if bos and any(bos in message["content"] for message in conversation):
            raise ValueError(
                f"conversation {index} contains the text {bos!r}, which the tokenizer "
                f"{tokenizer.name_or_path!r} reads as its BOS token; remove it from the data"
            )
    texts = _render(tokenizer, conversations, dict(chat_template_kwargs or {}))
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    head = () if bos_id is None or not _adds_bos(tokenizer, bos_id) else (bos_id,)
    prompts: list[tuple[int, ...]] = []
    for index, row in enumerate(rows["input_ids"]):
        tokens = tuple(row) if tuple(row[:1]) == head else (*head, *row)
        if not tokens:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} renders conversation {index} as "
                "an empty prompt; there is nothing to continue"
            )
        if bos_id is not None and tokens[:2] == (bos_id, bos_id):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} begins conversation {index} with "
                f"two BOS tokens {bos!r}; write it once in the template"
            )
        prompts.append(tokens)
    return prompts


def _adds_bos(tokenizer: Tokenizer, bos_id: int) -> bool:
    return tokenizer([""])["input_ids"][0][:1] == [bos_id]


def _render(
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[Message]],
    chat_template_kwargs: Mapping[str, Any],
) -> list[str]:
    from jinja2 import TemplateError

    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {name!r} has no chat template, which turns prompts into tokens; take the "
            "model's chat variant, or put a chat_template.jinja beside its tokenizer.json"
        )
    taken = {"conversation", "tokenize", "add_generation_prompt"} & set(chat_template_kwargs)
    if taken:
        raise ValueError(
            f"policy.tokenizer.chat_template_kwargs: {sorted(taken)[0]!r} is set by minirl itself; "
            "remove it"
        )
    try:
        return tokenizer.apply_chat_template(
            [list(conversation) for conversation in conversations],
            tokenize=False,
            add_generation_prompt=True,
            **chat_template_kwargs,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template of {name!r} fails: {error}") from error


def decode(tokenizer: Tokenizer, completions: Sequence[Sequence[int]]) -> list[str]:
    """The text of sampled tokens, special tokens left out, white space as it is.

    A token outside the tokenizer's vocabulary (models pad theirs) has no text.
    """
    if not completions:  # transformers takes an empty list for one empty sequence
        return []
    return tokenizer.batch_decode(
        [list(tokens) for tokens in completions],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


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
