"""What other processes say when one has died: it follows from the first failure and explains nothing."""

from __future__ import annotations

from typing import Final

from memtriage.messages.grammar.message import plain

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
GRAMMARS: Final = tuple(plain("aftermath", words, form=form, ran_out=False) for form, words in _KINDS.items())
