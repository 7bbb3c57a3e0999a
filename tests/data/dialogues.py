"""A tokenizer with a chat template, and conversations."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
PLAIN = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
        {%- generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
    {%- else %}
{{- '<|im_start|>' ~ message['role'] ~ '\n' ~ message['content'] | trim ~ '<|im_end|>' }}
    {%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Blocks on separate lines, which the environment has to trim as transformers does."""

THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
{{- tool | tojson ~ '\\n' }}
    {%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set said = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
{{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}
        {%- endif %}
{{- said }}
        {%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ call | tojson ~ '</tool_call>' }}
        {%- endfor %}
    {%- else %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ said }}
    {%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Of the structure of Qwen3's: thoughts are kept after the last question alone, and a last message
without any has an empty block."""

HARMONY = """\
{%- for m in messages %}
{{- '<|start|>' ~ m.role }}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and loop.last %}
{{- '<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|><|start|>assistant' }}
        {%- endif %}
{{- '<|channel|>final' }}
    {%- endif %}
{{- '<|message|>' ~ m.content }}
{{- '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt }}
{{- '<|end|>' if m.role != 'assistant' or not loop.last or add_generation_prompt }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""Of the structure of gpt-oss's: messages end with <|end|>, and a last answer with <|return|>."""

CONVERSATIONS = [
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is 2 + 2 ?"},
        {"role": "assistant", "content": "4 é"},
        {"role": "user", "content": "and 3 ?"},
        {"role": "assistant", "content": "5 of course"},
    ],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello you"}],
]


def write_tokenizer(
    folder: pathlib.Path, template: str | list | None = PLAIN, *, bos: bool = False, **config
) -> str:
    """Byte-level BPE in a tokenizer.json, and its other files; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["hello you and be brief of course what is user assistant"], trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    made.save(str(folder / "tokenizer.json"))
    values = {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return str(folder / "tokenizer.json")


def write_lines(path: pathlib.Path, records: list) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
