"""Make the tiny model that a CPU recipe trains, unless it is there already.

python bin/make_tiny.py --config bin/recipes/grpo_tiny_cpu.yaml
"""

from pathlib import Path
from typing import Annotated

import typer

from minirl.algos import tiny
from minirl.config.loader import load
from minirl.config.run import GrpoRun
from minirl.log import run_command, say, user_errors
from minirl.parallel import world


def main(
    config: Annotated[
        Path, typer.Option(help="The recipe; its model and training words are used.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="As for bin/grpo.py.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the warm-up.")] = 0,
) -> None:
    """Build the model and warm-start it by supervised fine-tuning."""
    with user_errors():
        run = load(config, overrides or [], GrpoRun)
        with world() as axis:
            made = tiny.make(run, axis, seed=seed)
    say(f"{'made' if made else 'found'} {run.policy.model_name}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
