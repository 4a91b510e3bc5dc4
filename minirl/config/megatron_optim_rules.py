"""What contradicts itself in Megatron's optimizer, its schedule and the reduction of gradients."""

from msgspec import structs

from minirl.config.loader import refuse
from minirl.config.megatron import (
    KEY,
    MegatronConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
)


def check_optimizer(cfg: MegatronConfig) -> None:
    """Refuses contradictions, and settings without an effect.

    Raises:
        ValueError: names the full key, its value, the rule and the remedy.
    """
    optimizer, key = cfg.optimizer, f"{KEY}optimizer."
    lr = optimizer.lr
    refuse(lr is None, f"{key}lr is null; set the learning rate, for example lr: 5e-6")
    refuse(
        lr is not None and optimizer.min_lr > lr,
        f"{key}min_lr is {optimizer.min_lr}, more than {key}lr {lr}; lower it",
    )
    _check_cpu_offload(optimizer, key)
    adam, distributed = optimizer.optimizer == "adam", optimizer.use_distributed_optimizer
    refuse(
        optimizer.use_precision_aware_optimizer is True and not (adam and distributed),
        f"{key}use_precision_aware_optimizer is True, which needs {key}optimizer adam and "
        f"{key}use_distributed_optimizer: true",
    )
    given, defaults = structs.asdict(optimizer), structs.asdict(MegatronOptimizerConfig())
    for name in ("sgd_momentum",) if adam else ("adam_beta1", "adam_beta2", "adam_eps"):
        refuse(
            given[name] != defaults[name],
            f"{key}{name} is {given[name]}, which has no effect with {key}optimizer "
            f"{optimizer.optimizer}; remove it",
        )
    _check_overlap(cfg)
    _check_schedule(cfg)


def _check_cpu_offload(optimizer: MegatronOptimizerConfig, key: str) -> None:
    fraction = optimizer.optimizer_offload_fraction
    offload, distributed = optimizer.optimizer_cpu_offload, optimizer.use_distributed_optimizer
    refuse(
        offload and not 0 < fraction <= 1,
        f"{key}optimizer_offload_fraction is {fraction}; {key}optimizer_cpu_offload needs a "
        "fraction greater than 0 and at most 1",
    )
    refuse(
        offload and not distributed,
        f"{key}use_distributed_optimizer is False, and {key}optimizer_cpu_offload needs it; set it "
        "to true",
    )
    refuse(
        not offload and optimizer.overlap_cpu_optimizer_d2h_h2d,
        f"{key}overlap_cpu_optimizer_d2h_h2d is True, which has no effect without "
        f"{key}optimizer_cpu_offload",
    )
    refuse(
        not offload and fraction != 0,
        f"{key}optimizer_offload_fraction is {fraction}, which has no effect without "
        f"{key}optimizer_cpu_offload",
    )


def _check_overlap(cfg: MegatronConfig) -> None:
    reduction = cfg.distributed_data_parallel_config
    key = f"{KEY}distributed_data_parallel_config."
    refuse(
        reduction.overlap_param_gather is True and not cfg.optimizer.use_distributed_optimizer,
        f"{key}overlap_param_gather is True, which needs "
        f"{KEY}optimizer.use_distributed_optimizer: true",
    )
    refuse(
        reduction.overlap_param_gather is True and reduction.overlap_grad_reduce is False,
        f"{key}overlap_param_gather is True, which needs {key}overlap_grad_reduce; set that to "
        "true or null",
    )


def _check_schedule(cfg: MegatronConfig) -> None:
    schedule, key = cfg.scheduler, f"{KEY}scheduler."
    style, decay, warmup = (
        schedule.lr_decay_style,
        schedule.lr_decay_iters,
        schedule.lr_warmup_iters,
    )
    constant = style == "constant"
    growing = schedule.weight_decay_incr_style != "constant"
    refuse(
        constant and not growing and decay is not None,
        f"{key}lr_decay_iters is {decay}, which has no effect with {key}lr_decay_style constant "
        f"and {key}weight_decay_incr_style constant; remove it",
    )
    refuse(
        not (constant and not growing) and decay is None,
        f"{key}lr_decay_iters is null, and {key}lr_decay_style {style} with "
        f"{key}weight_decay_incr_style {schedule.weight_decay_incr_style} needs it; set it",
    )
    refuse(
        decay is not None and warmup >= decay,
        f"{key}lr_warmup_iters is {warmup}, not less than {key}lr_decay_iters {decay}; lower it",
    )
    refuse(
        constant and cfg.optimizer.min_lr != 0,
        f"{KEY}optimizer.min_lr is {cfg.optimizer.min_lr}, which has no effect with "
        f"{key}lr_decay_style constant; remove it",
    )
    start, lr = schedule.lr_warmup_init, cfg.optimizer.lr
    refuse(
        warmup == 0 and start != 0,
        f"{key}lr_warmup_init is {start}, which has no effect with {key}lr_warmup_iters 0",
    )
    refuse(
        lr is not None and start > lr,
        f"{key}lr_warmup_init is {start}, more than {KEY}optimizer.lr {lr}; lower it",
    )
    _check_last_decay(schedule, key)
    _check_weight_decay(schedule, cfg.optimizer.weight_decay)


def _check_last_decay(schedule: MegatronSchedulerConfig, key: str) -> None:
    style, decay = schedule.lr_decay_style, schedule.lr_decay_iters
    for name, value in (
        ("lr_wsd_decay_iters", schedule.lr_wsd_decay_iters),
        ("lr_wsd_decay_style", schedule.lr_wsd_decay_style),
    ):
        refuse(
            (style == "WSD") != (value is not None),
            f"{key}{name} is {value!r} and {key}lr_decay_style {style}; WSD needs it, and no other "
            "style reads it",
        )
    last = schedule.lr_wsd_decay_iters
    refuse(
        last is not None and decay is not None and last > decay,
        f"{key}lr_wsd_decay_iters is {last}, more than {key}lr_decay_iters {decay}; lower it",
    )


def _check_weight_decay(schedule: MegatronSchedulerConfig, weight_decay: float) -> None:
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    first = weight_decay if start is None else start
    final = weight_decay if end is None else end
    refuse(
        schedule.weight_decay_incr_style == "constant" and not first == final == weight_decay,
        f"{KEY}scheduler.start_weight_decay is {start} and end_weight_decay {end}, which differ "
        f"from {KEY}optimizer.weight_decay {weight_decay} though "
        f"{KEY}scheduler.weight_decay_incr_style is constant; set the last alone",
    )
    refuse(
        first > final,
        f"{KEY}scheduler.start_weight_decay {first} is more than end_weight_decay {final}; it can "
        "only grow",
    )
