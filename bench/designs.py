"""Counts what two designs of unified memory move and refuse, without memory: `python bench/designs.py`.

Both serve the requests of `workloads/shift.jsonl` in the same steps. *Line*: each space is one stretch of the buffer
and grows from its end; compaction moves the outermost pages into holes. *Blocks*: blocks as large as a state, each of
one space at a time; the emptiest is evacuated when another space needs one. Only counts of pages are kept.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from timing import table

SHIFT = Path(__file__).parent / "workloads" / "shift.jsonl"
PAGE_TOKENS, STEP_MS, MAX_WAITING = 16, 20, 64


class Line:
    """States from one end, KV pages from the other; `at` holds who owns each position of a stretch, from its end on."""

    def __init__(self, total: int, page: int, state: int) -> None:
        self.total, self.unit = total, {"kv": page, "state": state}
        self.at: dict[str, list[int | None]] = {"kv": [], "state": []}
        self.where: dict[str, dict[int, int]] = {"kv": {}, "state": {}}
        self.holes: dict[str, set[int]] = {"kv": set(), "state": set()}
        self.moved = self.names = 0

    def take(self, space: str, count: int) -> list[int] | None:
        other = "state" if space == "kv" else "kv"
        live = {s: len(self.where[s]) + (count if s == space else 0) for s in self.unit}
        if sum(live[s] * self.unit[s] for s in live) > self.total:
            return None
        grown = max(0, count - len(self.holes[space]))
        ends = (len(self.at[space]) + grown) * self.unit[space]
        while ends + len(self.at[other]) * self.unit[other] > self.total:
            self._retreat(other)
        found = []
        for _ in range(count):
            self.names += 1
            if self.holes[space]:
                place = self.holes[space].pop()
                self.at[space][place] = self.names
            else:
                place = len(self.at[space])
                self.at[space].append(self.names)
            self.where[space][self.names] = place
            found.append(self.names)
        return found

    def _retreat(self, space: str) -> None:
        owner, place = self.at[space].pop(), len(self.at[space])
        if owner is None:
            self.holes[space].discard(place)
            return
        hole = self.holes[space].pop()
        self.at[space][hole], self.where[space][owner] = owner, hole
        self.moved += self.unit[space]

    def give(self, space: str, names: list[int]) -> None:
        for name in names:
            place = self.where[space].pop(name)
            self.at[space][place] = None
            self.holes[space].add(place)


class Blocks:
    """Blocks as large as a state; a KV block has as many pages as fit, and the fullest with room is filled first."""

    def __init__(self, total: int, page: int, state: int) -> None:
        self.page, self.per_block = page, state // page
        self.free = total // state
        self.used: dict[int, int] = {}
        self.where: dict[int, int] = {}
        self.inside: dict[int, set[int]] = {}
        self.moved = self.names = 0

    def _place(self, name: int, avoid: int = -1) -> None:
        roomy = [b for b, n in self.used.items() if n < self.per_block and b != avoid]
        if roomy:
            block = max(roomy, key=self.used.__getitem__)
        else:
            self.free -= 1
            self.names += 1
            block = self.names
            self.used[block], self.inside[block] = 0, set()
        self.used[block] += 1
        self.inside[block].add(name)
        self.where[name] = block

    def _evacuate(self) -> bool:
        if not self.used:
            return False
        block = min(self.used, key=self.used.__getitem__)
        spare = sum(self.per_block - n for b, n in self.used.items() if b != block)
        if self.used[block] > spare:
            return False
        for name in tuple(self.inside[block]):
            self._place(name, avoid=block)
            self.moved += self.page
        del self.used[block], self.inside[block]
        self.free += 1
        return True

    def take(self, space: str, count: int) -> list[int] | None:
        if space == "state":
            while self.free < count:
                if not self._evacuate():
                    return None
            self.free -= count
        else:
            spare = sum(self.per_block - n for n in self.used.values())
            if count > spare + self.free * self.per_block:
                return None
        found = []
        for _ in range(count):
            self.names += 1
            found.append(self.names)
            if space == "kv":
                self._place(self.names)
        return found

    def give(self, space: str, names: list[int]) -> None:
        if space == "state":
            self.free += len(names)
            return
        for name in names:
            block = self.where.pop(name)
            self.inside[block].remove(name)
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block], self.inside[block]
                self.free += 1


def serve(memory: Line | Blocks, rows: list[dict], seed: int) -> tuple[int, int]:
    """Return finished requests and refused allocations; a request takes all of its pages when it begins."""
    rng, running, waiting, place, finished, refused = random.Random(seed), [], [], 0, 0, 0
    for step in range(round(rows[-1]["timestamp"]) // STEP_MS + 1):
        while place < len(rows) and rows[place]["timestamp"] <= step * STEP_MS:
            waiting.append(rows[place])
            place += 1
        waiting = waiting[-MAX_WAITING:]
        for request in [r for r in running if r[0] <= step]:
            memory.give("kv", request[1])
            memory.give("state", request[2])
            running.remove(request)
            finished += 1
        while waiting:
            row = waiting[0]
            pages = memory.take("kv", -(-(row["input_length"] + row["output_length"]) // PAGE_TOKENS))
            state = None if pages is None else memory.take("state", 1)
            if pages is None or state is None:
                refused += 1
                if pages is not None:
                    memory.give("kv", pages)
                break
            waiting.pop(0)
            running.append((step + row["output_length"] + rng.randrange(3), pages, state))
    return finished, refused


def main() -> None:
    rows = [json.loads(line) for line in SHIFT.read_text(encoding="utf-8").splitlines()]
    for page, state in ((8, 64), (8, 68), (10, 64), (2, 397)):
        found = []
        for name, design in (("line", Line), ("blocks", Blocks)):
            memory = design(12_288, page, state)
            finished, refused = serve(memory, rows, 1)
            found.append([name, str(finished), str(refused), f"{memory.moved / 1024:.1f} MiB"])
        title = f"KV pages of {page} KiB, states of {state} KiB, a buffer of 12 MiB"
        print(table(title, ["design", "finished", "refused", "moved"], found))


if __name__ == "__main__":
    main()
