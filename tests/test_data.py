"""Datasets: rows are checked, a cursor tells what comes next, held-out inputs are disjoint."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minirl.data import Dataset, Datasets, draw, epoch, load_datasets
from minirl.data_config import DataConfig, DatasetConfig
from minirl.types import Prompt

SPELL = {"min_word_len": 3, "max_word_len": 6, "size": 20000, "seed": 1}


def letters() -> PreTrainedTokenizerFast:
    """One token a character of ASCII, and a template that shows every role."""
    special = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=special[1:]
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
    )
    return fast


TOKENIZER = letters()


def load(train: dict[str, Any], seed: int = 0, **data: Any) -> Datasets:
    validation = data.pop("validation", None)
    cfg = DataConfig(
        train=DatasetConfig(**train),
        validation=None if validation is None else DatasetConfig(**validation),
        **{"max_input_seq_length": 100, **data},
    )
    return load_datasets(cfg, TOKENIZER, None, seed)


def jsonl(path: Path, rows: list[Any]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data_path": str(path)}


def problems(*inputs: str) -> list[dict[str, Any]]:
    return [{"input": text, "output": len(text)} for text in inputs]


def text_of(prompt: Prompt) -> str:
    return TOKENIZER.decode(prompt.tokens)


def ids(dataset: Dataset) -> list[int]:
    return [prompt.id for prompt in dataset.prompts]


# The stream


def stream(size: int, *, seed: int = 0, shuffle: bool = True) -> Dataset:
    return Dataset(tuple(Prompt(7 * i, (i,), {}) for i in range(size)), seed, shuffle)


@given(size=st.integers(1, 20), parts=st.lists(st.integers(0, 30), max_size=5), seed=st.integers(0))
def test_drawing_in_parts_gives_what_drawing_at_once_gives(size, parts, seed):
    dataset = stream(size, seed=seed)
    drawn, cursor = [], 0
    for num in parts:
        prompts, cursor = draw(dataset, cursor, num)
        assert len(prompts) == num
        drawn += prompts
    assert (drawn, cursor) == draw(dataset, 0, sum(parts))


@given(size=st.integers(1, 20), epochs=st.integers(1, 4), shuffle=st.booleans())
def test_each_epoch_gives_every_prompt_once(size, epochs, shuffle):
    dataset = stream(size, shuffle=shuffle)
    for number in range(epochs):
        prompts, cursor = draw(dataset, number * size, size)
        assert sorted(prompts) == sorted(dataset.prompts)
        assert epoch(dataset, cursor) == number + 1
        assert epoch(dataset, cursor - 1) == number


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [draw(stream(50, seed=seed), start, 50)[0] for seed in (0, 1) for start in (0, 50)]
    assert len({tuple(p.id for p in order) for order in orders}) == 4


def test_without_shuffling_the_order_is_the_files():
    assert draw(stream(3, shuffle=False), 2, 5)[0] == [
        stream(3).prompts[i] for i in (2, 0, 1, 2, 0)
    ]


@pytest.mark.parametrize(("cursor", "num"), [(-1, 1), (0, -1)])
def test_a_negative_draw_is_refused(cursor, num):
    with pytest.raises(ValueError, match="must be >= 0"):
        draw(stream(3), cursor, num)


# Sources


def test_a_jsonl_row_is_kept_as_it_is(tmp_path):
    row = {"input": "when?", "output": "2020-01-01", "tags": [1, None], "more": {"a": 1}}
    [prompt] = load(jsonl(tmp_path / "a.jsonl", [row])).train.prompts
    assert (prompt.id, prompt.example) == (0, row)
    assert prompt.tokens == tuple(TOKENIZER("<|user|>when?<|assistant|>")["input_ids"])


def test_a_parquet_file_gives_what_the_same_jsonl_file_gives(tmp_path):
    rows = problems("one", "two", "three")
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load({"data_path": str(path)}) == load(jsonl(tmp_path / "a.jsonl", rows))


def test_a_hugging_face_dataset_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        jsonl(tmp_path / "set" / f"{split}.jsonl", problems(split, "both"))
    name = str(tmp_path / "set")
    found = load({"dataset_name": name, "split": "test"})
    assert [p.example for p in found.train.prompts] == problems("test", "both")
    with pytest.raises(ValueError, match=r"splits .*'train', 'test'.*set data\.train\.split"):
        load({"dataset_name": name})


def test_an_unknown_hugging_face_dataset_is_refused():
    with pytest.raises(ValueError, match=r"data\.train\.dataset_name='nobody/nothing'"):
        load({"dataset_name": "nobody/nothing", "split": "train"})


def test_code_beside_a_dataset_is_never_run(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ValueError, match=r"data\.train\.dataset_name="):
        load({"dataset_name": str(tmp_path / "set"), "split": "train"})
    assert not ran.exists()


def test_system_prompt_and_prompt_file_surround_the_input(tmp_path):
    (tmp_path / "prompt.txt").write_text("Put {} into {{}}.")
    (tmp_path / "system.txt").write_text("Be {brief}.")
    files = {
        "prompt_file": str(tmp_path / "prompt.txt"),
        "system_prompt_file": str(tmp_path / "system.txt"),
    }
    [prompt] = load({**jsonl(tmp_path / "a.jsonl", problems("{x}")), **files}).train.prompts
    assert text_of(prompt) == "<|system|>Be {brief}.<|user|>Put {x} into {}.<|assistant|>"


# Refusals


@pytest.mark.parametrize(
    ("template", "reason"),
    [("none", "exactly one"), ("{} {}", "exactly one"), ("{name}", "exactly one"), ("{", "'{'")],
)
def test_a_prompt_file_needs_one_placeholder(tmp_path, template, reason):
    (tmp_path / "prompt.txt").write_text(template)
    train = jsonl(tmp_path / "a.jsonl", problems("x"))
    with pytest.raises(ValueError, match=rf"data\.train\.prompt_file=.*{reason}"):
        load({**train, "prompt_file": str(tmp_path / "prompt.txt")})


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_missing_text_file_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match=rf"data\.train\.{key}='nowhere.txt'"):
        load({**jsonl(tmp_path / "a.jsonl", problems("x")), key: "nowhere.txt"})


@pytest.mark.parametrize(("name", "reason"), [("a.jsonl", "no such file"), ("a.csv", "must end")])
def test_a_file_that_cannot_be_read_is_refused(name, reason):
    with pytest.raises(ValueError, match=rf"data\.train\.data_path='{name}': .*{reason}"):
        load({"data_path": name})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_damaged_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_text('{"input": "a", "output": 1}\n{"input": ')
    with pytest.raises(ValueError, match="line 2" if suffix == "jsonl" else "(?i)parquet"):
        load({"data_path": str(path)})


def test_a_line_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"line 2 holds no JSON object but '\[1\]'"):
        load(jsonl(tmp_path / "a.jsonl", [*problems("x"), [1]]))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_empty_dataset_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.touch()
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"input": pyarrow.array([], "string")}), path)
    with pytest.raises(ValueError, match=r"data\.train: the dataset is empty"):
        load({"data_path": str(path)})


@pytest.mark.parametrize("key", ["input_key", "output_key"])
def test_a_missing_column_is_refused_with_those_that_exist(tmp_path, key):
    train = jsonl(tmp_path / "a.jsonl", problems("x"))
    with pytest.raises(ValueError, match=rf"{key}='q': row 0 .*\['input', 'output'\]"):
        load({**train, key: "q"})


def test_only_the_math_verifier_needs_an_answer_column(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [{"input": "x"}])
    assert len(load({**train, "env_name": "operator:eq"}).train.prompts) == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input": 3, "output": 1}, "input_key='input': row 1 holds 3 of type int"),
        ({"input": None, "output": 1}, "row 1 holds None"),
        ({"input": "x", "output": True}, "output_key='output': row 1 holds True of type bool"),
        ({"input": "x", "output": [1]}, "row 1 holds .* required is str or int or float"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_row(tmp_path, row, told):
    with pytest.raises(ValueError, match=told):
        load(jsonl(tmp_path / "a.jsonl", [*problems("x"), row]))


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), limit=st.integers(2, 14))
def test_overlong_prompts_are_counted_and_refused_or_left_out(tmp_path_factory, lengths, limit):
    # field failure 62
    rows = problems(*("x" * n for n in lengths))
    train = jsonl(tmp_path_factory.getbasetemp() / "lengths.jsonl", rows)
    fit = [i for i, n in enumerate(lengths) if n + 2 <= limit]
    num_long, longest = len(lengths) - len(fit), max(lengths) + 2
    if num_long:
        with pytest.raises(
            ValueError, match=f"{num_long} of {len(lengths)} prompts .* has {longest} "
        ):
            load(train, max_input_seq_length=limit)
    if fit:
        found = load(train, max_input_seq_length=limit, filter_overlong_prompts=True).train
        assert (ids(found), found.num_filtered) == (fit, num_long)
    else:
        with pytest.raises(ValueError, match="None is left"):
            load(train, max_input_seq_length=limit, filter_overlong_prompts=True)


# Held-out rows


@given(
    drawn=st.lists(st.text("abAB ", min_size=1, max_size=3), max_size=60), seed=st.integers(0, 5)
)
def test_held_out_inputs_are_disjoint_and_nothing_is_lost(tmp_path_factory, drawn, seed):
    inputs = [*drawn, *map(str, range(40))]
    train = jsonl(tmp_path_factory.getbasetemp() / "split.jsonl", problems(*inputs))
    parts = load({**train, "split_validation_size": 0.4, "seed": seed})
    assert parts.validation is not None
    assert sorted(ids(parts.train) + ids(parts.validation)) == list(range(len(inputs)))
    kept, held = (
        {" ".join(inputs[i].lower().split()) for i in ids(part)}
        for part in (parts.train, parts.validation)
    )
    assert not kept & held
    assert parts.num_shared == 0


def test_a_row_stays_on_its_side_when_others_come_and_whatever_the_runs_seed(tmp_path):
    few, many = [f"word {i}" for i in range(60)], [f"word {i}" for i in range(-100, 120)]
    held = []
    for run, inputs in enumerate((few, many)):
        train = jsonl(tmp_path / "a.jsonl", problems(*inputs))
        parts = load({**train, "split_validation_size": 0.3}, seed=run)
        assert parts.validation is not None
        held.append({str(p.example["input"]) for p in parts.validation.prompts})
    assert held[0] == held[1] & set(few)
    assert len(held[1]) / len(many) == pytest.approx(0.3, abs=0.1)


def test_another_split_seed_holds_out_other_inputs(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", problems(*map(str, range(100))))
    sides = [load({**train, "split_validation_size": 0.5, "seed": s}).train for s in (0, 1)]
    assert ids(sides[0]) != ids(sides[1])


def test_a_split_that_leaves_a_side_empty_is_refused(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", problems("only"))
    with pytest.raises(ValueError, match=r"split_validation_size=0\.5 leaves [01] rows to train"):
        load({**train, "split_validation_size": 0.5})


def test_without_a_share_nothing_is_held_out(tmp_path):
    assert load(jsonl(tmp_path / "a.jsonl", problems("x"))).validation is None


def test_duplicates_are_left_out_and_counted_when_asked(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", problems("sun", "Sun ", "moon", "sun"))
    assert ids(load(train).train) == [0, 1, 2, 3]
    parts = load({**train, "deduplicate": True})
    assert (ids(parts.train), parts.num_duplicates) == ([0, 2], 2)
    both = load({**train, "deduplicate": True}, validation={**train, "deduplicate": True})
    assert both.num_duplicates == 4


def test_training_inputs_among_a_validation_set_are_counted(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", problems("a", "b"))
    validation = jsonl(tmp_path / "b.jsonl", problems("B", "c", "b"))
    parts = load(train, validation=validation)
    assert parts.validation is not None
    assert (ids(parts.validation), parts.num_shared) == ([0, 1, 2], 2)


def test_what_is_wrong_with_a_validation_set_is_told_of_it(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", problems("a"))
    validation = jsonl(tmp_path / "b.jsonl", problems("x" * 200))
    with pytest.raises(ValueError, match=r"data\.validation: 1 of 1 prompts"):
        load(train, validation=validation)


# reasoning-gym


def gym(task: str, **task_kwargs: Any) -> dict[str, Any]:
    return {
        "dataset_name": "reasoning_gym",
        "env_name": "reasoning_gym",
        "task": task,
        "task_kwargs": task_kwargs,
    }


@pytest.mark.slow
def test_the_words_of_the_demo_are_held_out_whatever_their_case():
    train = {**gym("spell_backward", **SPELL), "split_validation_size": 0.1, "deduplicate": True}
    parts = load(train)
    assert parts.validation is not None

    def words(dataset: Dataset) -> list[str]:
        return [p.example["metadata"]["word"].lower() for p in dataset.prompts]

    kept, held = words(parts.train), words(parts.validation)
    assert len(kept + held) == len(set(kept + held)) == SPELL["size"] - parts.num_duplicates
    assert len(held) / len(kept + held) == pytest.approx(0.1, abs=0.01)
    first = parts.train.prompts[0]
    assert text_of(first) == f"<|user|>{first.example['question']}<|assistant|>"


@pytest.mark.slow
def test_rows_of_a_task_do_not_depend_on_the_interpreters_hash_seed(monkeypatch):
    # word_ladder walks through sets of strings: with this hash seed, another ladder comes out.
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    [prompt] = load(gym("word_ladder", size=1, seed=1), max_input_seq_length=500).train.prompts
    metadata = prompt.example["metadata"]
    assert (metadata["start_word"], metadata["end_word"]) == ("TIPS", "BRAN")


@pytest.mark.slow
def test_a_task_that_cannot_be_made_is_refused():
    with pytest.raises(
        ValueError, match=r"data\.train: .* 'spell_backwards' .* nearest .*\['spell_backward'"
    ):
        load(gym("spell_backwards", seed=1))
