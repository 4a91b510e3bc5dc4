"""What holds for every test: one thread, no network, reproducible properties.

It imports nothing of minirl: jaxtyping's import hook is installed after this file is read.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator

# Before torch is imported here or in a child process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# Conversions of tiny models; gone with the session's other files.
os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = tempfile.mkdtemp(prefix="minirl-converted-")

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


@pytest.fixture(scope="module")
def solo() -> Iterator[object]:
    """The axis of a world of one, with its process group."""
    from minirl.parallel import world

    with world() as axis:
        yield axis


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny checkpoint of each family."""
    from models import FAMILIES, save_model

    root = tmp_path_factory.mktemp("models")
    names: dict[str, str] = {family: save_model(root / family, family) for family in FAMILIES}
    # Its decoder layers are large enough to be sharded one by one.
    names["large"] = save_model(root / "large", hidden_size=256, intermediate_size=1400)
    return names


def pytest_sessionfinish() -> None:
    """Conversions are as large as models."""
    shutil.rmtree(os.environ["NRL_MEGATRON_CHECKPOINT_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none; add what it serves where there is one."""
    if torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("on_gpu"):
                item.add_marker(pytest.mark.gpu)
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
