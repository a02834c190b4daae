"""Run a script plainly until an optimizer has stepped so often: `stopped_script.py SCRIPT STEP`.

There it prints `ready` and waits for a line. Then it prints the census that is taken inside: device, holder,
owner and bytes of each storage.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    script, last = sys.argv[1], int(sys.argv[2])
    steps = 0

    def stop_there(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == last:
            print("ready", flush=True)
            sys.stdin.readline()
            print(json.dumps(_inside()), flush=True)
            sys.stdin.readline()

    register_optimizer_step_post_hook(stop_there)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def _inside() -> list[tuple[str, str, str, int]]:
    from memtriage.account.census import take_census

    return [
        (storage.device, storage.holder or "", storage.owner, storage.nbytes)
        for storage in take_census().storages
    ]


if __name__ == "__main__":
    main()
