"""Train by GRPO or one of its family.

torchrun --nproc-per-node 2 bin/grpo.py --config bin/recipes/grpo_tiny_cpu.yaml [key=value ...]
"""

from pathlib import Path
from typing import Annotated

import typer

from minirl.algos.launch import resolved, run_grpo
from minirl.config.loader import dump, load
from minirl.config.run import GrpoRun
from minirl.log import run_command, say, user_errors


def main(
    config: Annotated[Path, typer.Option(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted keys of the file, as key=value.")
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Show the config, automatic settings decided, and stop.",
        ),
    ] = False,
) -> None:
    """Run the training that CONFIG describes, on as many processes as torchrun started."""
    with user_errors():
        run = load(config, overrides or [], GrpoRun)
        if print_config:
            say(dump(resolved(run)))
        else:
            run_grpo(run)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
