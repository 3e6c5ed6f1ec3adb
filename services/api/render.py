"""Renders a checkpoint's chat template: Jinja's sandbox, and the functions that transformers offers to templates. A
program of its own.

A template is a program by whoever made the checkpoint. The sandbox keeps it from Python, but not from looping without
end or from filling all memory, in one C call that no thread could stop: so it runs in a process with limits
(rendering.py) that the kernel keeps. It imports nothing of ours.

    python -I render.py MEMORY_BYTES CPU_SECONDS TEXT_BYTES
    stdin   a socket. For each request its size as 8 bytes, little-endian, and JSON {"source", "variables"}
    answer  on the same socket: a letter, t text, r refused, i no template, m out of memory, the size as above, and
            the text or why
    exits   at the end of requests; one that takes longer ends it with SIGPROF

Text is UTF-8 in which the halves of surrogate pairs stand as they are: they are our marks (tokens.py).
"""

import json
import resource
import signal
import socket
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # else only once a template fails, when there may be no memory left for it
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT, REFUSED, INVALID, EXHAUSTED = b"t", b"r", b"i", b"m"
MOST_TEMPLATES = 8
MOST_WHY = 1000


def sandbox() -> ImmutableSandboxedEnvironment:
    """Templates from it have what transformers gives them and nothing more."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class _Dict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore: they would lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Answering:
    def __init__(self, most_text_bytes: int) -> None:
        self._environment = sandbox()
        self._templates: dict[str, jinja2.Template] = {}
        self._most_text_bytes = most_text_bytes

    def answer(self, request: bytes) -> tuple[bytes, bytes]:
        """The letter and what follows it. Raises MemoryError."""
        asked = json.loads(request.decode("utf-8", "surrogatepass"))
        try:
            template = self._template(asked["source"])
        except MemoryError:
            raise
        except Exception as error:
            return INVALID, _why(error)
        try:
            text = template.render(asked["variables"]).encode("utf-8", "surrogatepass")
        except MemoryError:
            raise
        except Exception as error:  # whatever a template does wrong
            return REFUSED, _why(error)
        if len(text) > self._most_text_bytes:
            return REFUSED, f"it makes more than {self._most_text_bytes >> 20} MiB of text of them".encode()
        return TEXT, text

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._templates:
            template = self._environment.from_string(source)
            while len(self._templates) >= MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[source] = template
        return self._templates[source]


def _why(error: Exception) -> bytes:
    return (str(error) or type(error).__name__)[:MOST_WHY].encode("utf-8", "surrogatepass")


def main() -> int:
    memory_bytes, cpu_s, most_text_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    limits = ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0))
    for what, limit in limits:
        resource.setrlimit(what, (limit, limit))
    answering = _Answering(most_text_bytes)
    with socket.socket(fileno=0) as asked_on, asked_on.makefile("rwb") as stream:
        while size := stream.read(8):
            try:
                request = stream.read(int.from_bytes(size, "little"))
                signal.setitimer(signal.ITIMER_PROF, cpu_s)  # of processor time, however busy the machine is
                letter, text = answering.answer(request)
                signal.setitimer(signal.ITIMER_PROF, 0)
            except MemoryError:
                letter, text = EXHAUSTED, b"it takes too much memory for them"
            stream.write(letter + len(text).to_bytes(8, "little"))
            stream.write(text)
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
