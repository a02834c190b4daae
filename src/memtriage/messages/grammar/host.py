"""The host ran out: allocators, the kernel, schedulers, launchers, DataLoader workers, shared memory."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import Grammar, Message, plain
from memtriage.messages.grammar.sizes import SIZE, exact_bytes, first_size, to_bytes
from memtriage.model.explanation import Field

# Allocators of the process

_CPU_START: Final = re.compile(
    r"\[enforcefailat[^\]]{0,300}?(?:alloc_cpu|CPUAllocator)\.cpp(?::\d{1,6})?\]|DefaultCPUAllocator:|"
    r"posix_memalign\(|C10OutofMemory|notenoughmemory:youtriedtoallocate|(?:alloc_cpu|CPUAllocator)\.cpp:\d"
)
_CPU_SIZE: Final = re.compile(r"youtriedtoallocate(\d[\d,]{0,20})bytes?")
_CPU_CUT: Final = re.compile(r"youtriedtoallocate[\d,]{0,30}$")
_CPU_END: Final = re.compile(
    r"youtriedtoallocate\d[\d,]{0,30}bytes?\.?(?:Errorcode\d{1,4}(?:\([A-Za-z]{1,40}\))?)?|==0\.12vs0"
)
_ERRNO: Final = re.compile(r"Errorcode(\d{1,4})")


def _read_cpu(start: re.Match[str], text: str) -> Message:
    text = text[:1200]
    fields: dict[str, Field] = {}
    if asked := _CPU_SIZE.search(text):
        # Exact, also where a negative count wrapped around to almost 2**64.
        fields["requested"] = exact_bytes(asked[1])
    elif _CPU_CUT.search(text):
        fields["requested"] = None
    facts: dict[str, str | int] = {}
    if errno := _ERRNO.search(text):
        facts["errno"] = int(errno[1])
    end = _CPU_END.search(text)
    return Message(
        family="cpu-alloc",
        fields=fields,
        facts=facts,
        device="cpu",
        missing=() if fields.get("requested") or "memalign" in text else ("requested",),
        length=end.end() if end else len(start[0]),
    )


_PYTHON: Final = re.compile(
    rf"Unabletoallocate{SIZE}foranarray|unabletommap(\d{{1,20}})(bytes)"
    rf"(?:fromfile<(?P<file>[^>]{{0,300}})>(?::Cannotallocatememory\(12\))?)?|"
    rf"memoryallocationof(\d{{1,20}})(bytes)failed|(?P<commit>WinError1455|oserror1455|"
    rf"[Pp]agingfileistoosmall)|Caught(?!OutOf)\w{{0,20}}MemoryErrorin|"
    rf"std::bad_alloc(?!:(?:out_of_memory:)?(?:CUDA|cuda|hip|RMM))|Unabletoallocatearraywithshape|"
    rf"\[Errno12\]Cannotallocatememory|Cannotallocatememory\(12\)|fork:Cannotallocatememory"
)
_IN_WORKER: Final = re.compile(r"DataLoaderworker|encounteredinworker")
_FORKS: Final = re.compile(r"os\.fork\(|fork_exec\(|popen_fork\.py")
_FORK_CALL: Final = 200
"""Characters of a traceback, without white space, from its innermost call to the error."""


def _read_python(start: re.Match[str], text: str) -> Message:
    groups = start.groups()
    sizes = [(groups[i], groups[i + 1]) for i in (0, 2, 5) if groups[i] and groups[i + 1]]
    fields: dict[str, Field] = {"requested": to_bytes(*sizes[0])} if sizes else {}
    before = start.string[max(0, start.start() - _FORK_CALL) : start.start()]
    form = "worker" if _IN_WORKER.search(text[:200]) else ""
    if start["file"] is not None:
        form = "segment" if "torch_" in start["file"] else "file"
    elif start["commit"] is not None:
        form = "commit"
    elif start[0].startswith("fork") or _FORKS.search(before):
        form = "fork"
    elif not form and "Cannotallocate" in start[0]:
        form = "errno"
    return Message(
        family="cpu-alloc" if "bad_alloc" in start[0] else "python-alloc",
        form=form,
        fields=fields,
        device="host",
        length=len(start[0]),
    )


# The kernel, containers and schedulers

_KERNEL_START: Final = re.compile(
    r"oom-kill:constraint=|invokedoom-killer|(?:Memorycgroupo|O)utofmemory:Kill(?:ed)?process\d|"
    r"Killedprocess\d{1,10}(?:,UID\d{1,10},)?\(|oom_reaper:reapedprocess"
)
_KERNEL_SIZES: Final = {
    name: re.compile(rf"{name.replace('_', '-')}:(\d[\d,]{{0,30}})(kB)")
    for name in ("total_vm", "anon_rss", "file_rss", "shmem_rss")
}
_KILLED: Final = re.compile(r"Kill(?:ed)?process(\d{1,10})(?:,UID\d{1,10},)?\(([^)]{1,32})\)")
_TASK: Final = re.compile(r"task=([^,\s]{1,32}),pid=(\d{1,10})")
_CONSTRAINT: Final = re.compile(r"constraint=(CONSTRAINT_[A-Z_]{1,20})")
_KERNEL_END: Final = re.compile(r"oom_score_adj:-?\d{1,5}|shmem-rss:[\d,]+kB|file-rss:[\d,]+kB|uid=\d{1,10}")


def _read_kernel(start: re.Match[str], text: str) -> Message:
    text = text[:1500]
    fields: dict[str, Field] = {}
    for name, pattern in _KERNEL_SIZES.items():
        if pattern.search(text):
            fields[name] = first_size(pattern, text)
    facts: dict[str, str | int] = {}
    if constraint := _CONSTRAINT.search(text):
        facts["constraint"] = constraint[1]
    if victim := _KILLED.search(text):
        facts |= {"pid": int(victim[1]), "comm": victim[2]}
    elif task := _TASK.search(text):
        facts |= {"pid": int(task[2]), "comm": task[1]}
    cgroup = "CONSTRAINT_MEMCG" in text or "Memorycgroup" in text
    return Message(
        family="kernel-oom",
        form="cgroup" if cgroup else "",
        fields=fields,
        facts=facts,
        device="host",
        length=max((end.end() for end in _KERNEL_END.finditer(text)), default=len(start[0])),
    )


_SLURM: Final = re.compile(
    r"Detected(?P<events>\d{1,6})oom[-_]kill(?:event)?(?:\(s\)|s)?(?:in(?:StepId=|step)(?P<job>[\d_+]{1,20})\."
    r"(?P<step>\w{1,20}?)(?=cgroup|\.|$|Some))?|"
    r"task\d{1,6}:OutOfMemory|(?<![A-Z])OUT_OF_ME(?:MORY|\+)|Exceeded(?:job|step)memorylimit|(?:[Jj]ob|[Ss]tep)[\d._]{0,30}exceededmemorylimit|"
    r"srun:error:\S{1,60}?OutOfMemory"
)


def _read_slurm(start: re.Match[str], text: str) -> Message:
    facts: dict[str, str | int] = {}
    if start["events"]:
        facts["events"] = int(start["events"])
    if start["job"]:
        facts |= {"job": start["job"], "step": start["step"]}
    return Message(family="slurm", facts=facts, device="host", length=len(start[0]))


_K8S: Final = re.compile(
    r'"?OOMKilled"?[:=]"?false|OOMKill(?:ed|ing)|(?i:oom-?kill(?:ed|ing))|nodewaslowonresource:memory|'
    r"MemoryPressure.{0,40}?[Ee]vict|[Cc]ontainer.{0,60}?exceeded(?:its?)?.{0,20}?memorylimit"
)


_INSPECTED: Final = 600
"""Characters of a container's state around its OOMKilled."""
_KILLED_CODE: Final = re.compile(r'[Ee]xit_?[Cc]ode"?[:=]"?137')


