"""Grammars for answers: worked out beside the engine's thread, kept by their content, and walked one id at a time.

Owns the vocabulary as llguidance reads it (tokenizer.json, at the first grammar), the bounds of time and size, and
which ids may come next in one answer. What is done with logits is choosing.py's.

llguidance counts what it does (lexer fuel, items, states), so that no grammar takes unbounded time or memory; the time
limit here also covers the waiting for others' grammars. A thread that works on one cannot be stopped, but ends soon.
"""

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from services.engine.errors import GrammarError, UnsupportedError
from services.engine.request import Form, Grammar
from services.engine.schema import is_endless
from services.vocabulary import VocabularyError, is_panic, read_vocabulary

MOST_KEPT = 64  # grammars, good and bad ones
THREADS = 2
MOST_LEXER_STATES = 50_000  # of one answer, 1 to 2 kB each
LONGEST_REASON = 500


class Matcher:
    """One answer's way through its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_ids: Iterable[int], eos_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stops = sorted(stop_ids)
        self._ends = sorted({*self._stops, *eos_ids})

    def allowed(self, may_stop: bool) -> Tensor:
        """bool [V]: the ids that may come next, at least one. Stop ids are among them if the text is complete, and
        `may_stop` or nothing else can follow. Raises GrammarError if the grammar has become too much to follow."""
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self._matcher.get_error())}")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_))
        allowed[self._ends] = False
        stuck = not bool(allowed.any())
        if self._matcher.is_accepting() and (may_stop or stuck):
            allowed[self._stops] = True
        elif stuck:
            raise GrammarError("the grammar allows nothing that could come next")
        return allowed

    def fits(self, id_: int) -> bool:
        """Whether an id could come next."""
        return self._matcher.validate_tokens([id_]) == 1

    def accept(self, id_: int) -> None:
        """An id of the answer, one that was allowed; not a stop id."""
        if not self._matcher.consume_token(id_):
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self._matcher.get_error())}")


class Grammars:
    """Safe to use from several threads. `tokenizer_file` is read when the first grammar comes."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, most_bytes: int, timeout_s: float) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(THREADS, "grammar")
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._words: Future[LLTokenizer] | None = None
        self._lock = threading.Lock()  # guards _kept and _words

    def matcher(self, grammar: Grammar, stop_ids: Iterable[int]) -> Matcher:
        """For one answer; waits until the grammar is worked out. Raises GrammarError, and UnsupportedError where there
        is no tokenizer.json."""
        work = self._work(grammar)
        words = self._vocabulary().result()
        try:
            worked_out = work.result(self._timeout_s)
        except (TimeoutError, CancelledError):
            raise self._too_slow(work) from None
        return Matcher(worked_out.deep_copy(), self._vocab_size, stop_ids, words.eos_tokens)

    async def prepare(self, grammar: Grammar) -> None:
        """Wait until `matcher` has its answer at once. Raises GrammarError if that takes too long."""
        work = self._work(grammar)
        reading = asyncio.wrap_future(self._vocabulary())
        await asyncio.wait({reading})
        waiting = asyncio.wrap_future(work)
        await asyncio.wait({waiting}, timeout=self._timeout_s)
        if not waiting.done() or waiting.cancelled():
            raise self._too_slow(work)
        reading.exception(), waiting.exception()  # which `matcher` raises

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _too_slow(self, work: "Future[LLMatcher]") -> GrammarError:
        work.cancel()  # if it has not begun; whoever else waits for it has waited too long as well, or soon will have
        return GrammarError(f"the grammar was not worked out within {self._timeout_s:g} s: make it simpler")

    def _work(self, grammar: Grammar) -> "Future[LLMatcher]":
        size_bytes = len(grammar.text.encode())
        if size_bytes > self._most_bytes:
            raise GrammarError(f"the grammar has {size_bytes} bytes, more than the {self._most_bytes} that are taken")
        self._vocabulary()
        with self._lock:
            work = self._kept.pop(grammar, None)
            if work is None or work.cancelled():
                work = self._pool.submit(self._work_out, grammar)
            self._kept[grammar] = work
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return work

    def _work_out(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._vocabulary().result()  # asked for before, so that it is not behind us in the pool
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MOST_LEXER_STATES)
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"the grammar is not usable: {_reason(matcher.get_error())}")
        try:
            Matcher(matcher.deep_copy(), self._vocab_size, tokenizer.eos_tokens, ()).allowed(may_stop=True)
        except GrammarError as error:
            raise GrammarError(f"no text fits the grammar: {error}") from None
        return matcher

    def _vocabulary(self) -> "Future[LLTokenizer]":
        """Read once; a large one takes a second, which no grammar's time limit has to cover."""
        with self._lock:
            if self._words is None:
                self._words = self._pool.submit(self._read_tokenizer)
            return self._words

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            text = read_vocabulary(self._file, "llguidance", self._vocab_size)
            return LLTokenizer(text, n_vocab=self._vocab_size)
        except BaseException as error:
            if not isinstance(error, OSError | ValueError | VocabularyError) and not is_panic(error):
                raise
            raise UnsupportedError(f"this engine follows no grammars: {error}") from error


def _source(grammar: Grammar) -> str:
    """As llguidance takes it."""
    try:
        match grammar.form:
            case Form.JSON_SCHEMA:
                schema = json.loads(grammar.text)
                if is_endless(schema):
                    raise GrammarError("no text fits the grammar: something that the schema requires needs itself")
                return LLMatcher.grammar_from_json_schema(schema)
            case Form.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case Form.LARK:
                return LLMatcher.grammar_from_lark(grammar.text)
            case Form.GBNF:
                return llguidance.grammar_from("gbnf", grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar is not usable: {error}") from error


def _reason(text: str) -> str:
    """llguidance's message without its own state, and short."""
    if text.startswith("panic"):
        return "it is too large"
    plain = re.split(r"\n*<(?:non-verbose|state|backtrace|grammar)", text, maxsplit=1)[0].strip()
    return json.dumps(plain, ensure_ascii=False)[1:-1][:LONGEST_REASON]
