"""References: read as they stand, from columns of several forms; refused if none can equal them."""

import pyarrow
import pyarrow.parquet
import pytest
from test_data import TOKENIZER, jsonl, load

from minirl.config.data import DataConfig, DatasetConfig
from minirl.config.run import EnvConfig
from minirl.data.datasets import Dataset, load_datasets


def outputs(dataset: Dataset) -> list[object]:
    return [prompt.example["output"] for prompt in dataset.prompts]


def test_numbers_of_a_file_keep_the_text_that_they_stand_as(tmp_path):
    numbers = ["0.00001", "1e16", "2.5e-05", "1.50", "-7", "12345678901234567890"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"input": "x", "output": {n}, "bonus": 1.50}}\n' for n in numbers))
    found = load({"data_path": str(path)}).train
    assert outputs(found) == numbers
    assert found.prompts[0].example["bonus"] == 1.5
    own = load({"data_path": str(path), "env_name": "operator:eq"}).train
    assert outputs(own) == [1e-05, 1e16, 2.5e-05, 1.5, -7, 12345678901234567890]


def test_numbers_of_a_table_have_all_their_digits_and_no_exponent(tmp_path):
    rows = [{"input": "x", "output": x} for x in (1e-05, 1e16, 2.5e-05, 0.1, -3.0)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    expected = ["0.00001", "10000000000000000", "0.000025", "0.1", "-3.0"]
    assert outputs(load({"data_path": str(path)}).train) == expected


def test_training_and_validation_hold_their_answers_in_forms_of_their_own(tmp_path):
    solved = {"input": "x", "output": "24 + 48 = 72\n#### 1,072"}
    train = {**jsonl(tmp_path / "a.jsonl", [solved]), "output_form": "gsm8k"}
    boxed = {"input": "y", "output": r"so \boxed{\frac{1}{2}}"}
    validation = {**jsonl(tmp_path / "b.jsonl", [boxed]), "output_form": "boxed"}
    found = load(train, validation=validation)
    assert found.validation is not None
    assert (outputs(found.train), outputs(found.validation)) == (["1072"], [r"\frac{1}{2}"])


def test_references_that_cannot_be_judged_are_refused_with_their_number_and_the_remedy(tmp_path):
    told = {"72 clips": "one mathematical expression", "so #### 72": "####", "": "missing"}
    rows = [{"input": "x", "output": o} for o in ("5", *told, "}", "5", "72 clips")]
    with pytest.raises(ValueError, match=r"data\.train\.output_key='output'") as error:
        load(jsonl(tmp_path / "a.jsonl", rows))
    message = str(error.value)
    assert "5 of 7 reference answers" in message
    for row, (text, why) in enumerate(told.items(), 1):
        assert f"row {row} holds {text!r}: " in message
        assert why in message
    assert "row 4" not in message
    assert "data.train.output_form to gsm8k" in message


@pytest.mark.parametrize("form", ["gsm8k", "boxed"])
def test_a_column_of_another_form_is_refused(tmp_path, form):
    train = jsonl(tmp_path / "a.jsonl", [{"input": "x", "output": "72"}])
    with pytest.raises(ValueError, match=r"1 of 1 .* row 0 holds '72': it holds no"):
        load({**train, "output_form": form})


def test_a_reference_that_cannot_be_computed_is_refused_at_the_deadline_of_training(tmp_path):
    train = jsonl(
        tmp_path / "a.jsonl", [{"input": "x", "output": "\\binom{1000000000}{500000000}"}]
    )
    cfg = DataConfig(train=DatasetConfig(**train), max_input_seq_length=100)
    with pytest.raises(ValueError, match=r"more than env\.timeout_s=2\.0 s"):
        load_datasets(cfg, TOKENIZER, None, 0, EnvConfig(num_workers=1, timeout_s=2.0))
