"""Files of rows that are none, refused in few words."""

import pytest
from test_data import jsonl, load, problems


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"input": "a", "output": 1}]', "JSON array, .* one JSON object a line; convert it"),
        ('\n [\n{"input": "a"},\n{"input": "b"}\n]\n', "the file holds a JSON array"),
        ('{"input": "a", "output": 1}\n\n{"input": "b", "output": 1}\n', "line 2 is blank; remove"),
        ('{"input": "a", "output": 1}\n\n', "line 2 is blank; remove it"),
        ('{"input": "a", "output": %s}\n' % ("1" * 5000), "line 1: it holds an integer too long"),
        ('{"input": %s1' % ("[" * 100_000), "line 1: lists and mappings are nested too deep"),
        ('"%s"\n' % ("x" * 5000), r"line 1 holds no JSON object but '\"x.*\(5002 characters\)'"),
    ],
)
def test_a_jsonl_that_is_none_is_refused_in_few_words(tmp_path, text, told):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s)a.jsonl'.*{told}") as caught:
        load({"data_path": str(path)})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("key", ["data_path", "prompt_file", "system_prompt_file"])
@pytest.mark.parametrize("name", ["a" * 5000 + ".jsonl", "a\0b.jsonl"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, key, name):
    with pytest.raises(
        ValueError, match=rf"data\.train\.{key}='a.*there is no such file"
    ) as caught:
        load({**jsonl(tmp_path / "a.jsonl", problems("x")), key: name})
    assert len(str(caught.value)) < 400


def test_a_column_that_only_some_rows_have_is_refused_to_a_function_that_may_read_it(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [*problems("x"), {"input": "y"}])
    with pytest.raises(ValueError, match=r"row 1 lacks the columns \['output'\] of row 0.* null"):
        load({**train, "env_name": "operator:eq"})
