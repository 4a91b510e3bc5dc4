"""Datasets as values: tokenised prompts, and an infinite stream over them that a cursor resumes.

A dataset is read once, checked row by row, and never changes. The stream is a function of
(seed, cursor): every epoch is a fresh permutation, every rank sees the same one and takes its
share of what is drawn, so the order does not depend on the number of ranks.

Rows come from a local .jsonl or .parquet file, from a Hugging Face dataset (never running code that
ships with it), or from a task of `reasoning-gym`.
"""

import math
import os
import string
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from minirl.config.data import DataConfig, DatasetConfig
from minirl.config.policy import SpecialTokensInMessages
from minirl.config.run import EnvConfig
from minirl.data.chat import Message, Tokenizer, encode_prompts
from minirl.data.references import references
from minirl.data.sources import decoded, generate, read_file, read_hub
from minirl.data.special_tokens import num_spelled
from minirl.files import shorten
from minirl.rng import Key, fold_in, generator, key_of
from minirl.types import Prompt

_ENV = EnvConfig()


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts and the order in which they are drawn."""

    prompts: tuple[Prompt, ...]
    """At least one. Their ids are row numbers of the source, so they may have gaps."""
    seed: int
    shuffle: bool
    num_filtered: int = 0
    """Rows left out because their prompt was too long."""
    num_spelled: int = 0
    """Rows whose messages hold the text of a special token, those left out included."""


class Datasets(NamedTuple):
    """The two sides of a run, and how they were made."""

    train: Dataset
    validation: Dataset | None
    num_duplicates: int
    """Rows left out by `deduplicate`, both datasets together."""
    num_shared: int
    """Validation rows whose input, normalised, also occurs in training; 0 if they were held out."""
    num_shown: int = 0
    """Rows left out by `leave_out_shown_answers`, both datasets together."""


class _Row(NamedTuple):
    id: int
    input: str
    example: Mapping[str, object]


def load_datasets(
    data: DataConfig,
    tokenizer: Tokenizer,
    chat_template_kwargs: Mapping[str, Any] | None,
    seed: int,
    env: EnvConfig = _ENV,
    special_tokens_in_messages: SpecialTokensInMessages = "literal",
) -> Datasets:
    """Reads, checks and tokenises `data.train` and `data.validation`.

    Under `math` each example holds its reference answer as text, which was judged equal to itself
    by processes that `env` sets up.

    If `data.validation` is null, `data.train.split_validation_size` of the distinct inputs are held
    out for it. Which ones is decided by a hash of the input, white space and case normalised, so
    the two sides are disjoint by content, and a row stays on its side when others come or go.
    `seed` shuffles; it does not affect the split.

    Raises:
        ValueError: a file, column, split, task or placeholder is missing or wrong, a value has the
            wrong type, a reference answer cannot be judged, a side is empty, or prompts are too
            long and not to be filtered.
    """
    train, num_duplicates, num_shown = _rows(data.train, "data.train", env)
    where, source = "data.train (held out)", data.train
    held: list[_Row] = []
    if data.validation is not None:
        where, source = "data.validation", data.validation
        held, dropped, shown = _rows(source, where, env)
        num_duplicates, num_shown = num_duplicates + dropped, num_shown + shown
    elif data.train.split_validation_size:
        train, held = _split(train, data.train)
    known = {_normalise(row.input) for row in train}
    num_shared = sum(_normalise(row.input) in known for row in held)

    def tokenised(rows: Sequence[_Row], cfg: DatasetConfig, name: str) -> Dataset:
        conversations = _conversations([row.input for row in rows], cfg, name)
        try:
            tokens = encode_prompts(
                tokenizer,
                conversations,
                chat_template_kwargs,
                special_tokens_in_messages,
                [row.id for row in rows],
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        prompts = [Prompt(r.id, t, r.example) for r, t in zip(rows, tokens, strict=True)]
        kept = _fitting(prompts, data, name)
        spelled = num_spelled(tokenizer, conversations)
        return Dataset(tuple(kept), seed, data.shuffle, len(prompts) - len(kept), spelled)

    return Datasets(
        tokenised(train, data.train, "data.train"),
        tokenised(held, source, where) if held else None,
        num_duplicates,
        num_shared,
        num_shown,
    )


def draw(dataset: Dataset, cursor: int, num: int) -> tuple[list[Prompt], int]:
    """The next `num` prompts of the stream, and the cursor behind them.

    The cursor counts the prompts drawn so far; 0 starts the stream. Drawing a, then b, gives what
    drawing a + b gives. Each epoch holds every prompt once, in an order of its own if shuffled.

    Raises:
        ValueError: the cursor or the number is negative.
    """
    if cursor < 0 or num < 0:
        raise ValueError(f"cannot draw {num} prompts at cursor {cursor}; both must be >= 0")
    size, drawn = len(dataset.prompts), list[Prompt]()
    while len(drawn) < num:
        done, offset = divmod(cursor + len(drawn), size)
        order = _order(dataset, done)[offset : offset + num - len(drawn)]
        drawn += [dataset.prompts[index] for index in order]
    return drawn, cursor + num


def epoch(dataset: Dataset, cursor: int) -> int:
    """How many times the stream has given out the whole dataset before `cursor`."""
    return cursor // len(dataset.prompts)


def _order(dataset: Dataset, number: int) -> list[int]:
    size = len(dataset.prompts)
    if not dataset.shuffle:
        return list(range(size))
    key = fold_in(key_of(dataset.seed), "data", number)
    return cast("list[int]", torch.randperm(size, generator=generator(key)).tolist())


def _normalise(text: str) -> str:
    return " ".join(text.split()).casefold()


def _split(rows: Sequence[_Row], cfg: DatasetConfig) -> tuple[list[_Row], list[_Row]]:
    """Training rows and held-out rows."""

    def is_held(row: _Row) -> bool:
        key = fold_in(Key(cfg.seed), "validation", _normalise(row.input))
        return key < cfg.split_validation_size * 2**63

    sides = [row for row in rows if not is_held(row)], [row for row in rows if is_held(row)]
    if not all(sides):
        raise ValueError(
            f"data.train.split_validation_size={cfg.split_validation_size} leaves "
            f"{len(sides[0])} rows to train on and {len(sides[1])} to validate on; use more rows "
            "or another share"
        )
    return sides


def _fitting(prompts: Sequence[Prompt], data: DataConfig, name: str) -> list[Prompt]:
    """The prompts of at most `max_input_seq_length` tokens; all of them, unless filtering is on."""
    limit = data.max_input_seq_length
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    num_long, longest = len(prompts) - len(kept), max(prompts, key=lambda p: len(p.tokens))
    facts = (
        f"{name}: {num_long} of {len(prompts)} prompts exceed data.max_input_seq_length={limit}; "
        f"the longest, row {longest.id}, has {len(longest.tokens)} tokens"
    )
    if num_long and not data.filter_overlong_prompts:
        raise ValueError(
            f"{facts}. Raise the limit, or leave them out with data.filter_overlong_prompts=true"
        )
    if not kept:
        raise ValueError(f"{facts}. None is left; raise the limit")
    return kept


def _conversations(inputs: Sequence[str], cfg: DatasetConfig, name: str) -> list[list[Message]]:
    """Each input, put into the prompt file's text, after the system prompt."""
    system: list[Message] = []
    if cfg.system_prompt_file is not None:
        text = _text_of(cfg.system_prompt_file, f"{name}.system_prompt_file")
        system = [Message(role="system", content=text)]
    template = "{}"
    if cfg.prompt_file is not None:
        template = _text_of(cfg.prompt_file, f"{name}.prompt_file")
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise ValueError(f"{name}.prompt_file={cfg.prompt_file!r}: {error}") from error
        if [field for field in fields if field is not None] != [""]:
            raise ValueError(
                f"{name}.prompt_file={cfg.prompt_file!r} must hold exactly one placeholder {{}}, "
                "for the input; write braces that belong to the text twice, as {{ and }}"
            )
    return [[*system, Message(role="user", content=template.format(text))] for text in inputs]


