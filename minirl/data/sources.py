"""Rows as their source has them: a file, a Hugging Face dataset, a task of reasoning-gym.

Only this module reads data files.
"""

import json
import math
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from minirl.config.data import DatasetConfig
from minirl.envs.pool import open_pool, run_
from minirl.files import parse_json, shorten


def decoded(path: Path, key: str) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: the file is not UTF-8 ({error}); convert it") from error
    except OSError as error:
        raise ValueError(f"{key}: the file cannot be read ({error.strerror})") from error


def read_file(name: str, key: str, verbatim: str | None) -> list[dict[str, object]]:
    """The file's rows. JSON's numbers in the column `verbatim` stay the text that they are."""
    path = Path(name)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{key}: the file must end in .jsonl or .parquet")
    if not os.path.isfile(name):
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
    text = decoded(path, key).removesuffix("\n")
    if text.lstrip().startswith("["):
        raise ValueError(
            f"{key}: the file holds a JSON array, and a .jsonl holds one JSON object a line; "
            "convert it, for example with jq -c '.[]'"
        )
    for number, line in enumerate(text.split("\n") if text else [], 1):
        if not line.strip():
            raise ValueError(f"{key}: line {number} is blank; remove it")
        row = parse_json(line, f"{key}: line {number}")
        if not isinstance(row, dict):
            raise ValueError(f"{key}: line {number} holds no JSON object but {shorten(line)!r}")
        if isinstance(cast("dict[str, object]", row).get(verbatim or ""), int | float):
            row[verbatim] = json.loads(line, parse_float=str, parse_int=str)[verbatim]
        rows.append(cast("dict[str, object]", row))
    return rows


def read_hub(cfg: DatasetConfig, name: str) -> list[dict[str, object]]:
    """The rows of a dataset on the Hugging Face hub, or in its cache."""
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


def generate(task: str, task_kwargs: Mapping[str, Any], name: str) -> list[dict[str, object]]:
    """The rows of a reasoning-gym task.

    Made in a process of its own: several tasks iterate over sets of strings, so their rows would
    depend on this interpreter's hash seed and differ from rank to rank and from run to run.
    """
    settings = {"task": task, "task_kwargs": dict(task_kwargs)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        factory = "minirl.envs.verifiers:reasoning_gym_writer"
        with open_pool(factory, settings, num_workers=1, timeout_s=math.inf) as pool:
            try:
                [outcome] = run_(pool, [(str(path),)])
                detail = outcome.detail
            except RuntimeError as error:
                detail = str(error)
        if detail:
            raise ValueError(
                f"{name}: reasoning-gym cannot make task {task!r} with task_kwargs "
                f"{shorten(str(dict(task_kwargs)))}: {detail.strip().splitlines()[-1]}"
            )
        return cast("list[dict[str, object]]", pickle.loads(path.read_bytes()))
