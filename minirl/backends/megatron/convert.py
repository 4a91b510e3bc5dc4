"""The one-time conversion of a Hugging Face checkpoint to Megatron's format.

The folder is shared by all ranks and all runs. Rank 0 converts, in a process of its own and into a
folder beside, which is then renamed; a lock keeps other jobs from converting meanwhile, and from
replacing a folder that is read. A conversion records what it was made of: the model's files, the
overrides, the versions of Bridge and Core, and of transformers, with whose log-probs those of the
converted model were compared. One that was made of anything else is stale and is made again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from minirl.backends.megatron import ckpt as megatron_ckpt
from minirl.backends.megatron import compare as megatron_compare
from minirl.backends.megatron import setup as megatron_setup
from minirl.backends.megatron.bridge import has_transformer_engine
from minirl.config.megatron import MegatronConfig
from minirl.config.megatron_auto import decided
from minirl.config.megatron_fit import this_machine
from minirl.config.policy import PolicyConfig
from minirl.files import read_object, writing
from minirl.hf import model_facts, weight_files
from minirl.parallel import Axis, barrier, gather, launched_size, world
from minirl.rng import key_of

ITERATION, FACTS = "iter_0000000", "conversion.json"
POLL_S = 1.0
"""How often the waiting ranks hear that rank 0 still works; far below any group's timeout."""
REASON = re.compile(r"(?:\[rank0\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)")
"""The line of a traceback that says what went wrong."""


def checkpoint_root() -> Path:
    """Where conversions live: an environment variable, the Hugging Face home, or the home folder.

    Blank counts as unset.
    """
    chosen, home = (
        os.environ.get(name, "").strip() for name in ("NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME")
    )
    if chosen:
        return Path(chosen).expanduser()
    if home:
        return Path(home).expanduser() / "nemo_rl"
    return Path.home() / ".cache" / "huggingface" / "nemo_rl"


def folder_of(model_name: str) -> Path:
    """The folder of a model's conversion; a local model's path is folded into one name.

    >>> folder_of("Qwen/Qwen2.5-1.5B").relative_to(checkpoint_root())
    PosixPath('Qwen/Qwen2.5-1.5B')
    """
    local = Path(model_name)
    if local.is_dir():
        return checkpoint_root() / ("model_" + str(local.resolve()).strip("/").replace("/", "_"))
    return checkpoint_root() / model_name


def fingerprint(cfg: PolicyConfig) -> dict[str, str]:
    """What a conversion is made of."""
    source = json.dumps([model_facts(cfg.model_name), weight_files(cfg.model_name)], sort_keys=True)
    overrides = json.dumps(cfg.megatron_cfg.model_overrides, sort_keys=True)
    return {
        "model": hashlib.sha256(source.encode()).hexdigest(),
        "model_overrides": hashlib.sha256(overrides.encode()).hexdigest(),
        "precision": cfg.precision,
        "layers": "transformer_engine" if has_transformer_engine() else "local",
        "megatron-core": version("megatron-core"),
        "megatron-bridge": version("megatron-bridge"),
        "compared with transformers": version("transformers"),
    }


@contextmanager
def converted(cfg: PolicyConfig, axis: Axis) -> Iterator[Path]:
    """The conversion's folder, made if it is missing or stale, and kept as it is for the duration.

    Collective: every rank of `axis` enters and leaves it.

    Raises:
        ValueError: on every rank: the folder cannot be written, the conversion failed, or a rank
            does not see the folder (named by its host).
    """
    folder = folder_of(cfg.model_name)
    lock = _Lock(folder) if axis.rank == 0 else None
    try:
        _agree(_convert_if_needed(cfg, folder, lock) if lock else None, axis)
        seen = (folder / ITERATION / megatron_ckpt.RUN_CONFIG).is_file()
        blind = [host for host in gather([None if seen else socket.gethostname()], axis) if host]
        if blind:
            raise ValueError(
                f"the converted checkpoint {str(folder)!r} is not visible on {sorted(set(blind))}: "
                "set NRL_MEGATRON_CHECKPOINT_DIR to a folder that all hosts share"
            )
        yield folder / ITERATION
        barrier(axis)
    finally:
        if lock is not None:
            lock.close()


