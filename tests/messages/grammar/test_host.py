"""Messages of the host: allocators, the kernel, schedulers, launchers, shared memory, disks."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message
from memtriage.model.explanation import Field
from support.marked_messages import found_and_expected


def host(family: str, form: str = "", fields: dict[str, Field] | None = None, **facts: str | int) -> Message:
    """A message about memory of the host."""
    return Message(family, form=form, fields=fields or {}, facts=facts, device="host")


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # Allocators of the process
        ("«posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0»", Message("cpu-alloc", device="cpu")),
        (
            "«[enforce fail at CPUAllocator.cpp:68]» . data. Buffer: you tried to allocate 1073",
            Message("cpu-alloc", fields={"requested": None}, device="cpu", missing=("requested",)),
        ),
        (
            "«[enforce fail at alloc_cpu.cpp]» in a build without figures",
            Message("cpu-alloc", device="cpu", missing=("requested",)),
        ),
        # Python's
        ("«unable to mmap 1048576 bytes»", host("python-alloc", fields={"requested": 1048576})),
        (
            "«memory allocation of 8589934592 bytes failed»",
            host("python-alloc", fields={"requested": 8589934592}),
        ),
        ("«os error 1455»", host("python-alloc", "commit")),
        ("the «paging file is too small»", host("python-alloc", "commit")),
        (
            "RuntimeError: «Caught MemoryError in» DataLoader worker process 0.",
            host("python-alloc", "worker"),
        ),
        ("«Caught MemoryError in» replica 0 on device 0.", host("python-alloc")),
        ("«std::bad_alloc»", host("cpu-alloc")),
        ("«std::bad_alloc»: DataLoader worker process 0.", host("cpu-alloc", "worker")),
        ("«Unable to allocate array with shape» (10, 10)", host("python-alloc")),
        ("OSError: «[Errno 12] Cannot allocate memory»", host("python-alloc", "errno")),
        ("mmap: «Cannot allocate memory (12)»", host("python-alloc", "errno")),
        ("sh: «fork: Cannot allocate memory»", host("python-alloc", "fork")),
        (
            '  File "popen_fork.py", line 66, in _launch\nOSError: «[Errno 12] Cannot allocate memory»',
            host("python-alloc", "fork"),
        ),
        # The kernel, containers and schedulers
        (
            "[7.5] «Memory cgroup out of memory: Killed process 4242 (python) "
            "total-vm:53312244kB, anon-rss:31451456kB, file-rss:74816kB, shmem-rss:12296kB, "
            "UID:0 pgtables:80kB oom_score_adj:-997»",
            host(
                "kernel-oom",
                "cgroup",
                fields={
                    "total_vm": 54591737856,
                    "anon_rss": 32206290944,
                    "file_rss": 76611584,
                    "shmem_rss": 12591104,
                },
                pid=4242,
                comm="python",
            ),
        ),
        (
            "«Out of memory: Killed process 4242, UID 1000, (python3) total-vm:100kB, "
            "anon-rss:80kB, file-rss:0kB»",
            host(
                "kernel-oom",
                fields={"total_vm": 102400, "anon_rss": 81920, "file_rss": 0},
                pid=4242,
                comm="python3",
            ),
        ),
        (
            "«oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_me"
            "mcg=/a,task_memcg=/a,task=python,pid=77,uid=1000»",
            host("kernel-oom", "cgroup", constraint="CONSTRAINT_MEMCG", pid=77, comm="python"),
        ),
        (
            "«oom-kill:constraint=»CONSTRAINT_NONE,nodemask=(null)",
            host("kernel-oom", constraint="CONSTRAINT_NONE"),
        ),
        ("python «invoked oom-killer»: gfp_mask=0xcc0(GFP_KERNEL), order=0", host("kernel-oom")),
        (
            "«oom_reaper: reaped process 77 (python), now anon-rss:0kB, file-rss:4kB, shmem-rss:8kB»",
            host("kernel-oom", fields={"anon_rss": 0, "file_rss": 4096, "shmem_rss": 8192}),
        ),
        (
            "slurmstepd: error: «Detected 2 oom_kill events in StepId=123_4.batch» cgroup. Some "
            "of your processes may have been killed",
            host("slurm", job="123_4"),
        ),
        ("«Detected 1 oom-kill event(s) in step 9.0» cgroup.", host("slurm", job=9)),
        ("«Detected 1 oom-kill event(s)»", host("slurm")),
        ("State: «OUT_OF_MEMORY» (exit code 0)", host("slurm")),
        ("9.batch «OUT_OF_ME+» 0:125", host("slurm")),
        ("slurmstepd: error: «Exceeded job memory limit» at some point.", host("slurm")),
        ("«Job 123 exceeded memory limit» (9 > 8), being killed", host("slurm")),
        ("«srun: error: node7: task 0: Out Of Memory»", host("slurm")),
        ("Reason: «OOMKilled» Exit Code: 1", host("k8s")),
        ("Reason: «OOMKilled Exit Code: 137» Started:", host("k8s")),
        ("the pod was «oom-killed»", host("k8s", "told")),
        ("The «node was low on resource: memory».", host("k8s", "eviction")),
        ("«Container train exceeded its memory limit»", host("k8s")),
        ("«MemoryPressure: evict»ed", host("k8s", "eviction")),
        # Ray
        (
            "«ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory».",
            host("ray"),
        ),
        (
            "«Memory on the node (IP: 10.0.0.1, ID: 2) where the task (task ID: 3, name=f, "
            "pid=1, memory used=0.05GB) was running was 219.41GB / 230.40GB (0.952), which "
            "exceeds the memory usage threshold of 0.95». Ray killed",
            host(
                "ray",
                fields={"task_used": 53687091, "node_used": 235589693604, "node_total": 247390116250},
                fraction="0.952",
                threshold="0.95",
            ),
        ),
        (
            "«Memory on the node (IP: 1, ID: 2) where the task was running was 219.41GB / 230.40GB» (x)",
            host("ray", fields={"node_used": 235589693604, "node_total": 247390116250}),
        ),
        ("2 «Workers (tasks / actors) killed due to memory pressure» (OOM)", host("ray")),
        (
            "There are «some common causes include: (1) the process was killed by the OOM killer "
            "due to high memory usage»",
            host("ray", "perhaps"),
        ),
        # Who kills before the kernel
        ("«systemd-oomd[7]: Killed /user.slice/a.scope due to memory» pressure for /a", host("oomd")),
        ("mem avail «low memory! at or below SIGTERM limits»", host("oomd")),
        (
            '«sending SIGTERM to process 7 uid 1 "python3": badness 800, VmRSS 4096 MiB»',
            host("oomd", fields={"rss": 4294967296}, pid=7, comm="python3"),
        ),
        ('«killing process 8 "python3" with signal 9: badness 800»', host("oomd", pid=8, comm="python3")),
        ("nanny - WARNING - Worker «exceeded 95% memory budget». Restarting", host("oomd")),
        ("Your «session crashed after using all available RAM».", host("notebook")),
        # Workers that were killed
        (
            "RuntimeError: «DataLoader worker (pid 11011) is killed by signal: Bus error.» It is possible",
            host("shm", pid=11011),
        ),
        (
            "«DataLoader worker (pid(s) 12, 34) exited unexpectedly»",
            host("dataloader-killed", "exited", pid=12),
        ),
        ("«DataLoader worker is killed by signal: Terminated.»", host("dataloader-killed", "terminated")),
        (
            "«DataLoader worker (pid 5) is killed by signal: Segmentation fault.»",
            Message("not-memory", form="signal", facts={"pid": 5}),
        ),
        ("«failed (exitcode: -15)» of binary: python", host("launcher", "terminated", exitcode=-15)),
        (
            "«Signal 15 (SIGTERM) received by PID 77»",
            host("launcher", "terminated", signal="SIGTERM", pid=77),
        ),
        # Shared memory
        ("«unable to write to file </torch_739_144252761_4>: Input failed (5)»", host("shm")),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file "
            "or directory (2)»",
            host("shm", "gone"),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)»",
            host("shm", "descriptors"),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Out of luck (28)»",
            host("shm"),
        ),
        ("«unable to open shared memory object </torch_1_2> in read-write mode»", host("shm", "opening")),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file»",
            host("shm", "gone"),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files»",
            host("shm", "descriptors"),
        ),
        ("ray.exceptions.«ObjectStoreFullError»: Failed to put object", host("shm")),
        ("«failed to extend /dev/shm/nccl-a1 to 9637892 bytes»", host("shm", fields={"requested": 9637892})),
        (
            "«Error while creating shared memory segment /dev/shm/nccl-a1 (size 4096)»",
            host("shm", fields={"requested": 4096}),
        ),
        (
            "«Error while attaching to shared memory segment /dev/shm/nccl-a1 (size 4096), "
            "error: No such file or directory (2)»",
            host("shm", "gone"),
        ),
        ("misc/«shm.h:12 NCCL WARN Call to posix_fallocate failed: No space left on device»", host("shm")),
        # Disks
        (
            "OSError: [Errno 28] «No space left on device»: 'checkpoint.pt'",
            Message("not-memory", form="disk"),
        ),
        (
            "OSError: [Errno 28] «No space left on device»",
            Message("not-memory", form="no space"),
        ),
        ("OSError: [Errno 28] «No space left on device»: '/dev/shm/psm_1'", host("shm")),
        ("Error { kind: «StorageFull» }", Message("not-memory", form="disk")),
        ("«Disk quota exceeded»", Message("not-memory", form="disk")),
        (
            "«PytorchStreamWriter failed writing» file data/3: file write failed",
            Message("not-memory", form="disk"),
        ),
        # Python's end
        (
            "«resource_tracker: There appear to be 4 leaked semaphore objects» to clean up at shutdown",
            Message("python", form="resource tracker"),
        ),
        (
            "«resource_tracker.py:216: UserWarning»: resource_tracker:",
            Message("python", form="resource tracker"),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("«MemoryError»", host("python-alloc")),
        ("«returned non-zero exit status 137»", host("launcher", "killed", exitcode=137)),
        ("«exited with code -15»", host("launcher", "terminated", exitcode=-15)),
        ("«exit code: 143»", host("launcher", "terminated", exitcode=143)),
        (
            "pid: 12 «exitcode: -9» (pid: 77) local_rank: 3\nlocal_rank: 4 (pid: 78)",
            host("launcher", "killed", exitcode=-9, pid=77, local_rank=3),
        ),
        ("«signal: killed»", host("launcher", "killed", signal="SIGKILL")),
        ("«Signal: 15»", host("launcher", "terminated", signal="SIGTERM")),
        ("died with <Signals.«SIGKILL»: 9>.", host("launcher", "killed")),
        ('"OOMKilled": false, "Error": "", "«ExitCode": 137»', host("launcher", "killed", exitcode=137)),
        ("«SIGTERM» received by PID 12", host("launcher", "terminated", pid=12)),
        ("«Terminated»", host("launcher", "terminated", signal="SIGTERM")),
        ("«zsh: killed»     python train.py", host("launcher", "killed", signal="SIGKILL")),
        ("«[1] 4242 killed»     python train.py", host("launcher", "killed", signal="SIGKILL")),
        (
            "cc: fatal error: «Killed signal terminated program» cc1plus",
            host("launcher", "killed", signal="SIGKILL"),
        ),
        ("step«\nnumpy._core._exceptions._ArrayMemoryError»: too much", host("python-alloc")),
        (
            "[launch.py:321:sigkill_handler] exits with «return code = -9»",
            host("launcher", "killed", exitcode=-9),
        ),
        (
            "«./run.sh: line 12:  4242 Killed»                  python train.py",
            host("launcher", "killed", signal="SIGKILL"),
        ),
        ("«#01 4242 Killed» (core dumped)", host("launcher", "killed", signal="SIGKILL")),
    ],
)
def test_what_a_line_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message, tight=False)
    assert found == expected


@pytest.mark.parametrize(
    "text",
    [
        '"OOMKilled": false, "ExitCode": 0',
        "Sending SIGTERM",
        "the launcher handles SIGKILL with its handler",
        "return code = 137.5",
        "exit code: 0",
        "killed 3 jobs of the queue",
        "JOBOUT_OF_MEMORY",
        "Thread: MyMemoryErrors",
    ],
)
def test_what_is_none(text: str) -> None:
    assert {found.message.family for found in find(text)} <= {"mention", "aftermath"}
