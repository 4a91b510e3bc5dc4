"""Chat templates in the manner of known families, and tokenizers with their special tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from minirl.algos import tiny

CHATML = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content"
    " + '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}"
    "{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' }}"
    "{{- system + '<|eot_id|>' }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n'"
    " + (first if loop.first else '') }}{{ m['content'] | trim }}{{ '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set n = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set n.system = m['content'] + '\\n\\n' %}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + n.system + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


class Family(NamedTuple):
    """A chat template and what its tokenizer calls special."""

    template: str
    special: tuple[str, ...]
    """BOS first, EOS second."""
    kwargs: Mapping[str, object] = MappingProxyType({})
    known: tuple[str, ...] = ()
    """Tokens that the vocabulary was extended by, and that are text."""


NO_BOS = "<|endoftext|>"
IM = (NO_BOS, "<|im_end|>", "<|im_start|>")
HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
THINK = ("<think>", "</think>")
FAMILIES = {
    "qwen2.5": Family(CHATML, IM),
    "qwen3": Family(QWEN3, IM, known=THINK),
    "qwen3 without thinking": Family(QWEN3, IM, {"enable_thinking": False}, THINK),
    "llama 3": Family(LLAMA3, HEADERS, {"date_string": "26 Jul 2024"}),
    "gemma": Family(GEMMA, ("<bos>", "<end_of_turn>", "<start_of_turn>", "<eos>")),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]")),
    "tiny": Family(tiny.CHAT_TEMPLATE, ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"),
                   known=(tiny.INSTRUCTION,)),
}  # fmt: skip


def byte_level(first_id: int) -> Tokenizer:
    """Bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "m"), ("im", "_"), ("<", "|"), ("|", ">"), ("Ġ", "a"), ("[", "I"), ("<", "s")]
    words = [*alphabet, *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({w: first_id + i for i, w in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def metaspace(first_id: int) -> Tokenizer:
    """Characters, the first with a space before it, as in SentencePiece's models."""
    words = ["▁", *map(chr, range(33, 127)), "\n", "▁a", "▁<"]
    merges = [("▁", "a"), ("▁", "<")]
    vocabulary = {w: first_id + i for i, w in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    return core


def characters(first_id: int) -> Tokenizer:
    """A word for each character of ASCII."""
    words = ["\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({w: first_id + i for i, w in enumerate(words)}, "?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


CORES = {"bytes": byte_level, "metaspace": metaspace, "characters": characters}


def tokenizer_of(
    family: Family, core: str = "bytes", *, adds_bos: bool = False, **flags: bool
) -> PreTrainedTokenizerFast:
    """A tokenizer of a family. `flags` are those of its special tokens."""
    inner = CORES[core](0)
    inner.add_special_tokens([AddedToken(t, special=True, **flags) for t in family.special])
    inner.add_tokens([AddedToken(t, normalized=False) for t in family.known])
    bos, eos, *others = family.special
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=None if bos == NO_BOS else bos,
        eos_token=eos,
        additional_special_tokens=others,
    )
    tokenizer.chat_template = family.template
    return tokenizer
