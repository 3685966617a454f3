"""A chat template that bytes suffice for: a role, a line end, the message, byte 0.

    user␊Hello␀assistant␊Hi!␀

A tokenizer uses it once `tokenizer.chat_template = CHAT_TEMPLATE` is set, which is saved with it. No token is added.
Byte 0 ends a message, so that `generate` stops there, and is removed from within messages, so that none can imitate
another. The prompt for an answer ends in `assistant␊`. `return_assistant_tokens_mask` needs `tokenizer.to_fast()`.

Tools are one more message, `tools␊`, with a line of JSON each. A call is a part of an answer, and its result a message
of the role `tool`:

    <tool_call>␊{"name": "add", "arguments": {"a": 1}}␊</tool_call>
"""

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- 'tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson | replace('\\x00', '') + '\\n' -}}{%- endfor -%}
{{- '\\x00' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['content'] is not string -%}
{{- raise_exception('The content of a message must be a string.') -}}
{%- endif -%}
{{- message['role'] + '\\n' -}}
{%- set parts = namespace(text=message['content']) -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set name, arguments = call['function']['name'] | tojson, call['function']['arguments'] | tojson -%}
{%- set line = '{"name": ' + name + ', "arguments": ' + arguments + '}' -%}
{%- set parts.text = parts.text + '<tool_call>\\n' + line + '\\n</tool_call>' -%}
{%- endfor -%}
{%- set content = parts.text | replace('\\x00', '') + '\\x00' -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- content -}}{%- endgeneration -%}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant\\n' -}}{%- endif -%}"""