def _read_k8s(start: re.Match[str], text: str) -> Message | None:
    if start[0].endswith("false"):
        around = start.string[max(0, start.start() - _INSPECTED) : start.end() + _INSPECTED]
        if _KILLED_CODE.search(around) is None:
            return None  # an inspected container that nobody killed
        return Message("k8s", form="denied", device="host", ran_out=False, length=len(start[0]))
    form = "" if "OOMKill" in start[0] or "xceeded" in start[0] else "eviction"
    if form and start[0].lower().startswith("oom"):
        form = "told"
    # The exit code belongs to the same report.
    code = re.match(r".{0,60}?Exit[Cc]ode:?137", text)
    return Message(family="k8s", form=form, device="host", length=code.end() if code else len(start[0]))


_RAY: Final = re.compile(
    r"(?:ray\.exceptions\.OutOfMemoryError:)?(?:[Tt]ask|[Aa]ctor|[Ww]orker)(?:s|\(s\))?(?:was|were)killedduetothenoderunninglowonmemory|"
    r"ray\.exceptions\.OutOfMemoryError|[Ww]orkers?\(tasks/actors\)killedduetomemorypressure|"
    r"Memoryonthenode\(IP:|"
    r"(?P<perhaps>[Ss]omecommoncausesinclude:\(1\)theprocesswaskilledbytheOOMkillerduetohighmemoryusage)"
)
"""The last is a list of what may have been, in Ray's message of a worker that is gone."""
_RAY_SIZES: Final = {
    "task_used": re.compile(rf"memoryused={SIZE}"),
    "node_used": re.compile(rf"(?:wasrunning|node\(IP:[^)]{{1,200}}\))was{SIZE}"),
    "node_total": re.compile(rf"(?:wasrunning|node\(IP:[^)]{{1,200}}\))was{SIZE}/{SIZE}"),
}
_RAY_FRACTION: Final = re.compile(r"\((0?\.\d+|1\.0+)\),whichexceedsthememoryusagethresholdof(\d?\.\d+|1)")


