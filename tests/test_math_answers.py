"""Answers of mathematics: which are right, where they stand, and which references can be judged."""

import re
from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_pairs import PAIRS

from minirl.config.data import DatasetConfig
from minirl.config.run import EnvConfig
from minirl.envs.math_answers import check_reference, judge, reference_in
from minirl.envs.math_text import find_answer, typeset
from minirl.envs.rewards import Answer, RewardFn, open_rewards
from minirl.types import Prompt, Score

COMPLETIONS: list[tuple[str, list[str], list[str]]] = [
    ("1", [], ["1. First, ... so I give up.", "1. First, I add.\n2. Then so I give up."]),
    ("7",
     [r"<think>\boxed{5}</think>so \boxed{7}", r"<think>no</think>\boxed{7}", r"\fbox{7}",
      r"x \boxed{ 7 }", r"\boxed{\boxed{7}}", r"\boxed{\text{so }}\boxed{7}", "#### 7",
      "Work... \n#### 7", "The answer is 7.", "The answer is: 7", "Answer: 7", "**Answer:** 7",
      "Final answer: $7$", r"The final answer is $\boxed{7}$.", "So x = 7", "so $x = 7$.",
      "It is 7.", "7", "**7**", "$7$", r"\[7\]", "$$\n7\n$$",
      "The answer is 5. No, the answer is 7.", "<answer>5</answer><answer>7</answer>",
      r"<answer> \boxed{7} </answer>", "<answer>The total is 7</answer>",
      "Tom has 7 apples left.", "The answer is 7 apples.", "The answer is 7 because 3+4=7.",
      "the answer is **7**", "Answer:\n7", r"\boxed{5}, no: \boxed{7}", "The total is 7 dollars.",
      "x = 7", "3 + 4 = 7", r"The answer is \(7\).", "The answer is $x=7$."],
     ["8 = 7", "so 8 = 7", r"<think>\boxed{7}</think>so \boxed{5}", r"\boxed{7} or \boxed{8}",
      r"\boxed{7", r"\boxed{7}\boxed{}", "", "I don't know", "The answer is not 7.",
      "The answer isn't 7", "7 or 8", "The answer is 7 or 8.", "Answer: 7, 8",
      "I tried 7 times and failed", "Step 7", "7. I give up", "Problem 7 is hard",
      "The answer is 7. No, the answer is 5.", "<answer>7</answer> <answer>5</answer>",
      "<answer>7, 8</answer>", "#### 7\n#### 5", r"{{\frac", "17", "77", "It is 17.", "It is 7.5",
      "It is 7,000", "It is 7/2", "7x", "It is not 7", r"\boxed{7} then \boxed{8}",
      "We meet at 12:07", "He has 7 or 8 apples", "there are 7 cases, and I stop", "It is 12:7",
      "1, 2, 3, 4, 5, 6, 7", "Is it 6? Is it 7? I stop.", "7?? 8??"]),
    ("2", ["<answer>2</answer>", r"First \boxed{1}. Wait, correcting: \boxed{2}"], []),
    ("18",
     [r"She makes \$18.00", r"She makes \$18.00.", "She makes $18 every day.",
      "Janet makes 9 * 2 = $18 every day.", r"She makes \$18.00 per day.",
      r"So she has \$18 left.", "Therefore she earns 18 dollars.", r"The answer is \$18.00.",
      "The answer is 18 dollars.", "Thus the total is $18$.", "#### 18.00",
      "<answer>$18</answer>", r"<answer>\boxed{18}</answer>", "18 dollars"],
     ["She makes $180.", "She makes 18 or 19.", "Between 17 and 18", "It's not 18",
      "I used 18 tokens of thought and stop here for now.", "17"]),
    ("A",
     ["The answer is (A).", "**A**", "(A)", "A.", "The answer is A", "So I choose **A**.",
      "The answer is option A.", "Answer: A", "The correct answer is **(A)**."],
     ["I give up, A", "A lot of work remains.", "A is not it"]),
    ("3",
     [r"\boxed{\boxed{3}}", "3.", "  3\n", "= 3", "x=3.", "Hence x = 3.", "So there are 3.",
      "Answer is 3", "final answer: 3",
      r"The final answer is: $\boxed{3}$. I hope it is correct.", "the result is 3",
      "So we get x = 3", r"\[ \boxed{3} \]", r"$$\boxed{3}$$", r"\boxed {3}", "Thus, 1 + 2 = 3.",
      "The answer is\n3", "**Final Answer**\n\\boxed{3}", "**Final answer: 3**", "### Answer\n3",
      r"The answer is: \(3\)", "3"],
     ["", "  \n ", "3?", "Is it 3?", "1 2 3", "3...", "...3 maybe", "Option 3 seems off",
      "Let me think about 3", "Chapter 3", "(3) is hard", "3) First",
      "the number 3 is prime and so I will stop now", "I wrote 3 lines", r"\boxed{4} 3",
      r"\boxed{}3", "<answer></answer>3", "Answer: unknown"]),
    ("Monday", ["The answer is Monday.", "Monday", "**Monday**", "<answer>Monday</answer>"], []),
    ("no solution",
     ["The answer is no solution.", "No solution.", "<answer>There... \n no solution</answer>"],
     []),
    (r"\frac{2}{4}", [r"It is $\frac{1}{2}$.", r"so \boxed{0.5}", "x = 1/2"], []),
    ("B", [], ["The answer is (A) or (B).", "A", "I think A or B", "**A** or **B**"]),
    ("(1,2)", ["The answer is (1,2).", "The answer is $(1, 2)$.", "So $(x,y) = (1,2)$."], []),
    ("3.5", ["The answer is 3.5.", "It is 3.5"], []),
    ("120", ["The answer is 5! = 120."], []),
    ("5", [], ["The answer is 5! = 120."]),
    ("C",
     ["The correct answer is C.", "Answer: (C)", "The answer is **C**.", "C", "(C)", "C)",
      "The answer is C: 5", "Therefore, the answer is (C)", "<answer>C</answer>",
      r"The answer is $\textbf{(C)}$"],
     ["The answer is (B).", "A, B, C", "I am not sure. C or D", "All of A, B, C, D",
      "Could be C, maybe B.", r"\boxed{A}\boxed{B}", "CC", "Cats", "The answer is (A), not (C).",
      "(A) (B) (C)", "A B C D E"]),
    ("E", ["E"], []),
    ("no", [], ["I have no idea"]),
    ("yes",
     ["Yes.", "Answer: Yes", "The answer is yes.", "**Yes**"],
     ["No.", "Yes and no", "yes or no"]),
]  # fmt: skip
"""The same, of whole completions: where the answer is when it is not in the only box."""


