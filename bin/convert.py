"""Convert checkpoints between Hugging Face's format and Megatron's.

python bin/convert.py to-hf --config RECIPE --checkpoint results/run/step_50 --out model
python bin/convert.py to-megatron --config RECIPE
"""

from pathlib import Path
from typing import Annotated

import typer

from minirl.algos import export
from minirl.config.loader import load
from minirl.config.run import GrpoRun
from minirl.log import run_command, say, user_errors
from minirl.parallel import world

Config = Annotated[Path, typer.Option(help="The run's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="As for bin/grpo.py.")]

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def to_hf(
    config: Config,
    checkpoint: Annotated[Path, typer.Option(help="A saved step of the run.")],
    out: Annotated[Path, typer.Option(help="The folder of the model to be; not there yet.")],
    overrides: Overrides = None,
    max_shard_size: Annotated[str, typer.Option(help="Of each file of weights.")] = "5GB",
) -> None:
    """Write a run's checkpoint, of either backend, as a Hugging Face model.

    Also under torchrun: give it the ranks that the layout needs.
    """
    with user_errors():
        run = load(config, overrides or [], GrpoRun)
        export.check_paths(checkpoint, out)
        with world() as axis:
            done = export.to_hugging_face(run.policy, checkpoint, out, axis, max_shard_size)
    say(f"wrote {done.folder}: {done.num_bytes / 1e6:,.1f} MB of weights")
    if done.untrained:
        say(f"  copied from {run.policy.model_name}, not trained: {', '.join(done.untrained)}")


@app.command()
def to_megatron(config: Config, overrides: Overrides = None) -> None:
    """Convert the model of CONFIG for the Megatron backend ahead of its first run."""
    with user_errors():
        run = load(config, overrides or [], GrpoRun)
        with world() as axis:
            folder = export.to_megatron(run.policy, axis)
    say(f"{run.policy.model_name} is converted in {folder}")


if __name__ == "__main__":
    run_command(app)