def _read_ray(start: re.Match[str], text: str) -> Message:
    if start["perhaps"]:
        return Message(family="ray", form="perhaps", device="host", length=len(start[0]))
    text = text[:1500]
    fields: dict[str, Field] = {}
    for name, pattern in _RAY_SIZES.items():
        if size := pattern.search(text):
            fields[name] = to_bytes(size[size.re.groups - 1], size[size.re.groups])
    facts: dict[str, str | int] = {}
    if fraction := _RAY_FRACTION.search(text):
        facts |= {"fraction": fraction[1], "threshold": fraction[2].rstrip(".")}
    found_at = [pattern.search(text) for pattern in (*_RAY_SIZES.values(), _RAY_FRACTION)]
    return Message(
        family="ray",
        fields=fields,
        facts=facts,
        device="host",
        length=max((match.end() for match in found_at if match), default=len(start[0])),
    )


# Who kills before the kernel has to

_OOMD: Final = re.compile(
    r"systemd-oomd(?:\[\d{1,10}\])?:Killed.{1,400}?dueto(?:memory|swap)|systemd-oomdkilled\d{1,6}process|"
    r"killedbythe(?:kernel)?OOMkiller|exceeded\d{1,3}%memorybudget|lowmemory!atorbelowSIG(?:TERM|KILL)limits|"
    r"(?:sendingSIG(?:TERM|KILL)toprocess(?P<pid>\d{1,10})(?:uid\d{1,10})?|killingprocess(?P<older>\d{1,10}))"
    r'"(?P<comm>[^"]{1,64})"(?:withsignal\d{1,2})?:(?:badness|oom_score)\d{1,6}(?:,VmRSS(?P<rss>\d{1,12})MiB)?'
)


def _read_oomd(start: re.Match[str], text: str) -> Message:
    pid, comm = start["pid"] or start["older"], start["comm"]
    return Message(
        "oomd",
        fields={"rss": to_bytes(start["rss"], "MiB")} if start["rss"] else {},
        facts={"pid": int(pid), "comm": comm} if pid else {},
        device="host",
        length=len(start[0]),
    )


# Killed, and nobody says why

_LOADER: Final = re.compile(
    r"DataLoaderworker(?:\(pid(?:\(s\))?(?P<pid>\d{1,10})[\d,]{0,60}\))?(?:is)?"
    r"(?:killedbysignal:(?P<signal>Killed|Terminated|Buserror|Aborted|Segmentationfault|[A-Z]\w{2,30})|"
    r"(?P<exited>exitedunexpectedly))\.?"
)
_UNPROVEN: Final = frozenset({"Killed", "Terminated"})


def _read_loader(start: re.Match[str], text: str) -> Message | None:
    signal = start["signal"]
    facts: dict[str, str | int] = {"pid": int(start["pid"])} if start["pid"] else {}
    if signal == "Buserror":
        return Message("shm", facts=facts | {"signal": "Bus error"}, device="host", length=len(start[0]))
    if signal is not None and signal not in _UNPROVEN:
        return Message(
            "not-memory", form="signal", facts=facts | {"signal": signal}, ran_out=False, length=len(start[0])
        )
    form = "terminated" if signal == "Terminated" else "killed" if signal else "exited"
    return Message(
        "dataloader-killed", form=form, facts=facts, device="host", ran_out=False, length=len(start[0])
    )


