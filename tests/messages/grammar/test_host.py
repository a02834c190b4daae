"""Messages of the host: allocators, the kernel, schedulers, launchers, shared memory, disks."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.find import find
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        # Allocators of the process
        ("«posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0»", "cpu-alloc @cpu"),
        (
            "«[enforce fail at CPUAllocator.cpp:68]» . data. Buffer: you tried to allocate 1073",
            "cpu-alloc @cpu requested=? -requested",
        ),
        ("«[enforce fail at alloc_cpu.cpp]» in a build without figures", "cpu-alloc @cpu -requested"),
        # Python's
        ("«unable to mmap 1048576 bytes»", "python-alloc @host requested=1048576"),
        ("«memory allocation of 8589934592 bytes failed»", "python-alloc @host requested=8589934592"),
        ("«os error 1455»", "python-alloc/commit @host"),
        ("the «paging file is too small»", "python-alloc/commit @host"),
        ("RuntimeError: «Caught MemoryError in» DataLoader worker process 0.", "python-alloc/worker @host"),
        ("«Caught MemoryError in» replica 0 on device 0.", "python-alloc @host"),
        ("«std::bad_alloc»", "cpu-alloc @host"),
        ("«std::bad_alloc»: DataLoader worker process 0.", "cpu-alloc/worker @host"),
        ("«Unable to allocate array with shape» (10, 10)", "python-alloc @host"),
        ("OSError: «[Errno 12] Cannot allocate memory»", "python-alloc/errno @host"),
        ("mmap: «Cannot allocate memory (12)»", "python-alloc/errno @host"),
        ("sh: «fork: Cannot allocate memory»", "python-alloc/fork @host"),
        (
            '  File "popen_fork.py", line 66, in _launch\nOSError: «[Errno 12] Cannot allocate memory»',
            "python-alloc/fork @host",
        ),
        # The kernel, containers and schedulers
        (
            "[7.5] «Memory cgroup out of memory: Killed process 4242 (python) total-vm:53312244kB, "
            "anon-rss:31451456kB, file-rss:74816kB, shmem-rss:12296kB, UID:0 pgtables:80kB "
            "oom_score_adj:-997»",
            "kernel-oom/cgroup @host total_vm=54591737856 anon_rss=32206290944 file_rss=76611584 "
            "shmem_rss=12591104 pid:4242 comm:python",
        ),
        (
            "«Out of memory: Killed process 4242, UID 1000, (python3) total-vm:100kB, anon-rss:80kB, "
            "file-rss:0kB»",
            "kernel-oom @host total_vm=102400 anon_rss=81920 file_rss=0 pid:4242 comm:python3",
        ),
        (
            "«oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a,tas"
            "k_memcg=/a,task=python,pid=77,uid=1000»",
            "kernel-oom/cgroup @host constraint:CONSTRAINT_MEMCG pid:77 comm:python",
        ),
        (
            "«oom-kill:constraint=»CONSTRAINT_NONE,nodemask=(null)",
            "kernel-oom @host constraint:CONSTRAINT_NONE",
        ),
        ("python «invoked oom-killer»: gfp_mask=0xcc0(GFP_KERNEL), order=0", "kernel-oom @host"),
        (
            "«oom_reaper: reaped process 77 (python), now anon-rss:0kB, file-rss:4kB, shmem-rss:8kB»",
            "kernel-oom @host anon_rss=0 file_rss=4096 shmem_rss=8192",
        ),
        (
            "slurmstepd: error: «Detected 2 oom_kill events in StepId=123_4.batch» cgroup. Some of your "
            "processes may have been killed",
            "slurm @host job:123_4",
        ),
        ("«Detected 1 oom-kill event(s) in step 9.0» cgroup.", "slurm @host job:9"),
        ("«Detected 1 oom-kill event(s)»", "slurm @host"),
        ("State: «OUT_OF_MEMORY» (exit code 0)", "slurm @host"),
        ("9.batch «OUT_OF_ME+» 0:125", "slurm @host"),
        ("slurmstepd: error: «Exceeded job memory limit» at some point.", "slurm @host"),
        ("«Job 123 exceeded memory limit» (9 > 8), being killed", "slurm @host"),
        ("«srun: error: node7: task 0: Out Of Memory»", "slurm @host"),
        ("Reason: «OOMKilled» Exit Code: 1", "k8s @host"),
        ("Reason: «OOMKilled Exit Code: 137» Started:", "k8s @host"),
        ("the pod was «oom-killed»", "k8s/told @host"),
        ("The «node was low on resource: memory».", "k8s/eviction @host"),
        ("«Container train exceeded its memory limit»", "k8s @host"),
        ("«MemoryPressure: evict»ed", "k8s/eviction @host"),
        # Ray
        (
            "«ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory».",
            "ray @host",
        ),
        (
            "«Memory on the node (IP: 10.0.0.1, ID: 2) where the task (task ID: 3, name=f, pid=1, memory "
            "used=0.05GB) was running was 219.41GB / 230.40GB (0.952), which exceeds the memory usage "
            "threshold of 0.95». Ray killed",
            "ray @host task_used=53687091 node_used=235589693604 node_total=247390116250 fraction:0.952 "
            "threshold:0.95",
        ),
        (
            "«Memory on the node (IP: 1, ID: 2) where the task was running was 219.41GB / 230.40GB» (x)",
            "ray @host node_used=235589693604 node_total=247390116250",
        ),
        ("2 «Workers (tasks / actors) killed due to memory pressure» (OOM)", "ray @host"),
        (
            "There are «some common causes include: (1) the process was killed by the OOM killer due to "
            "high memory usage»",
            "ray/perhaps @host",
        ),
        # Who kills before the kernel
        ("«systemd-oomd[7]: Killed /user.slice/a.scope due to memory» pressure for /a", "oomd @host"),
        ("mem avail «low memory! at or below SIGTERM limits»", "oomd @host"),
        (
            '«sending SIGTERM to process 7 uid 1 "python3": badness 800, VmRSS 4096 MiB»',
            "oomd @host rss=4294967296 pid:7 comm:python3",
        ),
        ('«killing process 8 "python3" with signal 9: badness 800»', "oomd @host pid:8 comm:python3"),
        ("nanny - WARNING - Worker «exceeded 95% memory budget». Restarting", "oomd @host"),
        ("Your «session crashed after using all available RAM».", "notebook @host"),
        # Workers that were killed
        (
            "RuntimeError: «DataLoader worker (pid 11011) is killed by signal: Bus error.» It is possible",
            "shm @host pid:11011",
        ),
        ("«DataLoader worker (pid(s) 12, 34) exited unexpectedly»", "dataloader-killed/exited @host pid:12"),
        ("«DataLoader worker is killed by signal: Terminated.»", "dataloader-killed/terminated @host"),
        ("«DataLoader worker (pid 5) is killed by signal: Segmentation fault.»", "not-memory/signal pid:5"),
        ("«failed (exitcode: -15)» of binary: python", "launcher/terminated @host exitcode:-15"),
        ("«Signal 15 (SIGTERM) received by PID 77»", "launcher/terminated @host signal:SIGTERM pid:77"),
        # Shared memory
        ("«unable to write to file </torch_739_144252761_4>: Input failed (5)»", "shm @host"),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file or "
            "directory (2)»",
            "shm/gone @host",
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)»",
            "shm/descriptors @host",
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Out of luck (28)»",
            "shm @host",
        ),
        ("«unable to open shared memory object </torch_1_2> in read-write mode»", "shm/opening @host"),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file»",
            "shm/gone @host",
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files»",
            "shm/descriptors @host",
        ),
        ("ray.exceptions.«ObjectStoreFullError»: Failed to put object", "shm @host"),
        ("«failed to extend /dev/shm/nccl-a1 to 9637892 bytes»", "shm @host requested=9637892"),
        (
            "«Error while creating shared memory segment /dev/shm/nccl-a1 (size 4096)»",
            "shm @host requested=4096",
        ),
        (
            "«Error while attaching to shared memory segment /dev/shm/nccl-a1 (size 4096), error: No such "
            "file or directory (2)»",
            "shm/gone @host",
        ),
        ("misc/«shm.h:12 NCCL WARN Call to posix_fallocate failed: No space left on device»", "shm @host"),
        # Disks
        ("OSError: [Errno 28] «No space left on device»: 'checkpoint.pt'", "not-memory/disk"),
        ("OSError: [Errno 28] «No space left on device»", "not-memory/no_space"),
        ("OSError: [Errno 28] «No space left on device»: '/dev/shm/psm_1'", "shm @host"),
        ("Error { kind: «StorageFull» }", "not-memory/disk"),
        ("«Disk quota exceeded»", "not-memory/disk"),
        ("«PytorchStreamWriter failed writing» file data/3: file write failed", "not-memory/disk"),
        # Python's end
        (
            "«resource_tracker: There appear to be 4 leaked semaphore objects» to clean up at shutdown",
            "python/resource_tracker",
        ),
        ("«resource_tracker.py:216: UserWarning»: resource_tracker:", "python/resource_tracker"),
    ],
)
def test_what_a_message_says(marked: str, said: str) -> None:
    found, expected = found_and_expected(marked, said)
    assert found == expected


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        ("«MemoryError»", "python-alloc @host"),
        ("«returned non-zero exit status 137»", "launcher/killed @host exitcode:137"),
        ("«exited with code -15»", "launcher/terminated @host exitcode:-15"),
        ("«exit code: 143»", "launcher/terminated @host exitcode:143"),
        (
            "pid: 12 «exitcode: -9» (pid: 77) local_rank: 3\nlocal_rank: 4 (pid: 78)",
            "launcher/killed @host exitcode:-9 pid:77 local_rank:3",
        ),
        ("«signal: killed»", "launcher/killed @host signal:SIGKILL"),
        ("«Signal: 15»", "launcher/terminated @host signal:SIGTERM"),
        ("died with <Signals.«SIGKILL»: 9>.", "launcher/killed @host"),
        ('"OOMKilled": false, "Error": "", "«ExitCode": 137»', "launcher/killed @host exitcode:137"),
        ("«SIGTERM» received by PID 12", "launcher/terminated @host pid:12"),
        ("«Terminated»", "launcher/terminated @host signal:SIGTERM"),
        ("«zsh: killed»     python train.py", "launcher/killed @host signal:SIGKILL"),
        ("«[1] 4242 killed»     python train.py", "launcher/killed @host signal:SIGKILL"),
        (
            "cc: fatal error: «Killed signal terminated program» cc1plus",
            "launcher/killed @host signal:SIGKILL",
        ),
        ("step«\nnumpy._core._exceptions._ArrayMemoryError»: too much", "python-alloc @host"),
        (
            "[launch.py:321:sigkill_handler] exits with «return code = -9»",
            "launcher/killed @host exitcode:-9",
        ),
        (
            "«./run.sh: line 12:  4242 Killed»                  python train.py",
            "launcher/killed @host signal:SIGKILL",
        ),
        ("«#01 4242 Killed» (core dumped)", "launcher/killed @host signal:SIGKILL"),
    ],
)
def test_what_a_line_says(marked: str, said: str) -> None:
    found, expected = found_and_expected(marked, said, tight=False)
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
