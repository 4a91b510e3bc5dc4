"""Every layout of both backends gives the numbers of one process, packed and padded."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import save_model
from parity import LAYOUTS, SIZES, Errors, Layout, Run, errors, oracle, run_layout
from ranks import run_ranks

from minirl.parallel import Axis

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Run]]:
    """Of each family: its checkpoint, and what the oracle makes of it."""
    found = {}
    for family in sorted({layout.family for layout in LAYOUTS}):
        folder = tmp_path_factory.mktemp("parity") / family
        model = save_model(folder, family, **SIZES)
        found[family] = (model, oracle(model))
    return found


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


def job(axis: Axis, layout: Layout, model: str, *, packed: bool) -> Run:
    return run_layout(axis, layout, model, packed=packed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_equals_one_process(
    layout: Layout,
    expected: dict[str, tuple[str, Run]],
    table: dict[str, dict[bool, Errors]],
) -> None:
    model, wanted = expected[layout.family]
    for packed in (False, True):
        runs = run_ranks(layout.ranks, job, layout, model, packed=packed)
        for run in runs:
            found = errors(run, wanted)
            assert max(found) < TOLERANCE, (layout.name, packed, found)
        table.setdefault(layout.name, {})[packed] = errors(runs[0], wanted)


def test_the_readme_shows_every_layout() -> None:
    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^\| ([^|]+) \| \d \| \de-\d\d, ", text, re.MULTILINE))
    assert shown == {layout.name for layout in LAYOUTS}
