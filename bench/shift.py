"""Writes a workload whose needs shift: short chats, then long documents, and again: `python bench/shift.py`.

Chats hold a state each and few tokens, documents many tokens and one state, so what memory is short of changes from
phase to phase. Arrivals come faster than any cache of `unified.py` serves them. The same seed writes the same file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent / "workloads" / "shift.jsonl"
SEED = 8
PHASE_MS = 5_000


class Kind(NamedTuple):
    """Requests of one phase: how many, and the medians of their prompts and answers in tokens."""

    name: str
    requests: int
    prompt: int
    answer: int


CHATS, DOCUMENTS = Kind("chats", 1400, 20, 12), Kind("documents", 160, 1500, 32)
PHASES = (CHATS, DOCUMENTS, CHATS, DOCUMENTS)


def draw(seed: int) -> list[dict[str, object]]:
    """Return the requests of all phases, spread evenly over each."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for place, kind in enumerate(PHASES):
        for i in range(kind.requests):
            prompt, answer = (max(2, round(m * rng.lognormvariate(0.0, 0.4))) for m in (kind.prompt, kind.answer))
            clock = (place + i / kind.requests) * PHASE_MS
            rows.append(
                {
                    "timestamp": round(clock, 1),
                    "input_length": min(prompt, 4000),
                    "output_length": min(answer, 90),
                    "phase": f"{place} {kind.name}",
                }
            )
    return rows


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(row) + "\n" for row in draw(SEED)), encoding="utf-8")