def _text_of(path: str, key: str) -> str:
    key = f"{key}={shorten(path)!r}"
    # Not pathlib's question, which fails where a name is too long.
    if not os.path.isfile(path):
        raise ValueError(f"{key}: there is no such file")
    return decoded(Path(path), key)


def _rows(cfg: DatasetConfig, name: str, env: EnvConfig) -> tuple[list[_Row], int, int]:
    """The checked rows; how many were left out as duplicates, and as ones that show the answer."""
    judged = cfg.output_key if cfg.env_name == "math" else None
    if cfg.data_path is not None:
        examples = read_file(cfg.data_path, f"{name}.data_path={shorten(cfg.data_path)!r}", judged)
    elif cfg.dataset_name == "reasoning_gym":
        examples = generate(str(cfg.task), cfg.task_kwargs, name)
    else:
        examples = read_hub(cfg, name)
    if not examples:
        raise ValueError(f"{name}: the dataset is empty; at least one row is needed")
    input_key = "question" if cfg.dataset_name == "reasoning_gym" else cfg.input_key
    seen, rows = set[str](), list[_Row]()
    for index, example in enumerate(examples):
        text = _checked(example, cfg, name, index, input_key, examples[0].keys())
        key = _normalise(text) if cfg.deduplicate else str(index)
        if key not in seen:
            seen.add(key)
            rows.append(_Row(index, text, example))
    if judged is not None:
        answers = references([(row.id, row.example[judged]) for row in rows], cfg, name, env)
        rows = [
            row._replace(example={**row.example, judged: answer})
            for row, answer in zip(rows, answers, strict=True)
        ]
    kept = (
        rows if not cfg.leave_out_shown_answers else [r for r in rows if not _shown(r, cfg, name)]
    )
    if not kept:
        raise ValueError(
            f"{name}.leave_out_shown_answers: every input contains its answer; set it to false"
        )
    return kept, len(examples) - len(rows), len(rows) - len(kept)


