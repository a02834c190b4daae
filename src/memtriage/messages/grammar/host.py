"""The host ran out: allocators, the kernel, schedulers, launchers, DataLoader workers, shared memory."""

from __future__ import annotations

import re
from typing import Final

from memtriage.messages.grammar.message import SIZE, Grammar, Message, plain, to_bytes
from memtriage.model.explanation import Field

# Allocators of the process

_CPU_START: Final = re.compile(
    r"\[enforcefailat[^\]]{0,300}?(?:alloc_cpu|CPUAllocator)\.cpp(?::\d{1,6})?\]|DefaultCPUAllocator:|"
    r"posix_memalign\(|C10OutofMemory|notenoughmemory:youtriedtoallocate|(?:alloc_cpu|CPUAllocator)\.cpp:\d"
)
_CPU_SIZE: Final = re.compile(r"youtriedtoallocate(?:(\d[\d,]{0,20})bytes?|[\d,]{0,30}$)")
_CPU_END: Final = re.compile(
    r"youtriedtoallocate\d[\d,]{0,30}bytes?\.?(?:Errorcode\d{1,4}(?:\([A-Za-z]{1,40}\))?)?|==0\.12vs0"
)


def _read_cpu(start: re.Match[str], text: str) -> Message:
    text = text[:1200]
    asked, end = _CPU_SIZE.search(text), _CPU_END.search(text)
    # Exact, also where a negative count wrapped around to almost 2**64.
    size = to_bytes(asked[1]) if asked and asked[1] else None
    return Message(
        family="cpu-alloc",
        fields={"requested": size} if asked else {},
        device="cpu",
        missing=() if size or "memalign" in text else ("requested",),
        length=end.end() if end else 0,
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
    size = next(((groups[i], groups[i + 1]) for i in (0, 2, 5) if groups[i]), None)
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
    family = "cpu-alloc" if "bad_alloc" in start[0] else "python-alloc"
    return Message(family, form, {"requested": to_bytes(*size)} if size else {}, device="host")


# The kernel, containers and schedulers

_KERNEL_START: Final = re.compile(
    r"oom-kill:constraint=|invokedoom-killer|(?:Memorycgroupo|O)utofmemory:Kill(?:ed)?process\d|"
    r"Killedprocess\d{1,10}(?:,UID\d{1,10},)?\(|oom_reaper:reapedprocess"
)
_KERNEL_SIZES: Final = re.compile(r"(total-vm|anon-rss|file-rss|shmem-rss):(\d[\d,]{0,30})kB")
_KILLED: Final = re.compile(r"Kill(?:ed)?process(?P<pid>\d{1,10})(?:,UID\d{1,10},)?\((?P<comm>[^)]{1,32})\)")
_TASK: Final = re.compile(r"task=(?P<comm>[^,\s]{1,32}),pid=(?P<pid>\d{1,10})")
_CONSTRAINT: Final = re.compile(r"constraint=(CONSTRAINT_[A-Z_]{1,20})")
_KERNEL_END: Final = re.compile(r"oom_score_adj:-?\d{1,5}|shmem-rss:[\d,]+kB|file-rss:[\d,]+kB|uid=\d{1,10}")


def _read_kernel(start: re.Match[str], text: str) -> Message:
    text = text[:1500]
    facts: dict[str, str | int] = {}
    if constraint := _CONSTRAINT.search(text):
        facts["constraint"] = constraint[1]
    if victim := _KILLED.search(text) or _TASK.search(text):
        facts |= {"pid": int(victim["pid"]), "comm": victim["comm"]}
    return Message(
        "kernel-oom",
        form="cgroup" if "CONSTRAINT_MEMCG" in text or "Memorycgroup" in text else "",
        fields={name.replace("-", "_"): to_bytes(size, "kB") for name, size in _KERNEL_SIZES.findall(text)},
        facts=facts,
        device="host",
        length=max((end.end() for end in _KERNEL_END.finditer(text)), default=0),
    )


_K8S: Final = re.compile(
    r'OOMKill(?:ed|ing)(?!"?[:=]"?false)|(?i:oom-?kill(?:ed|ing))(?!"?[:=]"?false)|nodewaslowonresource:memory|'
    r"MemoryPressure.{0,40}?[Ee]vict|[Cc]ontainer.{0,60}?exceeded(?:its?)?.{0,20}?memorylimit"
)


def _read_k8s(start: re.Match[str], text: str) -> Message:
    form = "" if "OOMKill" in start[0] or "xceeded" in start[0] else "eviction"
    if form and start[0].lower().startswith("oom"):
        form = "told"
    # The exit code belongs to the same report.
    code = re.match(r".{0,60}?Exit[Cc]ode:?137", text)
    return Message(family="k8s", form=form, device="host", length=code.end() if code else 0)


_RAY: Final = re.compile(
    r"(?:ray\.exceptions\.OutOfMemoryError:)?(?:[Tt]ask|[Aa]ctor|[Ww]orker)(?:s|\(s\))?(?:was|were)killedduetothenoderunninglowonmemory|"
    r"ray\.exceptions\.OutOfMemoryError|[Ww]orkers?\(tasks/actors\)killedduetomemorypressure|"
    r"Memoryonthenode\(IP:|"
    r"(?P<perhaps>[Ss]omecommoncausesinclude:\(1\)theprocesswaskilledbytheOOMkillerduetohighmemoryusage)"
)
"""The last is a list of what may have been, in Ray's message of a worker that is gone."""
_RAY_TASK: Final = re.compile(rf"memoryused={SIZE}")
_RAY_NODE: Final = re.compile(rf"(?:wasrunning|node\(IP:[^)]{{1,200}}\))was{SIZE}(?:/{SIZE})?")
_RAY_FRACTION: Final = re.compile(r"\((0?\.\d+|1\.0+)\),whichexceedsthememoryusagethresholdof(\d?\.\d+|1)")


def _read_ray(start: re.Match[str], text: str) -> Message:
    if start["perhaps"]:
        return Message("ray", form="perhaps", device="host")
    text = text[:1500]
    task, node, fraction = (pattern.search(text) for pattern in (_RAY_TASK, _RAY_NODE, _RAY_FRACTION))
    fields: dict[str, Field] = {"task_used": to_bytes(task[1], task[2])} if task else {}
    if node:
        fields["node_used"] = to_bytes(node[1], node[2])
        if node[3]:
            fields["node_total"] = to_bytes(node[3], node[4])
    return Message(
        "ray",
        fields=fields,
        facts={"fraction": fraction[1], "threshold": fraction[2].rstrip(".")} if fraction else {},
        device="host",
        length=max((found.end() for found in (task, node, fraction) if found), default=0),
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
    )


# Killed, and nobody says why

_LOADER: Final = re.compile(
    r"DataLoaderworker(?:\(pid(?:\(s\))?(?P<pid>\d{1,10})[\d,]{0,60}\))?(?:is)?"
    r"(?:killedbysignal:(?P<signal>Killed|Terminated|Buserror|Aborted|Segmentationfault|[A-Z]\w{2,30})|"
    r"exitedunexpectedly)\.?"
)


def _read_loader(start: re.Match[str], text: str) -> Message:
    facts: dict[str, str | int] = {"pid": int(start["pid"])} if start["pid"] else {}
    if start["signal"] == "Buserror":
        return Message("shm", facts=facts, device="host")
    form = {"Killed": "killed", "Terminated": "terminated", None: "exited"}.get(start["signal"])
    if form is None:
        return Message("not-memory", form="signal", facts=facts)
    return Message("dataloader-killed", form=form, facts=facts, device="host")


_LAUNCHER: Final = re.compile(
    r"(?:exit[ _-]?(?:code|status)?s?(?: was)?\"?\s*[:=]?|exited with (?:code|status)|"
    r"return(?:ed)?(?: non-zero exit| exit)? (?:code|status)\s*[:=]?)\s*"
    r"(?P<code>-9|137|-15|143)(?![\d%]|\.\d)|"
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
    r"failed\(exitcode:(?P<code>-9|-15)\)(?:local_rank:\d{1,5})?(?:\(pid:\d{1,10}\))?|"
    r"[Ss]ignal(?P<signal>9|15)\(SIG(?:KILL|TERM)\)receivedbyPID\d{1,10}(?P<name>(?!))?"
)
_LOCAL_RANK: Final = re.compile(r"local_rank:? ?(\d{1,5})")
_PID: Final = re.compile(r"(?:pid:? ?|by ?PID ?|process )(\d{1,10})", re.IGNORECASE)
_TERMINATED: Final = frozenset({"-15", "143", "15", "term", "terminated"})


def _read_launcher(start: re.Match[str], text: str) -> Message | None:
    word = next(group for group in start.groups() if group is not None).lower()
    line_end = text.find("\n", 1)
    line = text[: line_end if line_end > 0 else 300]
    if word in _TERMINATED and re.search(
        r"(?i)closing signal|sending", start.string[max(0, start.start() - 80) : start.start()]
    ):
        return None  # a launcher that ends the others: see the aftermath
    facts: dict[str, str | int] = {"exitcode": int(start["code"])} if start["code"] else {}
    if start["code"] is None and start["name"] is None:
        facts["signal"] = "SIGTERM" if word in _TERMINATED else "SIGKILL"
    for name, pattern in (("pid", _PID), ("local_rank", _LOCAL_RANK)):
        if match := pattern.search(line):
            facts[name] = int(match[1])
    # The signal's name alone: a program that notes that it was asked to end.
    form = "killed" if word not in _TERMINATED else "terminated" if facts else "asked"
    return Message("launcher", form=form, facts=facts, device="host")


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


def _read_shm(start: re.Match[str], text: str) -> Message:
    size, errno = start["extended"] or start["segment"], start["errno"]
    opening = start[0] if "unabletoopen" in start[0] and errno is None else ""
    # The object is gone (a clean-up race), or descriptors ran out: neither is memory.
    if start["how"] == "attachingto" or errno == "2" or "Nosuchfile" in opening:
        form = "gone"
    elif errno == "24" or "Toomanyopen" in opening:
        form = "descriptors"
    else:
        form = "opening" if opening else ""
    fields: dict[str, Field] = {"requested": to_bytes(size)} if size and not form else {}
    return Message("shm", form=form, fields=fields, device="host")


# Disks

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
        return Message("shm", device="host")
    # Without its file, a full device can be a file system in memory.
    names_disk = (
        start[0] != "Nospaceleftondevice" or "StorageFull" in around or text[len(start[0]) :].startswith(":'")
    )
    return Message("not-memory", form="disk" if names_disk else "no space")


GRAMMARS: Final = (
    Grammar(_CPU_START, _read_cpu),
    Grammar(_PYTHON, _read_python),
    Grammar(_KERNEL_START, _read_kernel),
    plain(
        "slurm",
        r"Detected\d{1,6}oom[-_]kill(?:event)?(?:\(s\)|s)?(?:in(?:StepId=|step)(?P<job>[\d_+]{1,20})\."
        r"\w{1,20}?(?=cgroup|\.|$|Some))?|"
        r"task\d{1,6}:OutOfMemory|(?<![A-Z])OUT_OF_ME(?:MORY|\+)|Exceeded(?:job|step)memorylimit|(?:[Jj]ob|[Ss]tep)[\d._]{0,30}exceededmemorylimit|"
        r"srun:error:\S{1,60}?OutOfMemory",
        device="host",
    ),
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
    plain(
        "python",
        r"resource_tracker:Thereappeartobe\d{1,9}leaked\w{1,20}?objects|resource_tracker\.py:\d{1,6}:UserWarning",
        form="resource tracker",
    ),
    Grammar(_ELASTIC, _read_launcher),
    plain(
        "python-alloc",
        r"(?:^|\n)(?:[\w.]{1,60}\.)?_?(?:Array)?MemoryError(?=\s|:)",
        device="host",
        tight=False,
    ),
    Grammar(_LAUNCHER, _read_launcher, tight=False),
)