@pytest.fixture(scope="module")
def reward() -> Iterator[RewardFn]:
    dataset = DatasetConfig(data_path="a.jsonl", env_name="math")
    with open_rewards(EnvConfig(num_workers=2, timeout_s=60.0), dataset) as function:
        yield function


def score(reward: RewardFn, *pairs: tuple[str, str]) -> list[Score]:
    return reward([Answer(Prompt(0, (1,), {"output": r}), said, False) for r, said in pairs])


def test_the_table_holds_every_kind_in_both_directions():
    right, wrong = (sum(len(row[side]) for row in PAIRS + COMPLETIONS) for side in (1, 2))
    assert right > 500
    assert wrong > 500


@pytest.mark.parametrize("rows", [PAIRS, COMPLETIONS], ids=["boxed", "placed"])
def test_every_pair_gets_its_verdict(reward, rows):
    pairs = [
        (reference, said if rows is COMPLETIONS else f"\\boxed{{{said}}}", float(verdict))
        for reference, right, wrong in rows
        for verdict, texts in ((True, right), (False, wrong))
        for said in texts
    ]
    scores = score(reward, *((reference, said) for reference, said, _ in pairs))
    given = [s.reward for s in scores]
    assert [p for p, got in zip(pairs, given, strict=True) if p[2] != got] == []
    assert not any(s.failed or s.timed_out for s in scores if s.reward)


def test_what_cannot_be_read_is_worth_nothing_and_counted(reward):
    unreadable = [
        r"\boxed{\frac{1}}",
        r"\boxed{(1,2}",
        r"\boxed{5 ? 6}",
        r"\boxed{1/0}",
        r"\boxed{3!!}",
    ]
    unreadable += [r"\boxed{x<1 and x>5}", r"\boxed{x \le 1 \land x > 5}"]
    assert score(reward, *(("5", said) for said in unreadable)) == [Score(0.0, failed=True)] * 7
    no_answer = ["", "I give up.", r"\boxed{5", r"\boxed{not 5}", r"\boxed{5}, no: \boxed{6"]
    assert score(reward, *(("5", said) for said in no_answer)) == [Score(0.0)] * 5


