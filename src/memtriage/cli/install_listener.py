"""`memtriage install-listener`: let all jobs of an environment answer `memtriage census`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memtriage.cli.output import Refusal, answer

if TYPE_CHECKING:
    from rich.console import Console


def install_listener(
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove the listener.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> int:
    """Let all jobs of this environment answer a census."""
    from memtriage.session.remote import install as hook

    folder = hook.place()
    try:
        files = hook.uninstall(folder) if uninstall else hook.install(folder)
    except OSError as error:
        raise Refusal(f"cannot write to {folder}: {error.strerror}") from None
    names = [str(file) for file in files]

    def render(console: Console) -> None:
        now = "jobs that start from now on in this environment listen once they import torch"
        if uninstall:
            now = "jobs that run already continue to listen" if names else "there was nothing to remove"
        for line in (*(f"{'removed' if uninstall else 'wrote'} {name}" for name in names), now):
            console.print(line, soft_wrap=True)

    return answer({"schema": 1, "installed": not uninstall, "files": names}, json, render)
