"""Small byte-level tokenizers built in the process, and chat templates in the styles of the common families."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
_PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

_TEXT = [
    "system\nYou are helpful.\nuser\nHow are you today?\nassistant\nI am fine, thank you.\n\nAnd you?\n\n\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "model\nThe answer is 42.\nuser\nmodel\n  Why?\n\n  Because.\n",
    "你好，世界。مرحبا بالعالم. 😀🎉 Ça va très bien.",
]

_SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As SmolLM3's: the marks hold the header and the newline behind the end of turn too.
CHATML_WIDE_MARKS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_MARKS = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# No generation prompt: the answer follows the closing bracket and a space.
MISTRAL = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
# As Qwen3's: reasoning stays in turns behind the last user turn only, which also get an empty block without any.
_QWEN3_BODY = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% set content = message.content or '' %}{% set reasoning = '' %}"
    "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}OPEN"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}CLOSE{{ '\n' }}"
    "{% elif message.role == 'tool' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QWEN3 = _QWEN3_BODY.replace("OPEN", "").replace("CLOSE", "")
QWEN3_MARKS = _QWEN3_BODY.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
# As DeepSeek-R1's: the prompt opens the reasoning, and no turn ever shows it again.
R1 = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] }}"
    "{% else %}{{ '[/INST]' + message['content'].split('</think>')[-1] + '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[/INST]<think>\n' }}{% endif %}"
)

EOS = {LLAMA3: "<|eot_id|>", LLAMA3_MARKS: "<|eot_id|>", GEMMA: "</s>", MISTRAL: "</s>", R1: "</s>"}


@cache
def _backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.add_tokens(_PLAIN_ADDED)
    return tokenizer


def chat_tokenizer(template: str, *, trim_offsets: bool = False, name: str = "tiny-chat") -> Any:
    """A fast tokenizer with `template`.

    Args:
        trim_offsets: report offsets without white space, as Llama 3's does.
    """
    backend = Tokenizer.from_str(_backend().to_str())
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS.get(template, "<|im_end|>"), bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = name
    return tokenizer


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": text, **more}
