"""Unified memory against static splits of the same bytes, and what compaction costs: `python bench/unified.py`.

`workloads/shift.jsonl` (written by `shift.py`, before anything was tuned to it) goes through caches that differ only in
how they split one budget, page tables included. Requests come as in the file; one that does not fit waits, the oldest
first, and those that wait longest drop out at the end of a phase. Goals: at least 98 % of the requests of the best
static split of each phase, chosen in hindsight, and 1.2 times those of one fixed split; a compaction plans and remaps at
least 25 times faster than a Python walk over the holes, timed in turn, and its time follows what it frees.

What was fixed before the first run, and why:

* The models are real ones, a rank of a usual deployment: a hybrid with states (Qwen3-Next, tp 4) and one whose layers
  slide every other time (gpt-oss-20b, tp 1). Pages of 16, a context of 4,096, no prefix cache (the workload shares
  none), every other option as it comes.
* The budget is far below a device's, since no load that a CPU steps through fills one: half of what the offered load
  (by Little's law: arrivals a step x steps that a request lives x its bytes) of the phase that needs less would hold,
  so that memory is short in both; but enough for the plan's own split to serve a request of the whole context.
* The fixed split is the one that the same plan has without unified memory. Splits in hindsight are tenths.

Changed after the first run: a request counts for the phase that admitted it, though it may end in the next (it counted
for the one in which it ended: chats carried over counted as documents). Totals are the same either way.

Added after runs with the budget above, each before its own first run:

* A second budget, *half the load*: the same half without the exception for a whole context, reported beside the first where
  the two differ. That is so for gpt-oss-20b alone, whose chats the first budget holds whole, so that no split is short in
  them. Little more than ×1.13 was expected: a chat takes as many full as sliding slots, and the bytes of the plan's own
  split, laid out in that proportion, hold as many more as is printed beside the table; documents are one request in ten.
* A request longer than its plan serves is turned away when it comes, as an engine does. Some splits, and most under the second
  budget, cannot serve the longest; they let the rest wait behind it before.
* Tokens of finished requests are counted beside requests, which chats outnumber.
* A failure is a step whose admissions ended with a request that did not get all it needs, for whatever reason (a lack of rows or
  states was none); what nobody held then, in whichever space, is unused.
* The plan's own split and unified memory take each step in turn, in CPU time, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import kvdock
import torch
from compaction import report_compaction, report_growth
from kvdock.errors import KVDockError
from kvdock.layout import FULL, SWA
from serving import PAGE_SIZE, PHASE_MS, STEP_MS, Engine, median_ratio, serve_in_turn
from timing import machine, table, time_name

SHIFT = Path(__file__).parent / "workloads" / "shift.jsonl"
CONTEXT, STEPS = 4_096, PHASE_MS // STEP_MS
CONFIGS = Path(__file__).parent.parent / "tests" / "models"
OWN, LAZY, EAGER = "the plan's own split", "unified, lazy", "unified, eager"


class Setting(NamedTuple):
    """A model's rank, and its window of earlier tokens if layers slide."""

    name: str
    tp: int
    window: int | None


SETTINGS = (Setting("qwen3-next-80b-a3b", 4, None), Setting("gpt-oss-20b", 1, 127))


def plan_of(setting: Setting, budget: int, **options: object) -> kvdock.CachePlan:
    given = {"page_size": PAGE_SIZE, "context_length": CONTEXT, "prefix_cache": False, **options}
    parallel, path = {"tp_size": setting.tp}, CONFIGS / f"{setting.name}.json"
    return kvdock.plan(path, device="cpu", options=kvdock.CacheOptions(**given), parallel=parallel, budget_bytes=budget)


def budgets_of(setting: Setting, rows: list[dict]) -> dict[str, int]:
    """Return half of what the offered load of the lesser phase holds, or what the plan's own split needs to serve all.

    Where that is more, the half is the second budget.
    """
    plan = plan_of(setting, 2**34)
    loads: Counter[str] = Counter()
    for row in rows:
        total = row["input_length"] + row["output_length"]
        loads[row["phase"]] += plan.bytes_for(total, 1) * row["output_length"]
    half, least = min(loads.values()) // STEPS // 2, 2**20
    while not serves_all(setting, least):
        least += 2**20
    return {"half the load": half} if half >= least else {"a whole context": least, "half the load": half}


