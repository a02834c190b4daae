"""Programs that signals are sent to."""

from __future__ import annotations

from typing import Final

AS_FROM_A_TERMINAL: Final = ("env", "--default-signal=HUP,INT,TERM")
"""In front of a command: it does not inherit what `nohup`, or a shell's `&`, has these tests ignore."""
