"""minirl: reinforcement-learning post-training of language models that one person can audit.

This is the map. Imports go only upward in the list below, so it is also the order to read the
files in. A newcomer's hour: types, advantages, policy_losses, backend, engine, algos/sft,
algos/grpo, bin/grpo; the backends last.

Words. A *prompt* is one problem. The *group* of a prompt is all samples drawn from it in one step;
groups have ids and are never compared by text. A *trajectory* is one sample with its prompt; a
*row* is a trajectory padded on the right; a *micro-batch* is the rows of one forward pass. A *step*
is one rollout and all of its optimizer *updates*. A *refit* copies the trainer's weights into the
engine. The *version* of weights is the number of updates behind them. An *axis* is a set of ranks.

A token has up to four log-probs, and each keeps its name everywhere:
generation_logprobs  by the engine, when it sampled the token
prev_logprobs        by the trainer, with the same weights: before the updates, or in the only one
logprobs             by the trainer now; the only one that carries a gradient
reference_logprobs   by the frozen policy that the run started from

Three rules explain most of the code. Losses and metrics are sums, divided once by a count of the
*global* batch, so any split over ranks and micro-batches gives the same gradient. Whatever changes
memory that it was given has a name that ends in `_`, and the state it was given is refused
afterwards. Bad input is an error that names the key, the value, the rule and the remedy.

Values: records and settings
    types.py                   the records that travel, and the names of tensor shapes
    rng.py                     keys: randomness as an argument
    metrics.py                 metrics that add up over micro-batches, updates and ranks
    files.py                   files that cannot be read or written
    yaml_files.py              YAML files and overrides, merged into one tree
    loader.py                  YAML and overrides to one frozen record, and back
    loss_config.py             settings of the loss and of the advantages
    reward_config.py           settings of the reward path
    data_config.py             settings of the datasets
    dtensor_config.py          settings of the FSDP2 backend
    megatron_config.py         settings of the Megatron backend
    megatron_optim_rules.py    what contradicts itself in its optimizer and schedule
    megatron_rules.py          what contradicts itself in the rest
    megatron_fit.py            whether the settings suit the model and the machine
    policy_config.py           settings of the model, the training backend and the engine
    megatron_auto.py           what Megatron's settings leave to code
    config.py                  every other section of a run

Arithmetic: pure functions of tensors, on one process
    reduce.py                  masked sums and means; where NaN and overflow stop
    kl.py                      estimators of the KL divergence
    groups.py                  statistics of the samples of one prompt
    mismatch.py                the engine against the trainer: importance weights
    policy_losses.py           one surrogate for each algorithm, per token
    loss_metrics.py            what is logged about a policy loss
    losses.py                  the policy loss: selects, composes, averages
    losses_supervised.py       next-token negative log-likelihood
    advantages.py              from rewards to advantages
    packing.py                 which sequences share a micro-batch, and which a rank

Text and tasks: from files to prompts, from answers to rewards
    special_tokens.py          what a tokenizer takes for control, and messages that spell it
    chat.py                    conversations to tokens, once; tokens to text
    verifier_worker.py         a process for code that may do anything, and its guard
    verifier_pool.py           processes that survive what a model wrote
    math_text.py               where an answer stands, and one typography for all
    math_values.py             whether two expressions, words or units are equal
    math_answers.py            the same of lists, sets, intervals and equations
    verifiers.py               what runs in the pool's processes
    references.py              the answers that a dataset calls right, checked
    data_sources.py            rows as their source has them
    data.py                    datasets as values, and a stream that a cursor resumes
    rewards.py                 answers to scores
    shaping.py                 scores to rewards; which groups teach anything

Contracts: records of functions, and what is built on them alone
    parallel.py                process groups; sums and gathers over an axis
    backend.py                 what training offers
    engine.py                  what generation offers
    rollout.py                 prompts to trajectories to padded rows
    log.py                     metrics file and terminal; the only module that prints
    hf.py                      cheap checks of a model's folder
    cost.py                    the work of a sequence, from its model's matrices
    flops.py                   the operations a model needs, and what a device could do
    checkpoint.py              a run's folder of saved states
    ownership.py               whose a run's folders are
    update.py                  one optimizer update: global counts, then additive losses

Backends: the only mutable objects; each file alone imports its dependency
    backends/hf_files.py       a model's own files of weights, and their names
    backends/states.py         what the backends share of an update
    backends/norms.py          the gradient norm of sharded parameters
    backends/loss_scale.py     float16 gradients that neither vanish nor overflow
    backends/optim.py          optimizers and schedules by import path
    backends/shards.py         a sharded training state on disk
    backends/vocab_parallel.py log-probs of a vocabulary that is cut over ranks
    backends/linear_logprobs.py  the same from hidden states, without logits
    backends/output_layer.py   the output layer of a model, run for log-probs
    backends/hf_model.py       positions and attention as the engine has them
    backends/stand_in.py       a small model of the same config, held against Hugging Face
    backends/row_layout.py     padded or packed rows, cut for context parallelism
    backends/attention.py      attention within packed or cut sequences
    backends/experts.py        each rank holds some experts of a mixture
    backends/plans.py          how layers are cut for tensor parallelism, by family
    backends/dtensor_lora.py   adapters beside frozen layers
    backends/dtensor_fit.py    whether a model can be cut, packed and adapted so
    backends/dtensor_setup.py  mesh of ranks, model, sharding
    backends/dtensor_forward.py  rows to log-probs through that model
    backends/dtensor_compare.py  that path held against Hugging Face
    backends/dtensor.py        any Hugging Face causal LM under FSDP2
    backends/megatron_bridge.py  the door to Megatron Bridge, also without Transformer Engine
    backends/megatron_cpu.py   Megatron-Core without CUDA: patches and stand-ins, quarantined
    backends/megatron_overrides.py  model_overrides into Megatron Bridge's provider
    backends/megatron_fields.py  what Bridge drops of a model's config, put right
    backends/megatron_setup.py groups, provider, chunks, optimizer, schedule
    backends/megatron_forward.py  Core's schedules: log-probs and gradients
    backends/megatron_moe.py   how evenly routers deal tokens to experts
    backends/megatron_ckpt.py  Core's sharded checkpoints
    backends/megatron_compare.py  a model's stand-in, before it is converted
    backends/megatron_convert.py  the one-time conversion from Hugging Face
    backends/megatron.py       Megatron-Core in any layout
    backends/hf_generate.py    the oracle engine: slow and easy to check
    backends/vllm_arguments.py  which arguments of vLLM a config may set
    backends/vllm.py           vLLM inside every rank
    backends/__init__.py       the choice between them

Algorithms: the steps and the loop
    algos/layout.py            which rank trains which rows, in which micro-batches
    algos/sft.py               supervised fine-tuning
    algos/collect.py           the samples of a step
    algos/evaluate.py          accuracy on held-out problems
    algos/grpo.py              GRPO and its family
    algos/loop.py              step, validate, save, log, until done
    algos/launch.py            from a config to a finished run
    algos/export.py            checkpoints between Hugging Face's format and Megatron's
    algos/tiny.py              a small model made from nothing
    algos/gpu_check.py         the Megatron backend tried on this machine
    algos/translate.py         settings of one backend as those of the other
    algos/benchmark.py         whole runs timed, on one backend or both

Commands
    bin/make_tiny.py           makes the tiny model
    bin/grpo.py                one GRPO run
    bin/convert.py             checkpoints from one format to the other
    bin/check_gpu.py           the Megatron backend tried on this machine
    bin/benchmark.py           whole runs timed, in one table
"""
