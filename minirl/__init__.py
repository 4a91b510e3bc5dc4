"""minirl: reinforcement-learning post-training of language models that one person can audit.

This is the map. Imports go only upward in the list below, so it is also the order to read the
files in. A newcomer's hour: types, losses/advantages, losses/surrogates, backend, engine,
algos/sft, algos/grpo, bin/grpo; the backends last.

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

Values: records, keys, metrics, and the doors to the terminal and to other ranks
    types.py                   the records that travel, and the names of tensor shapes
    rng.py                     keys: randomness as an argument
    metrics.py                 metrics that add up over micro-batches, updates and ranks
    files.py                   files that cannot be read or written
    log.py                     metrics file and terminal; the only module that prints
    parallel.py                process groups; sums and gathers over an axis

Settings: every key of a run
    config/__init__.py         what this room holds
    config/yaml_files.py       YAML files and overrides, merged into one tree
    config/loader.py           YAML and overrides to one frozen record, and back
    config/loss.py             the loss and the advantages
    config/rewards.py          the reward path
    config/data.py             the datasets
    config/dtensor.py          the FSDP2 backend
    config/megatron.py         the Megatron backend
    config/megatron_optim_rules.py  what contradicts itself in its optimizer and schedule
    config/megatron_rules.py   what contradicts itself in the rest
    config/megatron_fit.py     whether the settings suit the model and the machine
    config/policy.py           the model, its batches, the training backend and the engine
    config/megatron_auto.py    what Megatron's settings leave to code
    config/run.py              every other section of a run

Contracts: records of functions, and what is built on them alone
    hf.py                      cheap checks of a model's folder
    cost.py                    the work of a sequence, from its model's matrices
    flops.py                   the operations a model needs, and what a device could do
    backend.py                 what training offers
    engine.py                  what generation offers
    checkpoint.py              a run's folder of saved states
    update.py                  one optimizer update: global counts, then additive losses

Losses: pure functions of tensors, on one process
    losses/__init__.py         what this room holds
    losses/reduce.py           masked sums and means; where NaN and overflow stop
    losses/kl.py               estimators of the KL divergence
    losses/groups.py           statistics of the samples of one prompt
    losses/mismatch.py         the engine against the trainer: importance weights
    losses/surrogates.py       one surrogate for each algorithm, per token
    losses/metrics.py          what is logged about a policy loss
    losses/policy.py           the policy loss: selects, composes, averages
    losses/supervised.py       next-token negative log-likelihood
    losses/advantages.py       from rewards to advantages

Data: text and rows
    data/__init__.py           what this room holds
    data/packing.py            which sequences share a micro-batch, and which a rank
    data/plan.py               which rank trains which rows, in which micro-batches
    data/special_tokens.py     what a tokenizer takes for control, and messages that spell it
    data/chat.py               conversations to tokens, once; tokens to text
    envs/__init__.py           what the next room holds
    envs/worker.py             a process for code that may do anything, and its guard
    envs/pool.py               processes that survive what a model wrote
    envs/math_text.py          where an answer stands, and one typography for all
    envs/math_values.py        whether two expressions, words or units are equal
    envs/math_answers.py       the same of lists, sets, intervals and equations
    envs/verifiers.py          what runs in the pool's processes
    data/references.py         the answers that a dataset calls right, checked
    data/sources.py            rows as their source has them
    data/datasets.py           datasets as values, and a stream that a cursor resumes

Environments: from answers to rewards
    envs/rewards.py            answers to scores
    envs/shaping.py            scores to rewards; which groups teach anything

Rollouts: from prompts to scored samples
    rollout/__init__.py        what this room holds
    rollout/sample.py          prompts to trajectories to padded rows
    rollout/collect.py         the samples of a step

Backends: the only mutable objects; each file alone imports its dependency
    backends/hf_files.py       a model's own files of weights, and their names
    backends/trainer.py        what the backends share of an update
    backends/norms.py          the gradient norm of sharded parameters
    backends/vocab_parallel.py log-probs of a vocabulary that is sharded over ranks
    backends/linear_logprobs.py  the same from hidden states, without logits
    backends/output_layer.py   the output layer of a model, run for log-probs
    backends/layout.py         padded or packed rows, split for context parallelism
    backends/attention.py      attention within packed or split sequences
    backends/hf_model.py       positions and attention as the engine has them
    backends/stand_in.py       a small model of the same config, held against Hugging Face
    backends/dtensor/__init__.py  what this room holds
    backends/dtensor/loss_scale.py  float16 gradients that neither vanish nor overflow
    backends/dtensor/optim.py  optimizers and schedules by import path
    backends/dtensor/shards.py a sharded training state on disk
    backends/dtensor/experts.py  each rank holds some experts of an MoE
    backends/dtensor/plans.py  how layers are sharded for tensor parallelism, by family
    backends/dtensor/lora.py   adapters beside frozen layers
    backends/dtensor/fit.py    whether a model can be sharded, packed and adapted so
    backends/dtensor/setup.py  mesh of ranks, model, sharding
    backends/dtensor/forward.py  rows to log-probs through that model
    backends/dtensor/compare.py  that path held against Hugging Face
    backends/dtensor/backend.py  any Hugging Face causal LM under FSDP2
    backends/megatron/__init__.py  what this room holds
    backends/megatron/bridge.py  the door to Megatron Bridge, also without Transformer Engine
    backends/megatron/cpu.py   Megatron-Core without CUDA: patches and stand-ins, quarantined
    backends/megatron/overrides.py  model_overrides into Megatron Bridge's provider
    backends/megatron/fields.py  what Bridge drops of a model's config, put right
    backends/megatron/setup.py groups, provider, chunks, optimizer, schedule
    backends/megatron/forward.py  Core's schedules: log-probs and gradients
    backends/megatron/moe.py   how evenly routers assign tokens to experts
    backends/megatron/ckpt.py  Core's sharded checkpoints
    backends/megatron/compare.py  a model's stand-in, before it is converted
    backends/megatron/convert.py  the one-time conversion from Hugging Face
    backends/megatron/backend.py  Megatron-Core in any layout
    backends/hf_generate.py    the oracle engine: slow and easy to check
    backends/vllm_arguments.py  which arguments of vLLM a config may set
    backends/vllm.py           vLLM inside every rank
    backends/__init__.py       the choice between them

Algorithms: the steps and the loop
    algos/sft.py               supervised fine-tuning
    algos/evaluate.py          accuracy on held-out problems
    algos/grpo.py              GRPO and its family
    algos/loop.py              step, validate, save, log, until done
    ownership.py               whose a run's folders are
    algos/launch.py            from a config to a finished run
    algos/export.py            checkpoints between Hugging Face's format and Megatron's
    algos/tiny.py              a small model made from nothing
    algos/benchmark.py         whole runs timed

Commands
    bin/make_tiny.py           makes the tiny model
    bin/grpo.py                one GRPO run
    bin/convert.py             checkpoints from one format to the other
    bin/benchmark.py           whole runs timed, in one table
"""
