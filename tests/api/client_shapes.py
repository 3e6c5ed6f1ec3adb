"""Requests as programs write them, with all that is odd in them, after their sources and documents. Owns bodies only;
each must be answered."""

from typing import Any

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": PARAMETERS}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    # Chat completions.
    "aider": (
        CHAT,
        {
            "messages": [
                system("Act as an expert developer."),
                user("Hi"),
                assistant("Ok."),
                system("# Reminder"),
                user("Fix it"),
            ],
            "temperature": 0,
            "stream": True,
            "max_tokens": None,
            "tools": None,
            "stop": None,
        },
    ),
    "cline": (
        CHAT,
        {
            "messages": [
                system("You are Cline."),
                user([text("<task>\nHi\n</task>"), text("<environment_details>\n</environment_details>")]),
                assistant("", tool_calls=[CALL]),
                {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
                user([text("[read_file] Result:"), text("Go on")]),
            ],
            "tools": [READ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "continue, autocomplete": (
        TEXT,
        {
            "prompt": "def add(a, b):\n",
            "suffix": "",
            "max_tokens": 32,
            "temperature": 0.01,
            "stream": True,
            "stop": ["<|im_end|>", "\n\n", "/src/"],
            "raw": True,
            "keep_alive": 1800,
            "num_ctx": 4096,
        },
    ),
    "home assistant": (
        CHAT,
        {
            "messages": [
                system("You are a voice assistant."),
                user("Turn on the light"),
                assistant(None, tool_calls=[CALL]),
                {"role": "tool", "tool_call_id": "call_1", "content": '{"success": true}'},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "HassTurnOn",
                        "parameters": {"type": "object", "properties": {}, "required": []},
                        "strict": False,
                    },
                }
            ],
            "max_completion_tokens": 150,
            "top_p": 1,
            "temperature": 1.0,
            "user": "01JD",
            "store": False,
            "stream": True,
        },
    ),
    "langchain": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                user("Hi", name="ann"),
                assistant(None, tool_calls=[CALL], refusal=None, audio=None, function_call=None, annotations=[]),
                {"role": "tool", "tool_call_id": "call_1", "content": [text("one"), text("two")], "name": "read_file"},
            ],
            "tools": [READ],
            "n": 1,
            "stream": False,
            "logprobs": False,
            "seed": -1,
            "logit_bias": {},
            "metadata": {},
        },
    ),
    "litellm, everything null": (
        CHAT,
        {
            "messages": [user("Hi")],
            "frequency_penalty": None,
            "logit_bias": None,
            "logprobs": None,
            "top_logprobs": None,
            "max_tokens": None,
            "n": None,
            "presence_penalty": None,
            "response_format": None,
            "seed": None,
            "stop": None,
            "stream": None,
            "temperature": None,
            "top_p": None,
            "tools": None,
            "tool_choice": None,
            "user": None,
            "functions": None,
            "function_call": None,
            "extra_headers": None,
        },
    ),
    "lm studio and llama.cpp": (
        CHAT,
        {
            "messages": [user("Hi")],
            "max_tokens": -1,
            "top_k": -1,
            "cache_prompt": True,
            "id_slot": -1,
            "mirostat": 0,
            "samplers": "edkypmxt",
            "timings_per_token": True,
            "repeat_penalty": 1.1,
            "n_predict": -1,
        },
    ),
    "vllm": (
        CHAT,
        {
            "messages": [user("Hi")],
            "repetition_penalty": 1.05,
            "skip_special_tokens": True,
            "min_tokens": 0,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "include_reasoning": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    "empty lists": (
        CHAT,
        {
            "messages": [user("Hi")],
            "tools": [],
            "tool_choice": "auto",
            "stop": [],
            "functions": [],
            "modalities": ["text"],
        },
    ),
    "the assistant first, then twice, and last": (
        CHAT,
        {"messages": [assistant("Hello!"), assistant("How are you?"), user("Hi"), assistant("I am")]},
    ),
    "empty contents": (
        CHAT,
        {"messages": [system(""), user(""), assistant(""), assistant(None), user([text("")]), user("Hi")]},
    ),
    "a broken call in the history": (
        CHAT,
        {
            "messages": [
                user("Hi"),
                assistant("", tool_calls=[{"function": {"name": "read_file", "arguments": '{"path": "a'}}]),
                {"role": "tool", "content": ""},
                user("Go on"),
            ],
            "tools": [{"type": "function", "function": {"name": "read_file"}}],
        },
    ),
    # Anthropic's messages.
    "claude code": (
        MESSAGES + "?beta=true",
        {
            "max_tokens": 32000,
            "stream": True,
            "temperature": 1,
            "metadata": {"user_id": "user_1_account__session_2"},
            "system": [text("You are Claude Code."), text("Be brief.", **CACHED)],
            "messages": [
                user([text("<system-reminder>\n</system-reminder>"), text("Hi", **CACHED)]),
                assistant(
                    [
                        {"type": "thinking", "thinking": "Well.", "signature": ""},
                        text("I read."),
                        {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}},
                    ]
                ),
                user(
                    [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [text("print(1)")],
                            "is_error": False,
                            **CACHED,
                        },
                        text("Go on"),
                    ]
                ),
            ],
            "tools": [
                {"name": "Read", "description": "Reads.", "input_schema": PARAMETERS | {"$schema": "x"}, **CACHED}
            ],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "context_management": {"edits": []},
            "output_config": {"effort": "medium"},
        },
    ),
    "claude code, warming up": (MESSAGES, {"max_tokens": 1, "messages": [user("quota")], "metadata": {"user_id": "u"}}),
    "anthropic, odd turns": (
        MESSAGES,
        {
            "max_tokens": 9,
            "stop_sequences": [],
            "top_k": 40,
            "service_tier": "auto",
            "messages": [
                user("Hi"),
                assistant([]),
                user("Hi"),
                assistant(""),
                {"role": "system", "content": "Be brief."},
                assistant([{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]),
                user([{"type": "tool_result", "tool_use_id": "t"}]),
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "tools": [{"type": "custom", "name": "Read", "input_schema": PARAMETERS}],
        },
    ),
    # Responses.
    "codex": (
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "store": False,
            "stream": True,
            "parallel_tool_calls": False,
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "shell",
                    "arguments": '{"command": ["ls"]}',
                    "id": None,
                },
                {"type": "function_call_output", "call_id": "c", "output": '{"output": "a.py"}'},
            ],
            "tools": [
                {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": PARAMETERS}
            ],
            "tool_choice": "auto",
            "reasoning": {"effort": "medium", "summary": "auto"},
            "prompt_cache_key": "k",
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"},
        },
    ),
    "home assistant, openai": (
        RESPONSES,
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Hi"},
            ],
            "max_output_tokens": 3000,
            "top_p": 1.0,
            "temperature": 1.0,
            "user": "01JD",
            "store": False,
            "stream": True,
            "service_tier": "auto",
            "truncation": "auto",
            "tools": [],
        },
    ),
}
HEADERS = {
    "authorization": "Bearer sk-no-key-required",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-version": "2023-06-01",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
    "openai-organization": "",
    "content-type": "application/json; charset=utf-8",
}
