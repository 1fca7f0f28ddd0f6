"""Chat templates: the same text as transformers renders, typed errors, and a closed sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import TEMPLATE

from flexspec.errors import FlexspecError, RequestError, TokenizerError
from flexspec.runtime.text.chat import ChatRenderer, render_chat

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi 🙂\n"},
    {"role": "assistant", "content": "  Hello "},
    {"role": "user", "content": "1 < 2?"},
]
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
    {%- set system_message = messages[0]['content'] %}
{% else %}
{% set loop_messages = messages %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if loop.first %}{{ bos_token }}{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
TOOLS = """{%- if tools is not none %}TOOLS{% endif %}{% if documents %}DOCS{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{- m | tojson }}{{ m | tojson(indent=2) }}
{%- endfor %}{{ pad_token }}"""


@pytest.mark.parametrize("template", [TEMPLATE, LLAMA2, TOOLS])
@pytest.mark.parametrize("generation", [True, False])
def test_text_equals_transformers(template: str, generation: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=generation, **specials)[0][
        0
    ]
    assert render_chat(template, MESSAGES, generation, **specials) == theirs
    assert theirs


def test_renderer_asks_for_the_next_turn() -> None:
    text = ChatRenderer(TEMPLATE, {}).render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_bos_is_written_once() -> None:
    assert render_chat(LLAMA2, MESSAGES, True, bos_token="<s>", eos_token="</s>").count("<s>") == 1


def test_dates() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", MESSAGES).isdigit()


@pytest.mark.parametrize(
    ("template", "messages", "error", "message"),
    [
        (LLAMA2, [{"role": "assistant", "content": "x"}], RequestError, "must alternate"),
        (TEMPLATE, [], RequestError, "no messages"),
        (TEMPLATE, [{"role": "user", "content": None}], RequestError, "TypeError"),
        (TEMPLATE, [{"role": "user"}], RequestError, "cannot render"),
        ("{% if %}", MESSAGES, TokenizerError, "does not compile"),
        pytest.param("{{ " + "9" * 10_000 + " }}", MESSAGES, TokenizerError, "does not compile", id="digits"),
        pytest.param(
            "{% if x %}" * 200 + "{% endif %}" * 200, MESSAGES, TokenizerError, "does not compile|too deeply", id="ifs"
        ),
        ("{{ x | nofilter }}", MESSAGES, TokenizerError, "does not compile"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, TokenizerError, "sandbox"),
        ("{{ messages.append(1) }}", MESSAGES, TokenizerError, "sandbox"),
        ("{% for i in range(1000000000) %}x{% endfor %}", MESSAGES, RequestError, "Range too big"),
        ("{{ 1 // 0 }}", MESSAGES, RequestError, "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", MESSAGES, RequestError, "RecursionError"),
    ],
)
def test_errors_are_typed(template: str, messages: list[Any], error: type[FlexspecError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        render_chat(template, messages)
    if isinstance(caught.value, RequestError):
        assert caught.value.param == "messages"


def test_a_bad_template_fails_when_the_renderer_is_made() -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        ChatRenderer("{% for %}", {})


_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
)
_STRING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [_PARTS, _STRING])
def test_text_comes_through_in_the_form_that_the_template_reads(template: str) -> None:
    """A template of parts that is given a string drops the user's text without a word."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert render_chat(template, messages) == "<system>be brief<user>hello"
