"""A plan on the terminal: whether the program fits, the changes rung by rung, and what was passed over."""

from __future__ import annotations

from typing import Final

from rich.console import Console

from memtriage.model.plan import Maximum, PassedOver, Plan, PlanStep
from memtriage.model.units import count, duration, size
from memtriage.report.console import Page
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
                page.line(f"  {', '.join(rungs)}: {why}", indent=4)
    page.bullets("Assumed", plan.notes)


def render_maximum(maximum: Maximum, console: Console) -> None:
    """Print the largest sizes within a budget."""
    page = Page(console)
    budget = size(maximum.budget)
    if not maximum.found:
        short = f"the smallest size that was tried needs {size(maximum.least_needs)} of {budget}"
        page.verdict("does not fit", BAD, short)
    for row in maximum.found:
        sizes = [f"{name} {n:,}" for name, n in (("batch", row.batch), ("seq", row.seq)) if n is not None]
        page.verdict("fits", GOOD, f"{', '.join(sizes)}: needs {size(row.needs)} of {budget}")
        if row.next is not None and row.next_needs is not None:
            name = "seq" if row.batch is None else "batch"
            excess = size(row.next_needs - round(maximum.budget * (1 - maximum.margin)))
            more = f"{size(row.next_needs)}, {excess} too much; {maximum.margin:.0%} stays free"
            page.line(f"      {name} {row.next:,} needs {more}")
    page.line((f"{count(maximum.traces, 'trace')} in {duration(maximum.seconds)}", "dim"))
    page.bullets("Assumed", maximum.notes)


def _verdict(page: Page, plan: Plan) -> None:
    before, after = plan.before, plan.after
    if not plan.fits:
        tried = "even with every change that helps"
        if plan.settings_only:
            tried = "only allocator settings were tried: changes of the program need a build function"
        page.verdict("does not fit", BAD, f"{size(plan.short_by)} short, {tried}")
        owners = [f"{owner} {size(held)}" for owner, held in after.by_owner.items()][:_OWNERS]
        page.line(f"what remains at the peak: {', '.join(owners)}")
    else:
        page.verdict("fits", GOOD, f"with {count(len(plan.steps), 'change')}" if plan.steps else "as it is")
    needs = f"needs {size(before.needs)} as it is (peak in {before.phase})"
    if plan.steps:
        needs += f", {size(after.needs)} with the changes (peak in {after.phase})"
    page.line(f"{needs}; the budget is {size(plan.budget)}")
    outside = f"including {size(plan.outside_allocator)} outside the allocator"
    traces = f"{count(plan.traces, 'trace')} in {duration(plan.seconds)}"
    page.line((f"{outside}; {plan.margin:.0%} of the budget stays free; {traces}", "dim"))


def _step(page: Page, number: int, step: PlanStep) -> None:
    facts = (f"needs {size(step.after.needs)}", f"saves {size(step.saves)}", step.playbook)
    result = step.maths if step.maths_note is None else f"{step.maths}; {step.maths_note}"
    details = [f"speed: {step.speed}", f"result: {result}"]
    if step.simulated_by is not None:
        details.append(f"simulated: {step.simulated_by}")
    dim = ((detail, "dim") for detail in details)
    page.numbered(number, (step.action, "bold"), page.dot.join(facts), *dim)
    for framework, code in step.code.items():
        page.raw((f"{_INDENT}{_FRAMEWORKS[framework]}:", "dim"))
        for line in code.splitlines():
            page.hanging(f"{_INDENT}  ", line, whole=True)


def _why(passed: PassedOver) -> str:
    saved = (
        f" ({size(passed.saves)} when it was tried)" if passed.saves is not None and passed.saves > 0 else ""
    )
    return f"{passed.outcome}: {passed.why}{saved}"
