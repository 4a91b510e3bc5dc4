"""Settings of the datasets (`data`): where rows come from, how they are asked and judged.

Key names and defaults are NeMo-RL's; keys that it lacks say so.
"""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from minirl.config.loader import Section, default, is_file_name, module_instead, refuse

_NAME = r"[^\W\d]\w*"


class DatasetConfig(Section, frozen=True):
    """One dataset: `data.train`, `data.validation`. Exactly one of `dataset_name`, `data_path`."""

    dataset_name: str | None = None
    """`reasoning_gym`, or a Hugging Face dataset's name."""
    data_path: str | None = None
    """A local .jsonl or .parquet file."""
    subset: str | None = None
    split: str | None = None
    task: str | None = None
    """The reasoning-gym task, e.g. `spell_backward`."""
    task_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its parameters, e.g. `{size: 20000, seed: 1, max_word_len: 6}`."""
    input_key: str = "input"
    output_key: str = "output"
    output_form: Literal["plain", "gsm8k", "boxed"] = "plain"
    r"""`math`: where in its column the reference answer stands. Not in NeMo-RL.

    `plain`: it is the whole text; `gsm8k`: what follows the last ####, without thousands commas;
    `boxed`: the content of the last \boxed{}. Training and validation may differ.
    """
    prompt_file: str | None = None
    """A text file whose `{}` is replaced by the input."""
    system_prompt_file: str | None = None
    env_name: str = "math"
    """`math`, `reasoning_gym`, or a function of yours as `package.module:function`."""
    partial_credit: bool = False
    """`reasoning_gym`: reward the task's own score, not only its full score with 1."""
    deduplicate: bool = False
    """Keep only the first row of each input; white space and case are ignored."""
    leave_out_shown_answers: bool = False
    """Leave out rows whose input contains the answer (white space and case are ignored): a copy
    would be rewarded. Not in NeMo-RL."""
    split_validation_size: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the inputs held out of `data.train` where `data.validation` is null."""
    seed: Annotated[int, Meta(ge=0)] = 42
    """Decides which inputs are held out."""

    def __post_init__(self) -> None:
        """One source, the keys that belong to it, and a verifier that can judge it."""
        refuse(
            (self.dataset_name is None) == (self.data_path is None),
            f"dataset_name is {self.dataset_name!r} and data_path {self.data_path!r}; set exactly "
            "one of them (to leave an inherited dataset, replace all of it: "
            "data.train={_override_: true, data_path: FILE})",
        )
        gym = self.dataset_name == "reasoning_gym"
        refuse(gym and self.task is None, "dataset_name reasoning_gym needs a task, such as gcd")
        refuse(
            gym and "seed" not in self.task_kwargs,
            f"task_kwargs is {self.task_kwargs}, without a seed every run would draw another task; "
            "set one",
        )
        refuse(
            not gym and (self.task is not None or bool(self.task_kwargs)),
            f"task {self.task!r} and task_kwargs {self.task_kwargs} belong to dataset_name "
            "reasoning_gym; remove them or set it",
        )
        refuse(
            gym and (self.input_key, self.output_key) != ("input", "output"),
            "input_key and output_key do not apply to reasoning_gym; remove them",
        )
        refuse(
            (gym or self.data_path is not None) and (self.subset, self.split) != (None, None),
            f"subset {self.subset!r} and split {self.split!r} belong to a Hugging Face dataset; "
            "remove them",
        )
        self._check_env(gym)

    def _check_env(self, gym: bool) -> None:
        env = self.env_name
        refuse(is_file_name(env), f"env_name is {env!r}, a file; {module_instead(env)}")
        refuse(
            not re.fullmatch(r"math|reasoning_gym|(NAME\.)*NAME:NAME".replace("NAME", _NAME), env),
            f"env_name is {env!r}; use math, reasoning_gym or package.module:function",
        )
        refuse(
            (gym and env == "math") or (not gym and env == "reasoning_gym"),
            f"env_name is {env} with dataset_name {self.dataset_name}: the verifiers of "
            "reasoning-gym judge its tasks and nothing else; set both to it, or neither",
        )
        refuse(
            self.partial_credit and env != "reasoning_gym",
            f"partial_credit does not apply to env_name {env}; remove it",
        )
        refuse(
            self.output_form != "plain" and env != "math",
            f"output_form {self.output_form} does not apply to env_name {env}; remove it",
        )


class DataConfig(Section, frozen=True, kw_only=True):
    """`data`."""

    max_input_seq_length: Annotated[
        int,
        default("${sub:${policy.max_total_sequence_length},${policy.generation.max_new_tokens}}"),
    ]
    """Longest prompt, in tokens."""
    filter_overlong_prompts: bool = False
    """Leave longer prompts out (they are counted) instead of refusing the dataset."""
    shuffle: bool = True
    train: DatasetConfig
    validation: DatasetConfig | None = None

    def __post_init__(self) -> None:
        """A prompt has at least one token."""
        refuse(
            self.max_input_seq_length < 1,
            f"max_input_seq_length is {self.max_input_seq_length}, must be >= 1",
        )
        inert = self.validation is not None and (
            self.train.split_validation_size or self.validation.split_validation_size
        )
        refuse(
            bool(inert),
            "split_validation_size holds rows out of data.train when data.validation is null; "
            "remove one of the two",
        )
        ours, theirs = _judge(self.train), _judge(self.validation or self.train)
        refuse(
            ours != theirs,
            f"train is judged by {ours}, validation by {theirs}: one verifier judges both; make "
            "these keys equal",
        )


def _judge(data: DatasetConfig) -> dict[str, object]:
    return {
        "env_name": data.env_name,
        "task": data.task,
        "output_key": data.output_key,
        "partial_credit": data.partial_credit,
    }
