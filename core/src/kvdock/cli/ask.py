"""Questions of ``kvdock plan``: from arguments to an answer as data and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import structs

from kvdock import choices, edge, questions
from kvdock.cli import answers
from kvdock.cli.inputs import one_rank, read_axes
from kvdock.cli.overview import warning_lines
from kvdock.cli.page import Page
from kvdock.deployment import plan_ranks
from kvdock.errors import PlanError

Inputs = Mapping[str, Any]


class Answered(NamedTuple):
    """An answer: plain data for JSON, a page for people, and the warnings of its plans."""

    data: Any
    page: Page
    warnings: tuple[str, ...]


def ask(question: str, model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    """Return the answer to one question; `inputs` are those of `kvdock.plan`.

    Raises:
        KVDockError: what cannot be served, and what would work.
    """
    answered: Answered = _ASK[question](model, inputs, asked)
    return answered


def _serves(model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    one_rank(inputs)
    plan = edge.plan(model, **inputs)
    answer = questions.serves(plan, 1 if asked["requests"] is None else asked["requests"], asked["length"], model=model)
    return Answered(answer, [*answers.serves_page(answer), *warning_lines(plan.warnings)], plan.warnings)


def _longest(model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    one_rank(inputs)
    plan = edge.plan(model, **inputs)
    answer = questions.longest(plan, 1 if asked["requests"] is None else asked["requests"], model=model)
    return Answered(answer, [*answers.longest_page(answer), *warning_lines(plan.warnings)], plan.warnings)


def _fit(model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    one_rank(inputs)
    _refuse_places("--fit", inputs)
    if inputs["parallel"]["tp_size"] is not None and inputs["weights_bytes"] is None:
        raise PlanError("--fit tries sizes of --tp itself, so --tp only says whose --weights are given; leave it out")
    if asked["length"] is None:
        answer = choices.smallest_tp(model, tokens=asked["fit"], **inputs)
    else:
        answer = choices.smallest_tp(model, requests=asked["fit"], length=asked["length"], **inputs)
    return Answered(answer, answers.smallest_tp_page(answer), ())


def _compare(model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    one_rank(inputs)
    flags = {**structs.asdict(inputs["options"]), **inputs["parallel"], **inputs}
    if inputs["weights_bytes"] is not None:  # sizes beside them say whose weights they are
        flags = {**flags, "tp_size": None, "pp_size": None}
    axes = read_axes(asked["compare"], flags)
    if "device" in axes and inputs["budget_bytes"] is not None:
        raise PlanError("--memory and --compare device=… both say how much memory there is; give one of them")
    if "budget_bytes" in axes and inputs["device"] is not None:
        raise PlanError("--device and --compare memory=… both say how much memory there is; give one of them")
    answer = choices.compare(model, axes, **inputs)
    warnings = tuple(dict.fromkeys(warning for variant in answer.variants for warning in variant.warnings))
    return Answered(answer, answers.compare_page(answer), warnings)


def _ranks(model: str, inputs: Inputs, asked: Mapping[str, Any]) -> Answered:
    _refuse_places("--ranks", inputs)
    answer = choices.survey(plan_ranks(model, **inputs))
    return Answered(answer, answers.ranks_page(answer), answer.warnings)


def _refuse_places(flag: str, inputs: Inputs) -> None:
    for name in ("pp_rank", "cp_rank", "dcp_rank"):
        if inputs["parallel"].get(name) is not None:
            raise PlanError(f"--{name.replace('_', '-')} names one rank, and {flag} plans all of them; leave it out")


_ASK = {"serves": _serves, "max_length": _longest, "fit": _fit, "compare": _compare, "ranks": _ranks}
"""Question → what answers it."""
