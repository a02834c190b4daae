"""What a diagnosis leaves open, how to find it out, and when the message's own advice is no help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memtriage.messages.case import Case
from memtriage.messages.grammar.message import Message
from memtriage.messages.questions import settle, stale_advice
from memtriage.model.explanation import Field, Label, Settle
from support.message_cases import GIB, device_case, sizes_case, text_case


@pytest.mark.parametrize(
    ("case", "question"),
    [
        # The device
        (device_case("does_not_fit"), None),
        (device_case("fragmentation"), None),
        (device_case("private_pools"), None),
        (
            replace(device_case("does_not_fit"), labels=("does_not_fit", "fragmentation")),
            Settle(
                fact=("the largest free block at the failure, and the owners of the live bytes around it"),
                command="memtriage run train.py",
            ),
        ),
        (
            replace(device_case("fragmentation"), labels=("fragmentation", "does_not_fit")),
            Settle(
                fact=("the largest free block at the failure, and the owners of the live bytes around it"),
                command="memtriage run train.py",
            ),
        ),
        (
            replace(device_case("private_pools"), labels=("private_pools", "does_not_fit")),
            Settle(
                fact=("the largest free block at the failure, and the owners of the live bytes around it"),
                command="memtriage run train.py",
            ),
        ),
        (
            replace(
                sizes_case("does_not_fit", "allocation", "single", "cuda:0"),
                labels=("does_not_fit", "unknown"),
            ),
            Settle(
                fact="which buffer it is, and the device's limit for one",
                command="grep -n -B5 -iE 'buffer|max.*alloc' train.log",
            ),
        ),
        (
            replace(
                sizes_case("fragmentation", "allocation", "single", "cuda:0"),
                labels=("fragmentation", "unknown"),
            ),
            Settle(
                fact="how much was free before the program began",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            replace(
                device_case("fragmentation"),
                labels=("fragmentation", "does_not_fit"),
                traits=frozenset({"generates"}),
            ),
            Settle(
                fact="how much was free before the program began",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            replace(
                sizes_case("does_not_fit", "allocation", "failed", "cuda:0"),
                labels=("does_not_fit", "unknown"),
            ),
            Settle(
                fact="how much was free before the program began",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            replace(
                sizes_case("does_not_fit", "allocation", "failed", "tpu"), labels=("does_not_fit", "unknown")
            ),
            Settle(fact="how much was free before the program began", command="tpu-info"),
        ),
        (
            replace(
                sizes_case("does_not_fit", "allocation", "failed", "host"), labels=("does_not_fit", "unknown")
            ),
            Settle(fact="how much was free before the program began", command="ps aux --sort=-rss | head"),
        ),
        (
            device_case("other_process_or_outside_allocator"),
            Settle(
                fact="which other processes use the device",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            device_case("other_process_or_outside_allocator", "hip-v2"),
            Settle(fact="which other processes use the device", command="rocm-smi --showpids"),
        ),
        (
            sizes_case("other_process_or_outside_allocator", "xpu-v2", "", "xpu:0"),
            Settle(fact="which other processes use the device", command="xpu-smi ps"),
        ),
        (
            sizes_case("other_process_or_outside_allocator", "xpu-v2", "", None),
            Settle(fact="which other processes use the device", command="xpu-smi ps"),
        ),
        (
            sizes_case("other_process_or_outside_allocator", "npu-v2", "", "npu:3"),
            Settle(fact="which other processes use the device", command="npu-smi info"),
        ),
        (
            sizes_case("other_process_or_outside_allocator", "mps", "", "mps"),
            Settle(fact="which library of this process holds Metal memory", command="footprint -p PID"),
        ),
        (
            sizes_case("allocator_limit", "mps", "", "mps"),
            Settle(fact="whether the limit was set", command="echo $PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
        ),
        (
            device_case("allocator_limit"),
            Settle(
                fact="who set the cap",
                command="grep -rniE 'mem(ory)?[_-](fraction|limit)|gpu_memory_utilization' .",
            ),
        ),
        (
            sizes_case("driver_refused_though_free", "allocation", "failed", "mps"),
            Settle(fact="whether a limit for one allocation refused", command="footprint -p PID"),
        ),
        (
            device_case("driver_refused_though_free"),
            Settle(
                fact="whether the driver grants the same request to a fresh process",
                command=(
                    "python -c \"import torch; torch.empty(2147483648, dtype=torch.uint8, device='cuda:0')\""
                ),
            ),
        ),
        (
            sizes_case("driver_refused_though_free", "cuda-v2", "", None),
            Settle(
                fact="whether the driver grants the same request to a fresh process",
                command="python -c \"import torch; torch.empty(0, dtype=torch.uint8, device='cuda:0')\"",
            ),
        ),
        (
            sizes_case("system_memory_fallback", "cuda-v2", "", None),
            Settle(
                fact="how full the card is while the program runs",
                command="nvidia-smi --query-gpu=memory.used,memory.total --format=csv -l 1",
            ),
        ),
        (
            sizes_case("absurd_request", "allocation", "failed", None),
            Settle(
                fact="the line that asked for this size, and the shapes of its inputs",
                command="python -X faulthandler train.py",
            ),
        ),
        (
            sizes_case("absurd_request", "cpu-alloc", "", "cpu"),
            Settle(
                fact="the line that asked for this size, and the shapes of its inputs",
                command="python -X faulthandler train.py",
            ),
        ),
        (
            sizes_case("absurd_request", "python-alloc", "", "host"),
            Settle(
                fact="the line that asked for this size, and the shapes of its inputs",
                command="python -X faulthandler train.py",
            ),
        ),
        (
            sizes_case("absurd_request", "cuda-v2", "", None),
            Settle(
                fact="the line that asked for this size",
                command="CUDA_LAUNCH_BLOCKING=1 TORCH_SHOW_CPP_STACKTRACES=1 python train.py",
            ),
        ),
        (
            sizes_case("library_alloc_failed", "cublas", "", None),
            Settle(
                fact="how much of the device was free when the library asked, and what used the rest",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            sizes_case("unknown", "mention", "", None),
            Settle(
                fact="the size of the request and what was free: the lines around this one",
                command="grep -n -B5 -A5 -iE 'out of memory|alloc|oom' train.log",
            ),
        ),
        (
            sizes_case("unknown", "allocation", "", None),
            Settle(
                fact="how much of the device was free, and what used the rest",
                command="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            ),
        ),
        (
            sizes_case("unknown", "cuda-runtime", "", None),
            Settle(
                fact="which call failed",
                command="CUDA_LAUNCH_BLOCKING=1 TORCH_SHOW_CPP_STACKTRACES=1 python train.py",
            ),
        ),
        (
            sizes_case("unknown", "cuda-driver", "", None),
            Settle(
                fact="which call failed",
                command="CUDA_LAUNCH_BLOCKING=1 TORCH_SHOW_CPP_STACKTRACES=1 python train.py",
            ),
        ),
        (
            sizes_case("unknown", "cuda-v2", "", None),
            Settle(fact="what was alive on the device at the failure", command="memtriage run train.py"),
        ),
        # The host
        (
            text_case("host_memory_limit", "slurm", job="123_4"),
            Settle(
                fact="which step used how much of the memory it asked for",
                command="sacct -j 123_4 --format=JobID,State,MaxRSS,ReqMem,ExitCode",
            ),
        ),
        (
            text_case("host_memory_limit", "slurm"),
            Settle(
                fact="which step used how much of the memory it asked for",
                command="sacct -j JOBID --format=JobID,State,MaxRSS,ReqMem,ExitCode",
            ),
        ),
        (
            text_case("host_memory_limit", "k8s"),
            Settle(
                fact="which container hit which limit",
                command="kubectl describe pod POD; docker inspect CONTAINER",
            ),
        ),
        (
            text_case("host_memory_limit", "oomd"),
            Settle(fact="which processes had the memory", command="journalctl -u systemd-oomd -u earlyoom"),
        ),
        (
            text_case("host_memory_limit", "notebook"),
            Settle(fact="which cell's objects hold the memory", command="%memit, or psutil.virtual_memory()"),
        ),
        (
            text_case("host_memory_limit", "ray"),
            Settle(fact="which workers hold the node's memory", command="ray memory --stats-only"),
        ),
        (
            text_case("host_memory_limit", "kernel-oom"),
            Settle(
                fact="which processes had the memory: the table above the kernel's line", command="dmesg -T"
            ),
        ),
        (
            text_case("host_memory_limit", "kernel-oom", "cgroup"),
            Settle(
                fact="what the cgroup's memory is: anonymous, shared, or files",
                command="cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.stat",
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "segment"),
            Settle(
                fact="how many mappings the process had, of how many it may have",
                command="wc -l /proc/PID/maps; sysctl vm.max_map_count",
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "fork"),
            Settle(
                fact="how much the kernel may still commit (CommitLimit minus Committed_AS)",
                command="grep Commit /proc/meminfo; sysctl vm.overcommit_memory; ulimit -v",
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "file"),
            Settle(
                fact="how much the kernel may still commit (CommitLimit minus Committed_AS)",
                command="grep Commit /proc/meminfo; sysctl vm.overcommit_memory; ulimit -v",
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "errno"),
            Settle(
                fact="how much the kernel may still commit (CommitLimit minus Committed_AS)",
                command="grep Commit /proc/meminfo; sysctl vm.overcommit_memory; ulimit -v",
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "commit"),
            Settle(
                fact="how much of RAM and page file was committed already",
                command='systeminfo | findstr /C:"Virtual Memory"',
            ),
        ),
        (
            text_case("host_alloc_failed", "python-alloc", "worker"),
            Settle(
                fact="how much the host, its cgroup and the process's own limit allow",
                command="free -b; cat /sys/fs/cgroup/memory.max; ulimit -v",
            ),
        ),
        (
            text_case("shared_memory_exhausted", "shm"),
            Settle(fact="the size of /dev/shm and what is in it", command="df -h /dev/shm"),
        ),
        (
            text_case("killed_unproven", "launcher", "killed"),
            Settle(
                fact="whether the out-of-memory killer ran: oom_kill above 0, or the kernel's line",
                command=("cat /sys/fs/cgroup/memory.events; dmesg -T | grep -iE 'oom-kill|killed process'"),
            ),
        ),
        (text_case("not_memory", "not-memory", "disk"), None),
        (text_case("informational", "engine", "report"), None),
    ],
)
def test_what_would_settle_it(case: Case, question: Settle | None) -> None:
    assert settle(case) == question


HINT = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def advised(hint: str, *labels: Label, expandable: bool = False, **fields: Field) -> Case:
    message = Message("cuda-v2", fields=fields, facts={"hint": hint})
    return Case(message, labels, expandable=expandable)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case(Message("cuda-v2"), ("does_not_fit",)), None),
        (
            advised("empty_cache", "fragmentation"),
            "empty_cache() cannot help: the allocator released every wholly free segment before it failed",
        ),
        (
            advised("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "allocator_limit", "does_not_fit"),
            "switching Metal's limit off frees nothing: the machine may swap or freeze instead",
        ),
        (advised("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "allocator_limit"), None),
        (advised(HINT, "fragmentation"), None),
        (
            advised(HINT, "fragmentation", expandable=True),
            "expandable segments are already on: the message always prints this advice",
        ),
        (
            advised("max_split_size_mb", "fragmentation", expandable=True),
            "max_split_size_mb is the older advice: expandable_segments:True avoids holes better",
        ),
        (
            advised(HINT, "does_not_fit", reserved_unallocated=GIB, requested=2 * GIB),
            "1024.00 MiB in holes, 2.00 GiB asked: the message always prints the advice about fragmentation; "
            "its figures do not support it",
        ),
        (
            advised(HINT, "does_not_fit", reserved_unallocated=GIB),
            "the message always prints the advice about fragmentation; its figures do not support it",
        ),
        (
            advised(HINT, "does_not_fit", requested=GIB),
            "the message always prints the advice about fragmentation; its figures do not support it",
        ),
    ],
)
def test_when_the_message_s_own_advice_is_no_help(case: Case, told: str | None) -> None:
    assert stale_advice(case) == told