_LAUNCHER: Final = re.compile(
    r"exit[ _-]?(?:code|status)?s?(?: was)?\s*[:=]?\s*(?P<code>-9|137|-15|143)(?![\d%]|\.\d)|"
    r"return(?:ed)?(?: non-zero exit| exit)? (?:code|status)\s*[:=]?\s*"
    r"(?P<returned>-9|137|-15|143)(?![\d%]|\.\d)|"
    r"exited with (?:code|status) (?P<exited>-9|137|-15|143)(?![\d%]|\.\d)|"
    r"[Ss]ignal:? (?P<signal>9|15)\b|SIG(?P<name>KILL|TERM)\b(?!.{0,30}(?:handler|when mem))|"
    r"\[\d+\] +[+-]? *\d+ (?P<job>killed|terminated)(?= {2,})|"
    r"signal: (?P<process>killed|terminated)\b|"
    r"(?P<compiler>Killed|Terminated) signal terminated program|"
    r"(?:^|\n)zsh: (?P<zsh>killed|terminated)\b|"
    r"(?:^|\n)(?:.{0,200}?: line \d+: +)?(?:#\d+ )?(?:\d+(?:\.\d+)? )?"
    r"(?P<shell>Killed|Terminated)(?= {2,}| *(?:$|\n|\())",
    re.IGNORECASE,
)
_ELASTIC: Final = re.compile(
    r"failed\(exitcode:(?P<code>-9|-15)\)(?:local_rank:(?P<rank>\d{1,5}))?(?:\(pid:(?P<pid>\d{1,10})\))?|"
    r"[Ss]ignal(?P<signal>9|15)\(SIG(?:KILL|TERM)\)receivedbyPID(?P<victim>\d{1,10})"
)


def _read_elastic(start: re.Match[str], text: str) -> Message:
    facts: dict[str, str | int] = {
        name: int(figure)
        for name, figure in (
            ("exitcode", start["code"]),
            ("pid", start["pid"] or start["victim"]),
            ("local_rank", start["rank"]),
        )
        if figure
    }
    form = "terminated" if (start["code"] or start["signal"]).endswith("15") else "killed"
    return Message("launcher", form=form, facts=facts, device="host", ran_out=False, length=len(start[0]))


_LOCAL_RANK: Final = re.compile(r"local_rank:? ?(\d{1,5})")
_PID: Final = re.compile(r"(?:pid:? ?|by PID |process )(\d{1,10})", re.IGNORECASE)
_TERMINATED: Final = frozenset({"-15", "143", "15", "term", "terminated"})


def _read_launcher(start: re.Match[str], text: str) -> Message | None:
    word = next(group for group in start.groups() if group is not None).lower()
    line_end = text.find("\n", 1)
    line = text[: line_end if line_end > 0 else 300]
    if word in _TERMINATED and re.search(
        r"(?i)closing signal|sending", start.string[max(0, start.start() - 80) : start.start()]
    ):
        return None  # a launcher that ends the others: see the aftermath
    code = start["code"] or start["returned"] or start["exited"]
    facts: dict[str, str | int] = {"exitcode": int(code)} if code else {}
    if code is None and start["name"] is None:
        facts["signal"] = "SIGTERM" if word in _TERMINATED else "SIGKILL"
    for name, pattern in (("pid", _PID), ("local_rank", _LOCAL_RANK)):
        if match := pattern.search(line):
            facts[name] = int(match[1])
    form = "terminated" if word in _TERMINATED else "killed"
    return Message(
        "launcher",
        # The signal's name alone: a program that notes that it was asked to end.
        form="asked" if form == "terminated" and not facts else form,
        facts=facts,
        device="host",
        ran_out=False,
        length=len(start[0]),
    )


# Shared memory

_SHM: Final = re.compile(
    r"[Bb]userrorencounteredinworker|"
    r"unabletoallocatesharedmemory\(shm\)forfile<[^>]{1,80}>(?::[A-Za-z]{1,60}\(\d+\))?|"
    r"unabletowritetofile</?torch_\w{0,60}>(?::[A-Za-z]{0,40}(?:\(\d+\))?)?|"
    r"unabletoopensharedmemoryobject</?torch_\w{0,60}>(?:inread-writemode)?(?::[A-Za-z]{1,60})?(?:\((?P<errno>\d+)\))?|"
    r"</?torch_\w{1,60}>.{0,40}?Nospaceleftondevice|shm_open.{0,60}?Nospaceleftondevice|"
    r"ObjectStoreFullError|failedtoextend/dev/shm/[\w-]{1,60}to(?P<extended>\d{1,20})bytes|"
    r"Errorwhile(?P<how>creating|attachingto)sharedmemorysegment[\w/.-]{1,80}\(size(?P<segment>\d{1,20})\)"
    r"(?:,error:Nosuchfileordirectory\((?P<gone>2)\))?|shm\.h:\d{1,6}NCCLWARN.{0,60}?Nospaceleftondevice"
)
_ENOENT: Final = "2"
_EMFILE: Final = "24"