decimals = st.decimals(-(10**6), 10**6, allow_nan=False, places=9) | st.integers().map(str)


@given(gold=decimals, said=decimals)
def test_numbers_are_equal_exactly_when_they_are(gold, said):
    gold, said = (f"{x:f}" if not isinstance(x, str) else x for x in (gold, said))
    assert judge(f"\\boxed{{{said}}}", gold) == (gold == said or float(gold) == float(said))
    assert judge(f"\\boxed{{{gold}}}", gold)


@given(st.integers(-(10**15) + 1, 10**15 - 1))
def test_integers_need_no_check(number):
    """`minirl.data.references` starts no process for them."""
    assert re.fullmatch(r"-?\d{1,15}", str(number))
    check_reference(str(number))


@given(st.text("\\{}[]()$,.=|^_-x1\n boxedfrac ", max_size=40))
def test_no_text_breaks_the_search_for_an_answer(text):
    answer = find_answer(text)
    assert answer is None or isinstance(typeset(answer), str)


@pytest.mark.parametrize(
    ("form", "column", "reference"),
    [
        ("plain", " 72 ", "72"),
        ("gsm8k", "48/2 = 24\n48 + 24 = 72\n#### 72", "72"),
        ("gsm8k", "#### 1 #### 1,234,567", "1234567"),
        ("gsm8k", "#### -3.5", "-3.5"),
        ("boxed", r"so \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ],
)
def test_a_reference_is_taken_out_of_its_column(form, column, reference):
    assert reference_in(column, form) == reference


GOOD = [
    "9", "-3", "0.5", "1e-05", "5e3", "2.5e-05", "3 1/2", "58,500", r"10,\!236", "100%", "52_8",
    "12:30", "2020-01-01", r"\frac{14}{3}", r"\left( 3, \frac{\pi}{2} \right)", "p - q", "1,-2",
    "3, 5, 7", "6 - 5i", r"90^\circ", r"\$18.90", r"5.4 \text{ cents}", r"2 \text{ square units}",
    r"15\mbox{ cm}^2", r"\frac{270}7\text{ degrees}", "6 ft", "3:5", r"\text{Evelyn}",
    r"\text{June 20}", r"\text{(E)}", "A", "no", "New York", r"\angle ABC", r"\{1\pm\sqrt{5},-2\}",
    r"(-\infty, 2) \cup (3,\infty)", "y = 2x+3", "x^2+y^2=25", r"-3 < x \le 5", r"x \neq 0",
    r"\emptyset", "f(x) = x^2", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
    r"2x \equiv 3 \pmod 5", "n!", r"\cot x", "2^{1009}",
]  # fmt: skip
BAD = [
    "", " ", "}", "{", "()", "1,,2", "(1,2", "x=", r"\frac{1}", "1 2 3", "1..2", "5 or", "???",
    "72\n73", "1/0", "72 clips", "72 men", "so 5", "She has 5 apples.", "Answer: $72$",
    "The answer is 72", "step 1: 5", "nan", "null", "8 = 7", "x=3=4", "16 - 3 - 4 = 9 eggs",
    "She sold 24.\n#### 72", "#### 5", r"\boxed{72}", "3!!",
    "x<1 and x>5", r"x \ge 1 \text{ and } x<5", r"x>1 \wedge x<5",
]  # fmt: skip


@pytest.mark.parametrize("reference", GOOD)
def test_these_references_can_be_judged(reference):
    check_reference(reference)
    assert judge(f"\\boxed{{{reference}}}", reference)


@pytest.mark.parametrize("reference", BAD)
def test_these_references_are_refused(reference):
    with pytest.raises(ValueError, match=r"\w"):
        check_reference(reference)


def test_every_right_answer_of_the_table_can_be_told_from_every_wrong_one():
    """The table does not contradict itself."""
    for _, right, wrong in chain(PAIRS, COMPLETIONS):
        assert not set(right) & set(wrong)
