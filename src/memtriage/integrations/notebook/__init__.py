"""memtriage in notebooks and in IPython: `%load_ext memtriage`, then `%%memtriage` in a cell's first line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from memtriage.integrations.notebook.extension import Extension

_ATTRIBUTE: Final = "_memtriage_extension"


def load(shell: Any) -> None:
    """Put the magics on a shell. What is there already stays."""
    from memtriage.integrations.notebook.extension import Extension

    if getattr(shell, _ATTRIBUTE, None) is None:
        extension: Extension = Extension(shell)
        extension.install()
        setattr(shell, _ATTRIBUTE, extension)


def unload(shell: Any) -> None:
    """Take the magics off a shell."""
    extension: Extension | None = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        setattr(shell, _ATTRIBUTE, None)
