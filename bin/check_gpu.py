"""Try the Megatron backend on this machine: a minute or two, one process, no download.

python bin/check_gpu.py
"""

import typer

from minirl.algos.gpu_check import check
from minirl.log import run_command, say, user_errors
from minirl.parallel import world


def main() -> None:
    """Run a small random model under each setting; the exit status is 1 when one fails."""
    failed = False
    with user_errors(), world() as axis:
        for found in check(axis):
            if found.refused:
                say(f"not here  {found.name}: {found.refused}")
                continue
            failed = failed or not found.passed
            say(
                f"{'passed' if found.passed else 'FAILED':8}  {found.name}: "
                f"log-prob error {found.error:.1e}, loss fell {found.loss_fell}, "
                f"{found.seconds:.1f} s, {found.peak_gib:.2f} GiB"
            )
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
