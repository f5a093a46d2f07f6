r"""ChatML, the chat template of sources that name no other.

    <|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|endoftext|>
                                                                     ^^^^^^^^^^^ targets

Targets are the assistant's words and the `<|im_end|>` that ends its turn, where generation stops.
`<|endoftext|>` ends the document as in every source; it belongs to no turn, so it is not a target.
Tools, calls and their answers have the form of Hermes: JSON between tags, the tools in the system
turn. Reasoning stands between `<think>` tags before the answer, in every turn.
"""

from typing import TYPE_CHECKING

from titan_loop.errors import UserError
from titan_loop.text.tokenizer import TURN_END, TURN_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = f"""\
{{%- if tools -%}}
{{{{ '{TURN_START}system\\n' }}}}
{{%- if messages[0]['role'] == 'system' -%}}
{{{{ messages[0]['content'] + '\\n\\n' }}}}
{{%- endif -%}}
{{{{ 'You can call these functions:\\n<tools>' }}}}
{{%- for tool in tools -%}}
{{{{ '\\n' + (tool | tojson) }}}}
{{%- endfor -%}}
{{{{ '\\n</tools>\\nTo call one, write its name and its arguments as JSON:\\n<tool_call>\\n' }}}}
{{{{- '{{"name": "...", "arguments": {{...}}}}\\n</tool_call>{TURN_END}\\n' }}}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{%- set content = message['content'] or '' -%}}
{{%- if message['role'] == 'assistant' -%}}
{{{{ '{TURN_START}assistant\\n' }}}}
{{%- generation -%}}
{{%- if message['reasoning_content'] -%}}
{{{{ '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}}}
{{%- endif -%}}
{{{{ content }}}}
{{%- for call in message['tool_calls'] or [] -%}}
{{%- set function = call['function'] -%}}
{{%- if content or not loop.first -%}}
{{{{ '\\n' }}}}
{{%- endif -%}}
{{{{ '<tool_call>\\n{{"name": ' + (function['name'] | tojson) + ', "arguments": ' }}}}
{{%- if function['arguments'] is string -%}}
{{{{ function['arguments'] }}}}
{{%- else -%}}
{{{{ function['arguments'] | tojson }}}}
{{%- endif -%}}
{{{{ '}}\\n</tool_call>' }}}}
{{%- endfor -%}}
{{{{ '{TURN_END}' }}}}
{{%- endgeneration -%}}
{{{{ '\\n' }}}}
{{%- elif message['role'] == 'tool' -%}}
{{{{ '{TURN_START}tool\\n<tool_response>\\n' + content + '\\n</tool_response>{TURN_END}\\n' }}}}
{{%- elif not (tools and loop.first and message['role'] == 'system') -%}}
{{{{ '{TURN_START}' + message['role'] + '\\n' + content + '{TURN_END}\\n' }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{ '{TURN_START}assistant\\n' }}}}
{{%- endif -%}}
"""
"""Jinja text, with marks around what is trained on."""


def require_chatml(tokenizer: "Tokenizer") -> None:
    """Raise `UserError` for a tokenizer without the tokens that begin and end a turn."""
    for name in (TURN_START, TURN_END):
        if tokenizer.token_to_id(name) is None:
            raise UserError(
                f"control token {name!r} is not in the tokenizer, and ChatML needs it: give "
                "--chat-template tokenizer if the tokenizer has a template of its own"
            )
