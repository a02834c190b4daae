"""A plan on the terminal: whether the program fits, the changes rung by rung, and what was passed over."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from memtriage.model.plan import Maximum, PassedOver, Plan, PlanStep
from memtriage.model.units import count, duration, size
from memtriage.report.console import BULLET, Page
from memtriage.report.styles import BAD, GOOD

_INDENT: Final = "     "
_NAME_WIDTH: Final = 24
_OWNERS: Final = 4
_FRAMEWORKS: Final = {
    "torch": "torch",
    "trainer": "Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
}


def render(plan: Plan, console: Console) -> None:
    """Print a plan."""
    page = Page(console)
    _verdict(page, plan)
    if plan.steps:
        page.heading("Changes", "in order of cost, each simulated on top of those before it")
        for number, step in enumerate(plan.steps, 1):
            _step(page, number, step)
    if plan.next_cheaper is not None:
        page.heading("Next cheaper", "does not fit")
        actions = "; ".join(plan.next_cheaper.actions) or "the program as it is"
        page.field("", f"{actions}: needs {size(plan.next_cheaper.needs)}", labels=2)
    if plan.passed_over:
        page.heading("Passed over")
        together: dict[str, list[str]] = {}
        for passed in plan.passed_over:
            together.setdefault(_why(passed), []).append(passed.rung)
        for why, rungs in together.items():
            if len(rungs) == 1:
                page.field(rungs[0], why, labels=_NAME_WIDTH)
            else:
                page.line((f"  {', '.join(rungs)}: {why}", ""), indent=4)
    if plan.notes:
        page.heading("Assumed")
        for note in plan.notes:
            page.field("", f"{BULLET}{note}", labels=2)


def render_maximum(maximum: Maximum, console: Console) -> None:
    """Print the largest sizes within a budget."""
    page = Page(console)
    budget = size(maximum.budget)
    if not maximum.found:
        short = f"  the smallest size that was tried needs {size(maximum.least_needs)} of {budget}"
        page.line(("DOES NOT FIT", BAD), (short, "bold"))
    for row in maximum.found:
        sizes = [f"{name} {n:,}" for name, n in (("batch", row.batch), ("seq", row.seq)) if n is not None]
        page.line(("FITS", GOOD), (f"  {', '.join(sizes)}: needs {size(row.needs)} of {budget}", "bold"))
        if row.next is not None and row.next_needs is not None:
            name = "seq" if row.batch is None else "batch"
            excess = size(row.next_needs - round(maximum.budget * (1 - maximum.margin)))
            more = f"{size(row.next_needs)}, {excess} too much; {maximum.margin:.0%} stays free"
            page.line((f"      {name} {row.next:,} needs {more}", ""))
    page.line((f"{count(maximum.traces, 'trace')} in {duration(maximum.seconds)}", "dim"))
    if maximum.notes:
        page.heading("Assumed")
        for note in maximum.notes:
            page.field("", f"{BULLET}{note}", labels=2)


def _verdict(page: Page, plan: Plan) -> None:
    before, after = plan.before, plan.after
    if not plan.fits:
        tried = "even with every change that helps"
        if plan.settings_only:
            tried = "only allocator settings were tried: changes of the program need a build function"
        page.line(("DOES NOT FIT", BAD), (f"  {size(plan.short_by)} short, {tried}", "bold"))
    elif plan.steps:
        page.line(("FITS", GOOD), (f"  with {count(len(plan.steps), 'change')}", "bold"))
    else:
        page.line(("FITS", GOOD), ("  as it is", "bold"))
    if not plan.fits:
        owners = [f"{owner} {size(held)}" for owner, held in after.by_owner.items()][:_OWNERS]
        page.line((f"what remains at the peak: {', '.join(owners)}", ""))
    needs = f"needs {size(before.needs)} as it is (peak in {before.phase})"
    if plan.steps:
        needs += f", {size(after.needs)} with the changes (peak in {after.phase})"
    page.line((f"{needs}; the budget is {size(plan.budget)}", ""))
    page.line(
        (
            f"including {size(plan.outside_allocator)} outside the allocator; {plan.margin:.0%} of the "
            f"budget stays free; {count(plan.traces, 'trace')} in {duration(plan.seconds)}",
            "dim",
        )
    )


def _step(page: Page, number: int, step: PlanStep) -> None:
    page.hanging(Text(f"  {number}. ", style="bold"), Text(page.plain(step.action), style="bold"))
    facts = (f"needs {size(step.after.needs)}", f"saves {size(step.saves)}", step.playbook)
    page.hanging(Text(_INDENT), Text(page.plain(page.dot.join(facts))))
    page.hanging(Text(_INDENT), Text(page.plain(f"speed: {step.speed}"), style="dim"))
    result = step.maths if step.maths_note is None else f"{step.maths}; {step.maths_note}"
    page.hanging(Text(_INDENT), Text(page.plain(f"result: {result}"), style="dim"))
    if step.simulated_by is not None:
        page.hanging(Text(_INDENT), Text(page.plain(f"simulated: {step.simulated_by}"), style="dim"))
    for framework, code in step.code.items():
        page.raw(Text(f"{_INDENT}{_FRAMEWORKS[framework]}:", style="dim"))
        for line in code.splitlines():
            page.hanging(Text(f"{_INDENT}  "), Text(page.plain(line)), whole=True)


def _why(passed: PassedOver) -> str:
    saved = (
        f" ({size(passed.saves)} when it was tried)" if passed.saves is not None and passed.saves > 0 else ""
    )
    return f"{passed.outcome}: {passed.why}{saved}"