class _Lock:
    """One file beside the folder: held alone to convert, held with others to read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(f".{folder.name}.lock")
        self.file: Any = None

    def open(self) -> None:
        """Makes the file, and the folders above it.

        Raises:
            ValueError: they cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("w")
        except OSError as error:
            raise ValueError(
                f"converted checkpoints go to {str(self.path.parent)!r}, which cannot be written "
                f"({error.strerror}): set NRL_MEGATRON_CHECKPOINT_DIR to a folder that can"
            ) from error

    def hold(self, kind: int) -> Iterator[None]:
        """Takes `fcntl.LOCK_EX` or `LOCK_SH`; yields while others are in the way."""
        while True:
            try:
                fcntl.flock(self.file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
                yield
            else:
                return

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _convert_if_needed(cfg: PolicyConfig, folder: Path, lock: _Lock) -> Iterator[str | None]:
    """Yields None while it works, and at last what went wrong, or "" when the folder is there."""
    try:
        lock.open()
        wanted, forced = fingerprint(cfg), cfg.megatron_cfg.force_reconvert_from_hf
        while True:
            yield from lock.hold(fcntl.LOCK_EX)
            if forced or _found(folder) != wanted:
                yield from _convert(cfg, folder, wanted, lock)
                forced = False
            yield from lock.hold(fcntl.LOCK_SH)
            # One lock is given up before the other is taken: a job with other settings may have
            # come between and converted for itself.
            if _found(folder) == wanted:
                break
    except (ValueError, OSError) as error:
        yield str(error) or repr(error)
        return
    yield ""


def _agree(work: Iterator[str | None] | None, axis: Axis) -> None:
    """Runs rank 0's work; all ranks hear how it goes, and fail alike."""
    while True:
        box = [next(work) if work is not None else None]
        if axis.group is not None:
            dist.broadcast_object_list(box, group_src=0, group=axis.group)
        if box[0]:
            raise ValueError(box[0])
        if box[0] == "":
            return


def _found(folder: Path) -> dict[str, str] | None:
    """What an existing, complete conversion was made of."""
    file = folder / ITERATION / FACTS
    if not file.is_file():
        return None
    try:
        return read_object(file, "")
    except ValueError:
        return None  # torn: made again


def _convert(cfg: PolicyConfig, folder: Path, facts: dict[str, str], lock: _Lock) -> Iterator[None]:
    """Converts in a process of its own, whose memory is gone afterwards."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    target = part / ITERATION
    settings, log = part / "policy.json", part / "log.txt"
    with writing(part):
        target.mkdir(parents=True)
        settings.write_bytes(msgspec.json.encode(_alone(cfg)))
    command = [sys.executable, "-m", "minirl.backends.megatron.convert", str(settings), str(target)]
    status = yield from _run(command, log, lock)
    if status:
        found = map(REASON.match, log.read_text(errors="replace").splitlines())
        reasons = [match[1] for match in found if match]
        # On a full disk the reason could not be written either.
        free = f"{shutil.disk_usage(part).free / 1e6:.1f} MB are free there"
        raise ValueError(
            f"policy.model_name: {cfg.model_name!r} could not be converted to Megatron's format: "
            f"{reasons[-1] if reasons else f'exit status {status}'} (see {str(log)!r}; {free})"
        )
    with writing(part):
        (target / FACTS).write_text(json.dumps(facts, indent=1))
    settings.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _run(command: Sequence[str], log: Path, lock: _Lock) -> Generator[None, None, int]:
    """Runs a command as no rank of anything; yields while it runs, returns its exit status.

    The process inherits the lock: if this one is killed, no other job writes beside it.
    """
    launch = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    env = {k: v for k, v in os.environ.items() if k not in launch and "TORCHELASTIC" not in k}
    env["NVIDIA_TF32_OVERRIDE"] = "0"  # Transformer Engine rounds factors in float32 products
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.file.fileno(),),
        )
    try:
        while True:
            try:
                return process.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                yield
    finally:
        process.kill()
        process.wait()


def _alone(cfg: PolicyConfig) -> PolicyConfig:
    """The same model on a single rank."""
    own = MegatronConfig(
        enabled=True,
        env_vars=cfg.megatron_cfg.env_vars,
        model_overrides=cfg.megatron_cfg.model_overrides,
        optimizer=cfg.megatron_cfg.optimizer,
    )
    return decided(msgspec.structs.replace(cfg, megatron_cfg=own), this_machine())


def read_(folder: Path, built: megatron_setup.Built) -> None:
    """The converted weights into the chunks, and into the optimizer's masters. Collective."""
    megatron_ckpt.load_weights_(built.chunks, folder)
    built.optimizer.reload_model_params()


def convert(cfg: PolicyConfig, target: Path) -> None:
    """Reads the Hugging Face checkpoint and writes it in Megatron's format, on this process alone.

    Raises:
        ValueError: its log-probs would not be Hugging Face's, or the checkpoint lacks
            weights of the model.
    """
    if launched_size() != 1:
        raise ValueError("a conversion runs in one process")
    megatron_setup.prepare_process(cfg.megatron_cfg)
    with world():
        megatron_setup.open_groups(cfg.megatron_cfg, key_of(0))
        described = megatron_setup.describe(cfg)
        megatron_compare.check_log_probs(cfg)
        bridge, provider = described.bridge, described.provider
        chunks = megatron_setup.build_chunks(cfg, described, trained=False)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.detach().fill_(torch.nan)
        bridge.load_hf_weights(chunks)
        unread = [n for c in chunks for n, p in c.named_parameters() if p.isnan().any()]
        if unread:
            names = sorted({name for n in unread for name in _hugging_face_names(bridge, n)})
            raise ValueError(
                f"its files lack these weights, or have NaN in them: {names[:5]} "
                f"({len(names)} in all)"
            )
        with writing(target):
            megatron_ckpt.write_tensors(target, megatron_ckpt.model_state(chunks))
            megatron_ckpt.write_run_config(target, provider)


def _hugging_face_names(bridge: Any, parameter: str) -> list[str]:
    """What a checkpoint calls the parts of a parameter of Core: those that it lacks, if any."""
    mapping = bridge._model_bridge.mapping_registry().megatron_to_hf_lookup(parameter)
    if mapping is None:
        return [parameter]
    names = [mapping.hf_param] if isinstance(mapping.hf_param, str) else mapping.hf_param.values()
    kept = set(bridge.hf_pretrained.state.keys())
    return [name for name in names if name not in kept] or list(names)


if __name__ == "__main__":
    convert(
        msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=PolicyConfig), Path(sys.argv[2])
    )