def _checked(
    example: Mapping[str, object],
    cfg: DatasetConfig,
    name: str,
    index: int,
    input_key: str,
    columns: Set[str],
) -> str:
    """The row's question, once all of the row that is read has been found right."""
    text = str(_value(example, input_key, (str,), f"{name}.input_key", index))
    if not text.strip():
        raise ValueError(
            f"{name}.input_key={input_key!r}: row {index} holds the empty question {text!r}; "
            "remove the row"
        )
    if cfg.env_name == "math":
        _value(example, cfg.output_key, (str, int, float), f"{name}.output_key", index)
    elif missing := columns - example.keys():
        raise ValueError(
            f"{name}: row {index} lacks the columns {shorten(str(sorted(missing)))} of row 0, "
            f"and env_name {cfg.env_name!r} may read them; write null where there is no value"
        )
    return text


def _shown(row: _Row, cfg: DatasetConfig, name: str) -> bool:
    """Whether a row's input contains its answer."""
    column = "answer" if cfg.dataset_name == "reasoning_gym" else cfg.output_key
    answer = _value(row.example, column, (str, int, float), f"{name}.output_key", row.id)
    return _normalise(str(answer)) in _normalise(row.input)


def _value(
    example: Mapping[str, object], column: str, types: tuple[type, ...], key: str, row: int
) -> object:
    """A row's value, which must have exactly one of `types` (True is no number)."""
    if column not in example:
        raise ValueError(
            f"{key}={column!r}: row {row} has only the columns {shorten(str(sorted(example)))}"
        )
    value = example[column]
    if type(value) not in types:
        allowed = " or ".join(t.__name__ for t in types)
        raise ValueError(
            f"{key}={column!r}: row {row} holds {shorten(repr(value))} of type "
            f"{type(value).__name__}; required is {allowed}"
        )
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{key}={column!r}: row {row} holds {value}; give a number or text")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key}={column!r}: row {row} holds half of a character ({error.reason}); repair it"
        ) from error
    return value
