"""A chat template that bytes suffice for: a role, a line end, the message, byte 0.

    user␊Hello␀assistant␊Hi!␀

A tokenizer uses it once `tokenizer.chat_template = CHAT_TEMPLATE` is set, which is saved with it. No token is added.
Byte 0 ends a message, so that `generate` stops there, and is removed from within messages, so that none can imitate
another. The prompt for an answer ends in `assistant␊`. `return_assistant_tokens_mask` needs `tokenizer.to_fast()`.
"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['content'] is not string -%}
{{- raise_exception('The content of a message must be a string.') -}}
{%- endif -%}
{{- message['role'] + '\\n' -}}
{%- set content = message['content'] | replace('\\x00', '') + '\\x00' -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- content -}}{%- endgeneration -%}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant\\n' -}}{%- endif -%}"""
