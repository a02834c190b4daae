"""Messages of the host: allocators, the kernel, schedulers, launchers, shared memory, disks."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # Allocators of the process
        (
            "RuntimeError: «[enforce fail at alloc_cpu.cpp:127] err == 0. Buffer: you tried to "
            "allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)» more",
            Message("cpu-alloc", fields={"requested": 116813856768}, device="cpu"),
        ),
        ("«posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0»", Message("cpu-alloc", device="cpu")),
        (
            "«[enforce fail at CPUAllocator.cpp:68]» . data. Buffer: you tried to allocate 1073",
            Message("cpu-alloc", fields={"requested": None}, device="cpu", missing=("requested",)),
        ),
        (
            "«[enforce fail at alloc_cpu.cpp]» in a build without figures",
            Message("cpu-alloc", device="cpu", missing=("requested",)),
        ),
        (
            "«[enforce fail at alloc_cpu.cpp] you tried to allocate 18446744073709551615 bytes.»",
            Message("cpu-alloc", fields={"requested": 18446744073709551615}, device="cpu"),
        ),
        (
            "«[enforce fail at alloc_cpu.cpp] you tried to allocate 18446744073709551616 bytes.»",
            Message("cpu-alloc", fields={"requested": None}, device="cpu", missing=("requested",)),
        ),
        # Python's
        (
            "MemoryError: «Unable to allocate 8.00 PiB for an array» with shape "
            "(1125899906842624,) and data type float64",
            Message("python-alloc", fields={"requested": 9007199254740992}, device="host"),
        ),
        (
            "«unable to mmap 1048576 bytes from file </torch_1_2_3>: Cannot allocate memory (12)»",
            Message("python-alloc", form="segment", fields={"requested": 1048576}, device="host"),
        ),
        (
            "«unable to mmap 1048576 bytes from file <model.safetensors>»: Permission denied",
            Message("python-alloc", form="file", fields={"requested": 1048576}, device="host"),
        ),
        (
            "«unable to mmap 1048576 bytes»",
            Message("python-alloc", fields={"requested": 1048576}, device="host"),
        ),
        (
            "«memory allocation of 8589934592 bytes failed»",
            Message("python-alloc", fields={"requested": 8589934592}, device="host"),
        ),
        (
            "OSError: [«WinError 1455»] the page file is small",
            Message("python-alloc", form="commit", device="host"),
        ),
        ("«os error 1455»", Message("python-alloc", form="commit", device="host")),
        ("the «paging file is too small»", Message("python-alloc", form="commit", device="host")),
        (
            "RuntimeError: «Caught MemoryError in» DataLoader worker process 0.",
            Message("python-alloc", form="worker", device="host"),
        ),
        ("«Caught MemoryError in» replica 0 on device 0.", Message("python-alloc", device="host")),
        ("«std::bad_alloc»", Message("cpu-alloc", device="host")),
        (
            "«std::bad_alloc»: DataLoader worker process 0.",
            Message("cpu-alloc", form="worker", device="host"),
        ),
        ("«Unable to allocate array with shape» (10, 10)", Message("python-alloc", device="host")),
        (
            "OSError: «[Errno 12] Cannot allocate memory»",
            Message("python-alloc", form="errno", device="host"),
        ),
        ("mmap: «Cannot allocate memory (12)»", Message("python-alloc", form="errno", device="host")),
        ("sh: «fork: Cannot allocate memory»", Message("python-alloc", form="fork", device="host")),
        (
            '  File "popen_fork.py", line 66, in _launch\nOSError: «[Errno 12] Cannot allocate memory»',
            Message("python-alloc", form="fork", device="host"),
        ),
        # The kernel, containers and schedulers
        (
            "[7.5] «Memory cgroup out of memory: Killed process 4242 (python) "
            "total-vm:53312244kB, anon-rss:31451456kB, file-rss:74816kB, shmem-rss:12296kB, "
            "UID:0 pgtables:80kB oom_score_adj:-997»",
            Message(
                "kernel-oom",
                form="cgroup",
                fields={
                    "total_vm": 54591737856,
                    "anon_rss": 32206290944,
                    "file_rss": 76611584,
                    "shmem_rss": 12591104,
                },
                facts={"pid": 4242, "comm": "python"},
                device="host",
            ),
        ),
        (
            "«Out of memory: Killed process 4242, UID 1000, (python3) total-vm:100kB, "
            "anon-rss:80kB, file-rss:0kB»",
            Message(
                "kernel-oom",
                fields={"total_vm": 102400, "anon_rss": 81920, "file_rss": 0},
                facts={"pid": 4242, "comm": "python3"},
                device="host",
            ),
        ),
        (
            "«oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_me"
            "mcg=/a,task_memcg=/a,task=python,pid=77,uid=1000»",
            Message(
                "kernel-oom",
                form="cgroup",
                facts={"constraint": "CONSTRAINT_MEMCG", "pid": 77, "comm": "python"},
                device="host",
            ),
        ),
        (
            "«oom-kill:constraint=»CONSTRAINT_NONE,nodemask=(null)",
            Message("kernel-oom", facts={"constraint": "CONSTRAINT_NONE"}, device="host"),
        ),
        (
            "python «invoked oom-killer»: gfp_mask=0xcc0(GFP_KERNEL), order=0",
            Message("kernel-oom", device="host"),
        ),
        (
            "«oom_reaper: reaped process 77 (python), now anon-rss:0kB, file-rss:4kB, shmem-rss:8kB»",
            Message("kernel-oom", fields={"anon_rss": 0, "file_rss": 4096, "shmem_rss": 8192}, device="host"),
        ),
        (
            "slurmstepd: error: «Detected 2 oom_kill events in StepId=123_4.batch» cgroup. Some "
            "of your processes may have been killed",
            Message("slurm", facts={"job": "123_4"}, device="host"),
        ),
        (
            "«Detected 1 oom-kill event(s) in step 9.0» cgroup.",
            Message("slurm", facts={"job": "9"}, device="host"),
        ),
        ("«Detected 1 oom-kill event(s)»", Message("slurm", device="host")),
        ("State: «OUT_OF_MEMORY» (exit code 0)", Message("slurm", device="host")),
        ("9.batch «OUT_OF_ME+» 0:125", Message("slurm", device="host")),
        ("slurmstepd: error: «Exceeded job memory limit» at some point.", Message("slurm", device="host")),
        ("«Job 123 exceeded memory limit» (9 > 8), being killed", Message("slurm", device="host")),
        ("«srun: error: node7: task 0: Out Of Memory»", Message("slurm", device="host")),
        ("Reason: «OOMKilled» Exit Code: 1", Message("k8s", device="host")),
        ("Reason: «OOMKilled Exit Code: 137» Started:", Message("k8s", device="host")),
        ("the pod was «oom-killed»", Message("k8s", form="told", device="host")),
        ("The «node was low on resource: memory».", Message("k8s", form="eviction", device="host")),
        ("«Container train exceeded its memory limit»", Message("k8s", device="host")),
        ("«MemoryPressure: evict»ed", Message("k8s", form="eviction", device="host")),
        (
            '«"OOMKilled": false», "Error": "", "ExitCode": 137',
            Message("k8s", form="denied", device="host", ran_out=False),
        ),
        ("«OOMKilled=false» exit_code=137", Message("k8s", form="denied", device="host", ran_out=False)),
        # Ray
        (
            "«ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory».",
            Message("ray", device="host"),
        ),
        (
            "«Memory on the node (IP: 10.0.0.1, ID: 2) where the task (task ID: 3, name=f, "
            "pid=1, memory used=0.05GB) was running was 219.41GB / 230.40GB (0.952), which "
            "exceeds the memory usage threshold of 0.95». Ray killed",
            Message(
                "ray",
                fields={"task_used": 53687091, "node_used": 235589693604, "node_total": 247390116250},
                facts={"fraction": "0.952", "threshold": "0.95"},
                device="host",
            ),
        ),
        (
            "«Memory on the node (IP: 1, ID: 2) where the task was running was 219.41GB / 230.40GB» (x)",
            Message("ray", fields={"node_used": 235589693604, "node_total": 247390116250}, device="host"),
        ),
        ("2 «Workers (tasks / actors) killed due to memory pressure» (OOM)", Message("ray", device="host")),
        (
            "There are «some common causes include: (1) the process was killed by the OOM killer "
            "due to high memory usage»",
            Message("ray", form="perhaps", device="host"),
        ),
        # Who kills before the kernel
        (
            "«systemd-oomd[7]: Killed /user.slice/a.scope due to memory» pressure for /a",
            Message("oomd", device="host"),
        ),
        ("mem avail «low memory! at or below SIGTERM limits»", Message("oomd", device="host")),
        (
            '«sending SIGTERM to process 7 uid 1 "python3": badness 800, VmRSS 4096 MiB»',
            Message("oomd", fields={"rss": 4294967296}, facts={"pid": 7, "comm": "python3"}, device="host"),
        ),
        (
            '«killing process 8 "python3" with signal 9: badness 800»',
            Message("oomd", facts={"pid": 8, "comm": "python3"}, device="host"),
        ),
        ("nanny - WARNING - Worker «exceeded 95% memory budget». Restarting", Message("oomd", device="host")),
        ("Your «session crashed after using all available RAM».", Message("notebook", device="host")),
        # Workers that were killed
        (
            "RuntimeError: «DataLoader worker (pid 11011) is killed by signal: Bus error.» It is possible",
            Message("shm", facts={"pid": 11011}, device="host"),
        ),
        (
            "«DataLoader worker (pid(s) 12, 34) exited unexpectedly»",
            Message("dataloader-killed", form="exited", facts={"pid": 12}, device="host", ran_out=False),
        ),
        (
            "«DataLoader worker (pid 19597) is killed by signal: Killed.»",
            Message("dataloader-killed", form="killed", facts={"pid": 19597}, device="host", ran_out=False),
        ),
        (
            "«DataLoader worker is killed by signal: Terminated.»",
            Message("dataloader-killed", form="terminated", device="host", ran_out=False),
        ),
        (
            "«DataLoader worker (pid 5) is killed by signal: Segmentation fault.»",
            Message("not-memory", form="signal", facts={"pid": 5}, ran_out=False),
        ),
        (
            "«failed (exitcode: -9) local_rank: 3 (pid: 77)» of binary: python",
            Message(
                "launcher",
                form="killed",
                facts={"exitcode": -9, "pid": 77, "local_rank": 3},
                device="host",
                ran_out=False,
            ),
        ),
        (
            "«failed (exitcode: -15)» of binary: python",
            Message("launcher", form="terminated", facts={"exitcode": -15}, device="host", ran_out=False),
        ),
        (
            "«Signal 9 (SIGKILL) received by PID 77»",
            Message("launcher", form="killed", facts={"pid": 77}, device="host", ran_out=False),
        ),
        (
            "«Signal 15 (SIGTERM) received by PID 77»",
            Message("launcher", form="terminated", facts={"pid": 77}, device="host", ran_out=False),
        ),
        # Shared memory
        (
            "Unexpected «bus error encountered in worker». Possibly insufficient shared memory (shm).",
            Message("shm", device="host"),
        ),
        (
            "«unable to write to file </torch_739_144252761_4>: No space left on device (28)»",
            Message("shm", device="host"),
        ),
        (
            "«unable to write to file </torch_739_144252761_4>: Input failed (5)»",
            Message("shm", device="host"),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file "
            "or directory (2)»",
            Message("shm", form="gone", device="host", ran_out=False),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)»",
            Message("shm", form="descriptors", device="host", ran_out=False),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Out of luck (28)»",
            Message("shm", device="host"),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode»",
            Message("shm", form="opening", device="host", ran_out=False),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: No such file»",
            Message("shm", form="gone", device="host", ran_out=False),
        ),
        (
            "«unable to open shared memory object </torch_1_2> in read-write mode: Too many open files»",
            Message("shm", form="descriptors", device="host", ran_out=False),
        ),
        ("ray.exceptions.«ObjectStoreFullError»: Failed to put object", Message("shm", device="host")),
        (
            "«failed to extend /dev/shm/nccl-a1 to 9637892 bytes»",
            Message("shm", fields={"requested": 9637892}, device="host"),
        ),
        (
            "«Error while creating shared memory segment /dev/shm/nccl-a1 (size 4096)»",
            Message("shm", fields={"requested": 4096}, device="host"),
        ),
        (
            "«Error while attaching to shared memory segment /dev/shm/nccl-a1 (size 4096), "
            "error: No such file or directory (2)»",
            Message("shm", form="gone", device="host", ran_out=False),
        ),
        (
            "misc/«shm.h:12 NCCL WARN Call to posix_fallocate failed: No space left on device»",
            Message("shm", device="host"),
        ),
        # Disks
        (
            "OSError: [Errno 28] «No space left on device»: 'checkpoint.pt'",
            Message("not-memory", form="disk", ran_out=False),
        ),
        (
            "OSError: [Errno 28] «No space left on device»",
            Message("not-memory", form="no space", ran_out=False),
        ),
        (
            "OSError: [Errno 28] «No space left on device»: '/dev/shm/psm_1'",
            Message("shm", device="host"),
        ),
        ("Error { kind: «StorageFull» }", Message("not-memory", form="disk", ran_out=False)),
        ("«Disk quota exceeded»", Message("not-memory", form="disk", ran_out=False)),
        (
            "«PytorchStreamWriter failed writing» file data/3: file write failed",
            Message("not-memory", form="disk", ran_out=False),
        ),
        # Python's end
        (
            "«resource_tracker: There appear to be 4 leaked semaphore objects» to clean up at shutdown",
            Message("python", form="resource tracker", ran_out=False),
        ),
        (
            "«resource_tracker.py:216: UserWarning»: resource_tracker:",
            Message("python", form="resource tracker", ran_out=False),
        ),
        # What decides may stand some characters before or after
        (
            f"os.fork(){'x' * 191}«[Errno 12] Cannot allocate memory»",
            Message("python-alloc", form="fork", device="host"),
        ),
        (
            f"os.fork(){'x' * 192}«[Errno 12] Cannot allocate memory»",
            Message("python-alloc", form="errno", device="host"),
        ),
        (
            f"«Caught MemoryError in»{'x' * 163}DataLoader worker",
            Message("python-alloc", form="worker", device="host"),
        ),
        (
            f"«Caught MemoryError in»{'x' * 164}DataLoader worker",
            Message("python-alloc", form="worker", device="host"),
        ),
        (
            f"exit_code=137{'x' * 587}«OOMKilled=false»",
            Message("k8s", form="denied", device="host", ran_out=False),
        ),
        (f"/dev/shm{'x' * 392}«No space left on device»", Message("shm", device="host")),
        (
            f"/dev/shm{'x' * 393}«No space left on device»",
            Message("not-memory", form="no space", ran_out=False),
        ),
        (f"«No space left on device»{'x' * 112}/dev/shm", Message("shm", device="host")),
        (
            f"«No space left on device»{'x' * 113}/dev/shm",
            Message("not-memory", form="no space", ran_out=False),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("«MemoryError»", Message("python-alloc", device="host")),
        (
            "«return code = 137»",
            Message("launcher", form="killed", facts={"exitcode": 137}, device="host", ran_out=False),
        ),
        (
            "«returned non-zero exit status 137»",
            Message("launcher", form="killed", facts={"exitcode": 137}, device="host", ran_out=False),
        ),
        (
            "«exited with code -15»",
            Message("launcher", form="terminated", facts={"exitcode": -15}, device="host", ran_out=False),
        ),
        (
            "«exit code: 143»",
            Message("launcher", form="terminated", facts={"exitcode": 143}, device="host", ran_out=False),
        ),
        (
            "pid: 12 «exitcode: -9» (pid: 77) local_rank: 3\nlocal_rank: 4 (pid: 78)",
            Message(
                "launcher",
                form="killed",
                facts={"exitcode": -9, "pid": 77, "local_rank": 3},
                device="host",
                ran_out=False,
            ),
        ),
        (
            "«signal: killed»",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "«Signal: 15»",
            Message("launcher", form="terminated", facts={"signal": "SIGTERM"}, device="host", ran_out=False),
        ),
        (
            "died with <Signals.«SIGKILL»: 9>.",
            Message("launcher", form="killed", device="host", ran_out=False),
        ),
        (
            "«SIGTERM» received by PID 12",
            Message("launcher", form="terminated", facts={"pid": 12}, device="host", ran_out=False),
        ),
        (
            "«Terminated»",
            Message("launcher", form="terminated", facts={"signal": "SIGTERM"}, device="host", ran_out=False),
        ),
        (
            "«zsh: killed»     python train.py",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "«[1] 4242 killed»     python train.py",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "cc: fatal error: «Killed signal terminated program» cc1plus",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "step«\nnumpy._core._exceptions._ArrayMemoryError»: too much",
            Message("python-alloc", device="host"),
        ),
        (
            "[launch.py:321:sigkill_handler] exits with «return code = -9»",
            Message("launcher", form="killed", facts={"exitcode": -9}, device="host", ran_out=False),
        ),
        (
            "«./run.sh: line 12:  4242 Killed»                  python train.py",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "«#01 4242 Killed» (core dumped)",
            Message("launcher", form="killed", facts={"signal": "SIGKILL"}, device="host", ran_out=False),
        ),
        (
            "«exit code: 137»",
            Message("launcher", form="killed", facts={"exitcode": 137}, device="host", ran_out=False),
        ),
        (
            f"«exit_code=137»{'x' * 588}OOMKilled=false",
            Message("launcher", form="killed", facts={"exitcode": 137}, device="host", ran_out=False),
        ),
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
        f"sending{'x' * 72} SIGTERM",
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


def test_a_shut_down_by_the_launcher_is_told_from_a_signal_far_above() -> None:
    (found,) = find(f"sending{'x' * 73} SIGTERM")
    assert found.message.form == "asked"
