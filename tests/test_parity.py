"""Every layout of both backends gives the numbers of one process, packed and padded."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_cases import Start, make_start
from parity import LAYOUTS, SIZES, Errors, Layout, Run, errors, oracle, run_layout
from ranks import run_ranks

from minirl.parallel import Axis

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5

pytestmark = [pytest.mark.slow, pytest.mark.on_gpu]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """A checkpoint of each family, and adapters of it."""
    families = sorted({layout.family for layout in LAYOUTS})
    roots = {family: tmp_path_factory.mktemp(family) for family in families}
    return {f: run_ranks(1, make_start, root, f, **SIZES)[0] for f, root in roots.items()}


@pytest.fixture(scope="module")
def expected(starts: dict[str, Start]) -> dict[tuple[str, bool], Run]:
    """What the oracle makes of each family, with adapters or without."""
    kinds = sorted({(layout.family, layout.lora) for layout in LAYOUTS})
    return {(family, lora): oracle(starts[family], lora=lora) for family, lora in kinds}


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[bool, Errors]]]:
    """The rows that ran, written to runs/parity.md when all did."""
    rows: dict[str, dict[bool, Errors]] = {}
    yield rows
    if len(rows) == len(LAYOUTS):
        file = ROOT / "runs" / "parity.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(markdown(rows))


def markdown(rows: dict[str, dict[bool, Errors]]) -> str:
    """The worst relative errors of each row, as the README shows them."""
    lines = [
        "| layout | ranks | padded rows: loss, norm, weights | packed rows |",
        "|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        found = [", ".join(f"{x:.0e}" for x in errors) for errors in rows[layout.name].values()]
        lines.append(f"| {layout.name} | {layout.ranks} | {found[0]} | {found[1]} |")
    return "\n".join(lines) + "\n"


def job(axis: Axis, layout: Layout, start: Start, *, packed: bool) -> Run:
    return run_layout(axis, layout, start, packed=packed)


# field failures 13 (counts under context parallelism), 39 (packed samples must not see each other),
# 42 and 43 (mixtures of experts)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_equals_one_process(
    layout: Layout,
    starts: dict[str, Start],
    expected: dict[tuple[str, bool], Run],
    table: dict[str, dict[bool, Errors]],
) -> None:
    wanted = expected[layout.family, layout.lora]
    for packed in (False, True):
        runs = run_ranks(layout.ranks, job, layout, starts[layout.family], packed=packed)
        for run in runs:
            found = errors(run, wanted)
            assert max(found) < TOLERANCE, (layout.name, packed, found)
        table.setdefault(layout.name, {})[packed] = errors(runs[0], wanted)


def test_the_readme_shows_every_layout() -> None:
    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^\| ([^|]+) \| \d \| \de-\d\d, ", text, re.MULTILINE))
    assert shown == {layout.name for layout in LAYOUTS}
