"""Time whole runs in a table with the columns of NeMo-RL's.

python bin/benchmark.py --config RECIPE --config OTHER_RECIPE --nproc-per-node 8

Not to be started by torchrun: it starts torchrun for each run, one after the other. On several
nodes, start it on each with the same log_dir, and give torchrun's rendezvous in --torchrun.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from minirl.algos.benchmark import (
    command_of,
    failure,
    measured,
    planned,
    start,
    table,
    window_of,
)
from minirl.log import run_command, say, user_errors


def main(
    config: Annotated[list[Path], typer.Option(help="A run's YAML file; may be repeated.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="As for bin/grpo.py.")] = None,
    steps: Annotated[int, typer.Option(help="Of each run.")] = 30,
    window: Annotated[str, typer.Option(help="The steps that means are taken of.")] = "22-29",
    nproc_per_node: Annotated[int, typer.Option(min=1, help="As for torchrun.")] = 1,
    torchrun: Annotated[
        str, typer.Option(help="Further arguments of torchrun, in quotes; --standalone if none.")
    ] = "",
) -> None:
    """Run each CONFIG, and show the mean times of their steps as Markdown."""
    rows: list[tuple[str, dict[str, float]]] = []
    failed = False
    with user_errors():
        further = shlex.split(torchrun)
        launcher = ["--nproc-per-node", str(nproc_per_node), *(further or ["--standalone"])]
        steps_taken = window_of(window, steps)
        runs = planned(config, overrides or [], steps, None if further else nproc_per_node)
        for run in runs:
            command = command_of(run, Path(__file__).with_name("grpo.py"), launcher)
            say(f"{run.label}: {shlex.join(command)}")
            status = start(run, command)
            if status != 0:
                say(failure(run, status))
                failed = True
                break
            rows.append((run.label, measured(run, steps_taken)))
    if rows:
        say(f"\nMeans of steps {window}; tokens are those of prompts and responses.\n")
        say(table(rows))
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