def serves_all(setting: Setting, budget: int) -> bool:
    try:
        return plan_of(setting, budget).max_request_tokens >= CONTEXT
    except KVDockError:
        return False


def static_splits(setting: Setting) -> Iterable[tuple[str, dict[str, object]]]:
    """Yield splits of the budget to choose from: so much of it for states, or so many sliding slots per full slot."""
    for tenth in range(1, 11):
        if setting.window is not None:
            yield f"ratio {tenth / 10}", {"swa_full_tokens_ratio": tenth / 10}
        elif tenth < 10:
            yield f"{tenth}0 % states", {"state_sizing": "ratio", "state_memory_ratio": tenth / (10 - tenth)}


class Bench:
    """Engines of one model and one budget, each of which has served the workload."""

    def __init__(self, setting: Setting, name: str, budget: int, rows: list[dict], turns: int) -> None:
        self.setting, self.name, self.budget, self.rows = setting, name, budget, rows
        self.static: dict[str, Engine] = {}
        for split, options in static_splits(setting):
            try:
                self.static[split] = self.engine(**options)
            except KVDockError:
                continue  # this split cannot be planned
            serve_in_turn({split: self.static[split]}, rows)
        self.turns: list[dict[str, Engine]] = []
        """The plan's own split and unified memory, step by step in turn, as often as was asked."""
        for _ in range(turns):
            self.turns.append({OWN: self.engine(), LAZY: self.engine(unified_memory=True)})
            serve_in_turn(self.turns[-1], rows)
        eager = self.engine(unified_memory=True, lazy_compaction=False)
        serve_in_turn({EAGER: eager}, rows)
        self.sides = {**self.turns[0], EAGER: eager}
        self.phases = [str(phase) for phase in range(round(rows[-1]["timestamp"]) // PHASE_MS + 1)]

    def engine(self, **options: object) -> Engine:
        return Engine(kvdock.build(plan_of(self.setting, self.budget, **options)), self.setting.window)

    def report(self) -> list[str]:
        return [self.report_requests(), self.report_costs(), self.report_time()]

    def report_requests(self) -> str:
        """Return what each side finished by phase, and how unified memory compares."""
        best = {p: max(self.static, key=lambda name, p=p: self.static[name].finished[p]) for p in self.phases}
        most = [self.static[best[p]].finished[p] for p in self.phases]
        fixed = max(self.static, key=lambda name: self.static[name].finished.total())
        served = self.sides[LAZY].finished.total()
        lines = [[f"best split of each phase ({', '.join(best.values())})", *map(str, most), str(sum(most)), "", ""]]
        for name, engine in {**self.sides, **{f"static, {n}": e for n, e in self.static.items()}}.items():
            found = engine.finished
            figures = [str(found.total()), f"{engine.tokens:,}", f"×{served / found.total():.2f}"]
            lines.append([name, *(str(found[p]) for p in self.phases), *figures])
        own = self.sides[OWN].finished.total()
        title = (
            f"finished requests by phase, {self.title}: {served / sum(most):.3f} of the best splits (goal ≥ 0.98), "
            f"×{served / own:.2f} of the plan's own split (goal ≥ ×1.2), ×{served / self.static[fixed].finished.total():.2f} "
            f"of the best split of all ({fixed})"
        )
        header = ["side", *self.phases, "all", "their tokens", "unified, lazy: × of it"]
        return table(title, header, lines) + "\n" + self.expected(own, sum(most))

    def expected(self, own: int, best: int) -> str:
        """Return how much more than the plan's own split serves there is to serve, whatever the allocator."""
        text = (
            f"All {len(self.rows):,} requests that come are ×{len(self.rows) / own:.2f} of what the plan's own split finished, "
            f"the best split of each phase ×{best / own:.2f} of it."
        )
        if self.setting.window is not None:
            plan = self.sides[OWN].plan
            sizes, cost = plan.sizes, {space: plan.costs.per_slot[space].kv for space in (FULL, SWA)}
            both = sum(sizes[space] * cost[space] for space in (FULL, SWA)) / sum(cost.values())
            text += (
                " A chat, shorter than the window, takes as many slots of both spaces: the bytes of that split hold "
                f"×{both / min(sizes[FULL], sizes[SWA]):.3f} of the chats that it holds at once."
            )
        return text + "\n"

    def report_costs(self) -> str:
        """Return what was admitted and what failed, what was unused then, and what compaction moved."""
        lines = []
        for name, engine in self.sides.items():
            figures = [engine.admitted, engine.failed, engine.gave_way, engine.turned_away]
            lines.append(
                [
                    name,
                    *map(str, figures),
                    *(self.unused(engine, phases) for phases in (self.phases[::2], self.phases[1::2])),
                    f"{engine.moved / 2**20:.1f} MiB in {engine.passes} passes",
                    f"{engine.moved / max(1, engine.freed):.3f}",
                ]
            )
        counted = ["admitted", "admissions failed", "gave way", "turned away"]
        header = ["side", *counted, "unused at a failure, chats", "documents", "moved", "a freed byte"]
        return table(f"failures and compaction, {self.title}", header, lines)

    def unused(self, engine: Engine, phases: Iterable[str]) -> str:
        """Return the mean of what nobody held when an admission failed, and which part of the budget that is."""
        found = [nbytes for phase in phases for nbytes in engine.unused[phase]]
        mean = statistics.mean(found) if found else 0
        return f"{mean / 2**20:.1f} MiB ({mean / self.budget:.0%})"

    def report_time(self) -> str:
        """Return the CPU time of a step, and for each request that finished."""
        lines = []
        for phase in [*self.phases, "all"]:
            chosen = self.phases if phase == "all" else [phase]
            a_step = {
                n: [self.spent(turn[n], chosen) / STEPS / len(chosen) for turn in self.turns] for n in (OWN, LAZY)
            }
            counts = {n: sum(self.sides[n].finished[p] for p in chosen) for n in (OWN, LAZY)}
            a_request = {n: [us * STEPS * len(chosen) / max(1, counts[n]) for us in a_step[n]] for n in (OWN, LAZY)}
            cells = [phase]
            for spent in (a_step, a_request):
                cells += [time_name(statistics.median(spent[n])) for n in (OWN, LAZY)]
                cells.append(f"×{median_ratio(spent[LAZY], spent[OWN]):.2f}")
            lines.append(cells)
        header = ["phase", "a step, own split", "unified", "ratio", "a finished request, own split", "unified", "ratio"]
        title = f"CPU time, {self.title}; steps in turn, medians of {len(self.turns)} runs"
        return table(title, header, lines)

    @property
    def title(self) -> str:
        return f"{self.setting.name}, tp {self.setting.tp}, {self.name}: {self.budget / 2**20:.0f} MiB"

    @staticmethod
    def spent(engine: Engine, phases: Iterable[str]) -> float:
        return sum(engine.spent[phase] for phase in phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="runs of what is timed step by step")
    parser.add_argument("--repeats", type=int, default=40, help="compactions that are timed")
    parser.add_argument("--only", choices=(*(setting.name for setting in SETTINGS), "compaction"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in SHIFT.read_text(encoding="utf-8").splitlines()]
    parts: list[str] = []
    for setting in SETTINGS:
        if chosen.only in (None, setting.name):
            for name, budget in budgets_of(setting, rows).items():
                parts += Bench(setting, name, budget, rows, chosen.turns).report()
    if chosen.only in (None, "compaction"):
        parts += [report_compaction(chosen.repeats), report_growth(chosen.repeats)]
    text = (
        f"{machine()}. CPU time; the script's head says how models and budgets were chosen, and when.\n\n"
        + "\n".join(parts)
    )
    print(text)
    if chosen.write is not None:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
