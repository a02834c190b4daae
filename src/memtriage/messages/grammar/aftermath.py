"""What other processes say when one has died: it follows from the first failure and explains nothing."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import Grammar, Message

_KINDS: Final = {
    "collective timed out": r"[Ww]atchdogcaughtcollectiveoperationtimeout|"
    r"SomeNCCLoperationshavefailedortimedout|Timedoutwaiting\d+msfor(?:recv|send)",
    "watchdog ended the process": r"[Ww]atchdogthreadterminatedwithexception|totakedownthe(?:entire)?process",
    "peer lost": r"remoteprocessexited|Connection(?:closedby(?:remote)?peer|resetbypeer|closedbyremote)|"
    r"socketTimeout|NCCLWARN.{0,60}?(?:[Cc]onnectionclosed|peerclosed)|ncclRemoteError",
    "ended by the launcher": r"(?:Sendingprocess\d{1,10})?closingsignalSIG(?:TERM|KILL|INT)|"
    r"Terminatingprocessesforlocal_rank|srun:(?:error:)?(?:Terminating|Jobstepaborted)",
    "launcher's report": r"ChildFailedError|failed\(exitcode:1\)|Rootcause\(firstobservedfailure\)",
}
_START: Final = re.compile("|".join(f"({pattern})" for pattern in _KINDS.values()))


def _read(start: re.Match[str], text: str) -> Message:
    form = next(kind for kind, words in zip(_KINDS, start.groups(), strict=True) if words)
    return Message("aftermath", form=form, ran_out=False, length=len(start[0]))


GRAMMARS: Final = (Grammar(_START, _read),)
