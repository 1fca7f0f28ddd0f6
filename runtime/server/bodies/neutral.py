"""Parameters that are known but not offered, and the values of each that ask for nothing and are therefore accepted.

Clients send most of these by habit: a default spelled out, or a hint that can change no token. ``docs/http.md`` lists
them. null asks for nothing whatever the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Whether a value asks for nothing, given the whole object that it stands in.
Neutral = Callable[[object, Mapping[str, object]], bool]
NeutralValues = Mapping[str, Neutral]


def equal_to(*values: object) -> Neutral:
    """Just these values. Not plain equality: logprobs=0 asks for something, logprobs=false does not."""
    return lambda value, _: any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )


def any_of(*types: type) -> Neutral:
    """Any value of these types: a hint that no token depends on."""
    return lambda value, _: isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _tools(value: object, body: Mapping[str, object]) -> bool:
    return value == [] or (isinstance(value, list) and body.get("tool_choice") == "none")


def _best_of(value: object, body: Mapping[str, object]) -> bool:
    n = body.get("n")
    return not isinstance(value, bool) and value == (1 if n is None else n)


def _include(value: object, _: Mapping[str, object]) -> bool:
    return isinstance(value, list) and all(item == "reasoning.encrypted_content" for item in value)  # there is none


_FLAG, _TEXT, _OBJECT, _NUMBER = any_of(bool), any_of(str), any_of(dict), any_of(int, float)
_NOTHING = equal_to()

_HINTS: NeutralValues = {
    "cache_prompt": _FLAG,
    "cache_salt": _TEXT,
    "keep_alive": any_of(str, int, float),
    "metadata": _OBJECT,
    "priority": _NUMBER,
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": _TEXT,
    "request_id": _TEXT,
    "safety_identifier": _TEXT,
}

# Sampling and output options of OpenAI, vLLM, SGLang, TGI and llama.cpp.
_BOTH: NeutralValues = {
    **_HINTS,
    "add_generation_prompt": equal_to(True),
    "allowed_token_ids": _NOTHING,
    "bad_words": equal_to([]),
    "best_of": _best_of,
    "detokenize": equal_to(True),
    "do_sample": equal_to(True),
    "dry_multiplier": equal_to(0),
    "dynatemp_range": equal_to(0),
    "extra_body": equal_to({}),
    "frequency_penalty": equal_to(0),
    "grammar": equal_to(""),
    "guided_choice": equal_to([]),
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "id_slot": equal_to(-1),
    "include_stop_str_in_output": equal_to(False),
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": _NUMBER,  # of beam search only
    "logit_bias": equal_to({}),
    "logits_processors": equal_to([]),
    "logprobs": equal_to(False),
    "min_tokens": equal_to(0),
    "mirostat": equal_to(0),
    "presence_penalty": equal_to(0),
    "prompt_logprobs": equal_to(False),
    "regex": _NOTHING,
    "repeat_last_n": _NUMBER,  # of a penalty that is off
    "repeat_penalty": equal_to(1),
    "repetition_penalty": equal_to(1),
    "response_format": equal_to({"type": "text"}),
    "return_token_ids": equal_to(False),
    "return_tokens_as_token_ids": equal_to(False),
    "service_tier": equal_to("auto", "default"),
    "skip_special_tokens": equal_to(True),
    "spaces_between_special_tokens": equal_to(True),
    "stop_token_ids": equal_to([]),
    "store": equal_to(False),
    "structured_outputs": equal_to({}),
    "tfs_z": equal_to(1),
    "timings_per_token": equal_to(False),
    "top_a": equal_to(0),
    "truncate_prompt_tokens": _NOTHING,
    "typical_p": equal_to(1),
    "use_beam_search": equal_to(False),
    "vllm_xargs": equal_to({}),
    "watermark": equal_to(False),
    "xtc_probability": equal_to(0),
}

_TOOLS: NeutralValues = {
    "function_call": equal_to("none", "auto"),
    "functions": equal_to([]),
    "parallel_tool_calls": _FLAG,
    "tool_choice": equal_to("none", "auto"),
    "tools": _tools,
}

CHAT_NEUTRAL: NeutralValues = {
    **_BOTH,
    **_TOOLS,
    "add_special_tokens": equal_to(False),
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "chat_template_kwargs": equal_to({}),
    "continue_final_message": equal_to(False),
    "documents": equal_to([]),
    "echo": equal_to(False),
    "enable_thinking": equal_to(False),
    "include_reasoning": _FLAG,
    "mm_processor_kwargs": equal_to({}),
    "modalities": equal_to(["text"]),
    "moderation": _NOTHING,
    "plugins": equal_to([]),
    "prediction": _OBJECT,
    "reasoning": equal_to({}),
    "reasoning_effort": equal_to("none"),
    "separate_reasoning": _FLAG,
    "think": equal_to(False),
    "top_logprobs": equal_to(0),
    "transforms": equal_to([]),
    "verbosity": equal_to("medium"),
    "web_search_options": _NOTHING,
}

TEXT_NEUTRAL: NeutralValues = {
    **_BOTH,
    "add_special_tokens": equal_to(True),
    "suffix": equal_to(""),
}

RESPONSES_NEUTRAL: NeutralValues = {
    **_HINTS,
    **_TOOLS,
    "background": equal_to(False),
    "context_management": equal_to([]),
    "conversation": _NOTHING,
    "frequency_penalty": equal_to(0),
    "include": _include,
    "max_tool_calls": _NUMBER,
    "moderation": _NOTHING,
    "presence_penalty": equal_to(0),
    "previous_response_id": _NOTHING,
    "prompt": _NOTHING,
    "reasoning": lambda value, _: isinstance(value, dict) and all(v in (None, "none") for v in value.values()),
    "service_tier": equal_to("auto", "default"),
    "store": equal_to(False),
    "text": lambda value, _: isinstance(value, dict) and _plain_text(value),
    "top_logprobs": equal_to(0),
    "truncation": equal_to("disabled"),
}

# Keys of a chat message that answers carry and that clients send back in the next turn, or hints.
MESSAGE_NEUTRAL: NeutralValues = {
    "annotations": any_of(list),
    "audio": _NOTHING,
    "cache_control": _OBJECT,
    "finish_reason": _TEXT,
    "id": _TEXT,
    "images": equal_to([]),
    "parsed": _NOTHING,
    "prefix": equal_to(False),
    "provider_specific_fields": _OBJECT,
    "reasoning_details": equal_to([]),
    "thinking_blocks": equal_to([]),
}

PART_NEUTRAL: NeutralValues = {
    "annotations": any_of(list),
    "cache_control": _OBJECT,
    "id": _TEXT,
    "logprobs": any_of(list),
}

TOOL_CALL_NEUTRAL: NeutralValues = {
    "index": _NUMBER,
    "cache_control": _OBJECT,
    "provider_specific_fields": _OBJECT,
}

STREAM_NEUTRAL: NeutralValues = {"include_obfuscation": equal_to(False)}


def _plain_text(value: Mapping[str, object]) -> bool:
    allowed = {"format": {"type": "text"}, "verbosity": "medium"}
    return all(item is None or item == allowed.get(key) for key, item in value.items())
