"""What `backends/vllm.py` uses of vLLM and only a GPU, or several hosts, would run.

The other facts are tested by running them (`test_engine_contract.py`). A failure here after a
change of vLLM's version means: read its source again before trusting a GPU run.
"""

import inspect
from dataclasses import fields
from typing import get_args

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def vllm_imports() -> None:
    """Imports vLLM as the engine does: its environment is not this process's affair."""
    from minirl.backends import vllm

    with vllm._contained():
        import vllm as installed

    assert installed.__version__.startswith("0.30."), "the facts were read in vLLM 0.30"


def test_every_argument_that_the_engine_gives_is_one_of_vllms():
    from vllm.engine.arg_utils import EngineArgs

    from minirl.backends import vllm_arguments

    known = {field.name for field in fields(EngineArgs)}
    assert known == vllm_arguments.known_arguments()
    given = {"enable_sleep_mode", "disable_log_stats", "use_tqdm_on_load", "seed"}
    given |= {"enable_chunked_prefill", "max_num_batched_tokens"}
    given |= {"kv_cache_memory_bytes", "block_size"}
    assert given | set(vllm_arguments.OWNED) <= known


def test_the_values_that_the_engine_gives_are_vllms():
    from vllm.config.model import LogprobsMode
    from vllm.config.parallel import DistributedExecutorBackend

    assert "processed_logprobs" in get_args(LogprobsMode)
    assert "external_launcher" in get_args(DistributedExecutorBackend)


def test_the_external_launcher_takes_rank_and_device_from_torchrun(monkeypatch):
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    arguments = ExecutorWithExternalLauncher._distributed_args
    assert arguments(object.__new__(ExecutorWithExternalLauncher)) == ("env://", 5, 1)


def test_sleep_and_wake_exist_on_the_engine_and_on_the_gpu_worker():
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    for owner in (LLM, Worker):
        inspect.signature(owner.sleep).bind(None, level=1)
        inspect.signature(owner.wake_up).bind(None)


def test_a_gpu_worker_reloads_weights_with_the_calls_that_the_engine_makes():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    source = inspect.getsource(First.reload_weights)
    calls = [
        "initialize_layerwise_reload(model)",
        "model.load_weights(weights_iterator)",
        "finalize_layerwise_reload(model, self.model_config)",
    ]
    places = [source.find(call) for call in calls]
    assert places == sorted(places)
    assert places[0] > 0
    assert "GPUModelRunnerV1.reload_weights(self" in inspect.getsource(Second.reload_weights)


def test_both_gpu_samplers_can_give_processed_logprobs_for_seeded_requests():
    from vllm.v1.sample.sampler import Sampler as First
    from vllm.v1.worker.gpu.sample.sampler import Sampler as Second
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    assert "logprobs_mode" in inspect.signature(First).parameters
    assert "logprobs_mode" in inspect.signature(Second).parameters
    # Seeds of 63 bits fit: the second sampler keeps them as int64.
    states = SamplingStates.__init__
    assert "self.seeds = UvaBackedTensor(max_num_reqs, dtype=torch.int64)" in inspect.getsource(
        states
    )
