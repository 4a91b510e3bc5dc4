"""What holds for every test: one thread, no network, reproducible properties.

It imports nothing of minirl: jaxtyping's import hook is installed after this file is read.
"""

import os

# Before torch is imported here or in a child process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["bench/*"]

torch.set_num_threads(1)

# The first call of a shape-checked function takes a second, and the machine may be shared: no
# example has a deadline.
settings.register_profile(
    "minirl",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("minirl")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
