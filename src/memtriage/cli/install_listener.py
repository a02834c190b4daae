"""`memtriage install-listener`: let all jobs of an environment answer `memtriage census`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memtriage.process.messages import complain


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
        complain("memtriage install-listener", f"cannot write to {folder}: {error.strerror}")
        return 2
    names = [str(file) for file in files]
    if json:
        import msgspec

        result = {"schema": 1, "installed": not uninstall, "files": names}
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        return 0
    for name in names:
        print(f"{'removed' if uninstall else 'wrote'} {name}")
    if uninstall:
        print("jobs that run already continue to listen" if names else "there was nothing to remove")
    else:
        print("jobs that start from now on in this environment listen once they import torch")
    return 0
