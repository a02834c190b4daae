"""What to say of each kind of cut: what to change so that references are removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CUTS: Final[Mapping[str, str]] = {
    "detach": "store {detached} instead of the tensor itself in {container_name}: it keeps its whole graph",
    "carry": "detach it where it is carried over (`{name} = {carried}`{trained})",
    "unhook": "keep a detached tensor in {place} (`x.detach()`), give the hook a `weakref.ref()` of the "
    "object that it needs, or call `remove()` on its handle when the value has been used",
    "clone": "store {copy}: what {container_name} keeps is a view, and a view keeps its whole storage",
    "context": "use ctx.save_for_backward instead of `{attribute}`, or clear `{attribute}` in backward",
    "reentrant": "pass use_reentrant=False to checkpoint(), or keep its outputs out of what its function can "
    "reach",
    "pack": "return a detached copy from the pack hook: `x.detach().clone()`, or `x.detach()` where nothing "
    "changes it in place",
    "create_graph": "use torch.autograd.grad(..., create_graph=True) and detach() what you keep, or set "
    "`.grad = None` after use (optimizer.zero_grad(set_to_none=True))",
    "grad": "set `.grad = None` when the gradient has been used",
    "remove": "keep the handle that registering a hook returns, and call its `remove()` when the hook has "
    "done its work: in a `finally:` block, because an exception skips what follows",
    "traceback": "keep `str(error)` instead of the exception, or call error.with_traceback(None) or "
    "traceback.clear_frames(error.__traceback__) before you keep it",
    "close": "close() the generator when you stop iterating, and do not keep it",
    "cache": "bound it (`maxsize=`), make the key a plain number and cache on the instance instead of a "
    "method, or call cache_clear() at the end of a phase",
    "bound": "{bound}, or clear {container_name} when its content has been used",
    "shorten": "keep the last rows only (`{name} = {name}[-n:]` after each time), or clear it at the end of "
    "each epoch; a preallocated buffer, or a list of blocks that is joined once, avoids the copies",
    "collect": "switch the collector on again with gc.enable(), call gc.collect() every few steps, or break "
    "the cycle (weakref for the back reference)",
    "break": "make one reference of the cycle weak (`weakref.ref()`): {at}",
    "release": "release the object that was given the tensors, or give it detach()ed copies",
    "no_grad": "run the loop under `torch.inference_mode()` or `torch.no_grad()`, in the thread that runs "
    "it; nothing is recorded then",
}
"""By kind of cut. Words in braces are filled in."""

BOUNDS: Final[Mapping[str, str]] = {
    "list": "bound {container_name} (`collections.deque(maxlen=...)`, or `del {container_name}[:-n]`)",
    "deque": "bound {container_name} (`deque(maxlen=...)`)",
    "dict": "remove the oldest entry of {container_name} when it has too many "
    "(`{container_name}.pop(next(iter({container_name})))`)",
    "Module": "register what {container_name} gets once, before training, and overwrite it, or delete old "
    "entries",
    "": "bound {container_name}: take an old entry out for each new one",
}
"""How a container of a type is bounded; the last is for any other."""
