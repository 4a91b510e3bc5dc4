"""Datasets as values: tokenised prompts, and an infinite stream over them that a cursor resumes.

A dataset is read once, checked row by row, and never changes. The stream is a function of
(seed, cursor): every epoch is a fresh permutation, every rank sees the same one and takes its
share of what is drawn, so the order does not depend on the number of ranks.

Rows come from a local .jsonl or .parquet file, from a Hugging Face dataset (never running code that
ships with it), or from a task of `reasoning-gym`. Only this module reads data files.
"""

import json
import math
import pickle
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from minirl.chat import Message, Tokenizer, encode_prompts
from minirl.data_config import DataConfig, DatasetConfig
from minirl.policy_config import SpecialTokensInMessages
from minirl.rng import Key, fold_in, generator, key_of
from minirl.special_tokens import num_spelled
from minirl.types import Prompt
from minirl.verifier_pool import open_pool, run_


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


class _Row(NamedTuple):
    id: int
    input: str
    example: Mapping[str, object]


def load_datasets(
    data: DataConfig,
    tokenizer: Tokenizer,
    chat_template_kwargs: Mapping[str, Any] | None,
    seed: int,
    special_tokens_in_messages: SpecialTokensInMessages = "literal",
) -> Datasets:
    """Reads, checks and tokenises `data.train` and `data.validation`.

    If `data.validation` is null, `data.train.split_validation_size` of the distinct inputs are held
    out for it. Which ones is decided by a hash of the input, white space and case normalised, so
    the two sides are disjoint by content, and a row stays on its side when others come or go.
    `seed` shuffles; it does not affect the split.

    Raises:
        ValueError: a file, column, split, task or placeholder is missing or wrong, a value has the
            wrong type, a side is empty, or prompts are too long and not to be filtered.
    """
    train, num_duplicates = _rows(data.train, "data.train")
    where, source = "data.train (held out)", data.train
    held: list[_Row] = []
    if data.validation is not None:
        where, source = "data.validation", data.validation
        held, dropped = _rows(source, where)
        num_duplicates += dropped
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
    if not Path(path).is_file():
        raise ValueError(f"{key}={path!r}: there is no such file")
    return _decoded(Path(path), f"{key}={path!r}")


def _decoded(path: Path, key: str) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: the file is not UTF-8 ({error}); convert it") from error


def _rows(cfg: DatasetConfig, name: str) -> tuple[list[_Row], int]:
    """The dataset's checked rows, and how many duplicates were left out."""
    if cfg.data_path is not None:
        examples = _read_file(cfg.data_path, f"{name}.data_path={cfg.data_path!r}")
    elif cfg.dataset_name == "reasoning_gym":
        examples = _generate(str(cfg.task), cfg.task_kwargs, name)
    else:
        examples = _read_hub(cfg, name)
    if not examples:
        raise ValueError(f"{name}: the dataset is empty; at least one row is needed")
    input_key = "question" if cfg.dataset_name == "reasoning_gym" else cfg.input_key
    seen, rows = set[str](), list[_Row]()
    for index, example in enumerate(examples):
        text = _value(example, input_key, (str,), f"{name}.input_key", index)
        if cfg.env_name == "math":
            _value(example, cfg.output_key, (str, int, float), f"{name}.output_key", index)
        key = _normalise(str(text)) if cfg.deduplicate else str(index)
        if key not in seen:
            seen.add(key)
            rows.append(_Row(index, str(text), example))
    return rows, len(examples) - len(rows)


def _value(
    example: Mapping[str, object], column: str, types: tuple[type, ...], key: str, row: int
) -> object:
    """A row's value, which must have exactly one of `types` (True is no number)."""
    if column not in example:
        raise ValueError(f"{key}={column!r}: row {row} has only the columns {sorted(example)}")
    value = example[column]
    if type(value) not in types:
        allowed = " or ".join(t.__name__ for t in types)
        raise ValueError(
            f"{key}={column!r}: row {row} holds {value!r} of type {type(value).__name__}; "
            f"required is {allowed}"
        )
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key}={column!r}: row {row} holds half of a character ({error.reason}); repair it"
        ) from error
    return value


def _read_file(name: str, key: str) -> list[dict[str, object]]:
    path = Path(name)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{key}: the file must end in .jsonl or .parquet")
    if not path.is_file():
        raise ValueError(f"{key}: there is no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return cast("list[dict[str, object]]", pyarrow.parquet.read_table(path).to_pylist())
        except (ValueError, OSError) as error:
            raise ValueError(f"{key}: {error}") from error
    # Not through Arrow's or pandas's JSON readers: they turn text that looks like a date into one
    # and fill absent columns.
    rows: list[dict[str, object]] = []
    # Not splitlines: JSON text may hold other line ends than this one.
    text = _decoded(path, key).removesuffix("\n")
    for number, line in enumerate(text.split("\n") if text else [], 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{key}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{key}: line {number} holds no JSON object but {line.strip()!r}")
        rows.append(cast("dict[str, object]", row))
    return rows


def _read_hub(cfg: DatasetConfig, name: str) -> list[dict[str, object]]:
    import datasets

    key = f"{name}.dataset_name={cfg.dataset_name!r}"
    try:
        splits = datasets.get_dataset_split_names(str(cfg.dataset_name), cfg.subset)
        if cfg.split is None and len(splits) != 1:
            raise ValueError(f"it has the splits {splits}; set {name}.split to one of them")
        split = splits[0] if cfg.split is None else cfg.split
        table = datasets.load_dataset(str(cfg.dataset_name), cfg.subset, split=split)
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"{key}: {error}") from error
    return list(cast("Sequence[dict[str, object]]", table))


def _generate(task: str, task_kwargs: Mapping[str, Any], name: str) -> list[dict[str, object]]:
    """The rows of a reasoning-gym task.

    Made in a process of its own: several tasks iterate over sets of strings, so their rows would
    depend on this interpreter's hash seed and differ from rank to rank and from run to run.
    """
    settings = {"task": task, "task_kwargs": dict(task_kwargs)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        factory = "minirl.verifiers:reasoning_gym_writer"
        with open_pool(factory, settings, num_workers=1, timeout_s=math.inf) as pool:
            try:
                [outcome] = run_(pool, [(str(path),)])
                detail = outcome.detail
            except RuntimeError as error:
                detail = str(error)
        if detail:
            raise ValueError(
                f"{name}: reasoning-gym cannot make task {task!r} with task_kwargs "
                f"{dict(task_kwargs)}: {detail.strip().splitlines()[-1]}"
            )
        return cast("list[dict[str, object]]", pickle.loads(path.read_bytes()))