def _read_shm(start: re.Match[str], text: str) -> Message:
    report = start[0]
    if size := start["extended"] or start["segment"]:
        gone = start["how"] == "attachingto"  # another process made it, and it is not there
        return Message(
            "shm",
            form="gone" if gone else "",
            fields={} if gone else {"requested": exact_bytes(size)},
            device="host",
            ran_out=not gone,
            length=len(report),
        )
    if "unabletoopen" not in report:
        facts: dict[str, str | int] = {"errno": 28} if "Nospaceleft" in report or "(28)" in report else {}
        return Message("shm", facts=facts, device="host", length=len(report))
    errno = start["errno"]
    # The object is gone (a clean-up race), or descriptors ran out: neither is memory.
    if errno == _ENOENT or (errno is None and "Nosuchfile" in report):
        form = "gone"
    elif errno == _EMFILE or (errno is None and "Toomanyopen" in report):
        form = "descriptors"
    else:
        form = "opening" if errno is None else ""
    return Message(
        "shm",
        form=form,
        facts={} if errno is None else {"errno": int(errno)},
        device="host",
        ran_out=form == "",
        length=len(report),
    )


# Disks, and what Python says as it ends

_DISK: Final = re.compile(
    r"Nospaceleftondevice|PytorchStreamWriterfailed(?:writing|opening)|StorageFull|oserror28|"
    r"[Nn]otenoughfreediskspace|[Dd]iskquotaexceeded"
)
_SHARED: Final = re.compile(r"/dev/shm|multiprocessing/(?:shared_memory|heap)\.py|shm_open|pymp-")
_BEFORE_DISK, _AFTER_DISK = 400, 120
"""Characters around a failed write in which its file is named."""


def _read_disk(start: re.Match[str], text: str) -> Message:
    around = start.string[max(0, start.start() - _BEFORE_DISK) : start.end() + _AFTER_DISK]
    if _SHARED.search(around):
        return Message("shm", facts={"errno": 28}, device="host", length=len(start[0]))
    # Without its file, a full device can be a file system in memory.
    names_disk = (
        start[0] != "Nospaceleftondevice" or "StorageFull" in around or text[len(start[0]) :].startswith(":'")
    )
    return Message(
        "not-memory", form="disk" if names_disk else "no space", ran_out=False, length=len(start[0])
    )


_TRACKER: Final = re.compile(
    r"resource_tracker:Thereappeartobe(?P<count>\d{1,9})leaked(?P<what>\w{1,20}?)objects|"
    r"resource_tracker\.py:\d{1,6}:UserWarning"
)


def _read_tracker(start: re.Match[str], text: str) -> Message:
    facts: dict[str, str | int] = (
        {"count": int(start["count"]), "what": start["what"]} if start["count"] else {}
    )
    return Message("python", form="resource tracker", facts=facts, ran_out=False, length=len(start[0]))


GRAMMARS: Final = (
    Grammar(_CPU_START, _read_cpu),
    Grammar(_PYTHON, _read_python),
    Grammar(_KERNEL_START, _read_kernel),
    Grammar(_SLURM, _read_slurm),
    Grammar(_K8S, _read_k8s),
    Grammar(_RAY, _read_ray),
    Grammar(_OOMD, _read_oomd),
    plain(
        "notebook",
        r"session(?:has)?crashed(?:after|because)[\w ]{0,40}RAM|"
        r"notebooktriedtoallocatemorememorythanisavailable",
        device="host",
    ),
    Grammar(_LOADER, _read_loader),
    Grammar(_SHM, _read_shm),
    Grammar(_DISK, _read_disk),
    Grammar(_TRACKER, _read_tracker),
    Grammar(_ELASTIC, _read_elastic),
    plain(
        "python-alloc",
        r"(?:^|\n)(?:[\w.]{1,60}\.)?_?(?:Array)?MemoryError(?=\s|:)",
        device="host",
        tight=False,
    ),
    Grammar(_LAUNCHER, _read_launcher, tight=False),
)
