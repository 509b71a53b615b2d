"""Request arrivals: seeded ones, and those of trace files, read line by line.

Two formats are told apart by their first line: JSON lines with ``timestamp`` (milliseconds),
``input_length`` and ``output_length``; and CSV with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``,
whose dates become milliseconds since the first row.
"""

from __future__ import annotations

import csv
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from kvdock.errors import PlanError

MAX_LINE_BYTES = 2**20
MAX_LENGTH = 2**31 - 1
MAX_REQUESTS = 10**9
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_DATE = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it arrives (milliseconds), its prompt and its answer (tokens)."""

    timestamp_ms: float
    input_length: int
    output_length: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole request."""
        return self.input_length + self.output_length


def seeded(
    seed: int,
    requests: int,
    context_length: int,
    *,
    median_input: int | None = None,
    median_output: int | None = None,
    per_second: float = 20.0,
) -> Iterator[Arrival]:
    """Return `requests` arrivals: log-normal lengths, exponential gaps, the same for the same seed.

    No request is longer than `context_length` tokens. The medians are an eighth of the context for
    prompts, at most 512, and a quarter of the prompt's for answers, at most 64, unless given: a token of an answer
    costs a step through every layer, and prompts pass windows and pages as well.

    Raises:
        PlanError: a count is not positive, or the context has no room for a prompt and an answer.
    """
    if not 0 < requests <= MAX_REQUESTS:
        raise PlanError(f"requests={requests} is outside 1 … {MAX_REQUESTS}")
    if context_length < 2:
        raise PlanError(f"context_length={context_length} has no room for a prompt and an answer; give at least 2")
    if not per_second > 0 or math.isinf(per_second):
        raise PlanError(f"per_second={per_second} is no rate; give a number above 0")
    prompt = median_input if median_input is not None else max(1, min(512, context_length // 8))
    answer = median_output if median_output is not None else max(1, min(64, prompt // 4))
    return _draw(random.Random(seed), requests, context_length, (prompt, answer), per_second)


def _draw(
    rng: random.Random, requests: int, context_length: int, medians: tuple[int, int], per_second: float
) -> Iterator[Arrival]:
    clock = 0.0
    for _ in range(requests):
        prompt = _length(rng, medians[0], context_length - 1)
        answer = _length(rng, medians[1], context_length - prompt)
        yield Arrival(timestamp_ms=clock, input_length=prompt, output_length=answer)
        clock += rng.expovariate(per_second) * 1000


def _length(rng: random.Random, median: int, longest: int) -> int:
    return max(1, min(longest, round(median * rng.lognormvariate(0.0, 0.8))))


def read_trace(path: str | os.PathLike[str]) -> Iterator[Arrival]:
    """Yield the arrivals of a trace file without holding it in memory.

    Blank lines are skipped; a row that is earlier than the one before it arrives with that one.

    Raises:
        PlanError: the file is missing, empty or of another format, or a field is wrong; names file and line.
    """
    parse: Callable[[str, str], Arrival] | None = None
    latest = -math.inf
    for where, line in _lines(Path(path)):
        if parse is None:
            parse = _JsonRows() if line.lstrip().startswith("{") else _CsvRows(where, line)
            if isinstance(parse, _CsvRows):
                continue
        arrival = parse(where, line)
        latest = max(latest, arrival.timestamp_ms)
        yield msgspec.structs.replace(arrival, timestamp_ms=latest)
    if latest == -math.inf:
        raise PlanError(f"trace {str(path)!r} holds no request; give JSON lines or CSV with {','.join(CSV_COLUMNS)}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with the file and number that an error names."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"trace {str(path)!r}, line {number}"
                if len(raw) > MAX_LINE_BYTES:
                    raise PlanError(f"{where} is longer than {MAX_LINE_BYTES} bytes; give one request a line")
                line = _decode(where, raw).strip()
                if line:
                    yield where, line
    except OSError as error:
        raise PlanError(f"trace {str(path)!r} cannot be read ({error.strerror}); give a readable file") from error


def _decode(where: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{where} is not UTF-8 text; give JSON lines or CSV") from error


class _JsonRow(msgspec.Struct):
    timestamp: Any = msgspec.UNSET
    input_length: Any = msgspec.UNSET
    output_length: Any = msgspec.UNSET


class _JsonRows:
    """Parses one JSON object a line; other fields are left unread."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_JsonRow)

    def __call__(self, where: str, line: str) -> Arrival:
        try:
            row = self._decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PlanError(f"{where} is no JSON object ({error}); give one request a line") from error
        return Arrival(
            timestamp_ms=_timestamp(where, "timestamp", row.timestamp),
            input_length=_count(where, "input_length", row.input_length, 1),
            output_length=_count(where, "output_length", row.output_length, 0),
        )


class _CsvRows:
    """Parses rows below a header; the columns may come in any order."""

    def __init__(self, where: str, header: str) -> None:
        names = _fields(where, header)
        missing = [name for name in CSV_COLUMNS if name not in names]
        if missing:
            raise PlanError(
                f"{where} is neither a JSON object nor a CSV header with {','.join(CSV_COLUMNS)} "
                f"(missing: {', '.join(missing)})"
            )
        self._columns = [names.index(name) for name in CSV_COLUMNS]
        self._first_ns: int | None = None

    def __call__(self, where: str, line: str) -> Arrival:
        fields = _fields(where, line)
        date, prompt, answer = (fields[i].strip() if i < len(fields) else "" for i in self._columns)
        moment = _nanoseconds(where, date)
        if self._first_ns is None:
            self._first_ns = moment
        return Arrival(
            timestamp_ms=(moment - self._first_ns) / 10**6,
            input_length=_count(where, CSV_COLUMNS[1], _number(prompt), 1),
            output_length=_count(where, CSV_COLUMNS[2], _number(answer), 0),
        )


def _fields(where: str, line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise PlanError(f"{where} is no CSV row ({error})") from error


def _number(text: str) -> Any:
    if not text:
        return msgspec.UNSET
    if re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _timestamp(where: str, name: str, value: Any) -> float:
    if value is msgspec.UNSET:
        raise PlanError(f"{where}: {name} is missing; give milliseconds")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < 2**63:
        raise PlanError(f"{where}: {name}={_shown(value)} is no time; give milliseconds from 0")
    return float(value)


def _count(where: str, name: str, value: Any, least: int) -> int:
    """Return a whole number of tokens; 8.0 is one, ``true`` and 8.5 are not."""
    if value is msgspec.UNSET:
        raise PlanError(f"{where}: {name} is missing; give a number of tokens")
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not least <= value <= MAX_LENGTH:
        raise PlanError(f"{where}: {name}={_shown(value)} is no number of tokens from {least} to {MAX_LENGTH}")
    return int(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nanoseconds(where: str, text: str) -> int:
    """Return a date as nanoseconds, exactly: trace files give seven digits, datetime knows six."""
    found = _DATE.fullmatch(text)
    try:
        if found is None:
            raise ValueError("no date")
        day, time, fraction, zone = found.groups()
        moment = datetime.fromisoformat(f"{day}T{time}{zone if zone and zone != 'Z' else '+00:00'}")
    except ValueError as error:
        example = "2023-11-16 18:15:46.6805900"
        raise PlanError(f"{where}: TIMESTAMP={_shown(text)} is no date; write it as {example}") from error
    elapsed = moment - datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    return (elapsed.days * 86400 + elapsed.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))


def scaled(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """Yield arrivals with lengths multiplied by `factor`, rounded, prompts of at least one token."""
    if factor == 1:
        yield from arrivals
        return
    for arrival in arrivals:
        yield msgspec.structs.replace(
            arrival,
            input_length=min(MAX_LENGTH, max(1, round(arrival.input_length * factor))),
            output_length=min(MAX_LENGTH, round(arrival.output_length * factor)),
        )
