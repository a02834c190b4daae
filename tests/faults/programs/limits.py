"""Lowers its own limits: of descriptors, of file sizes, of memory, of processor time, of the stack."""

import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import state
from training import step

for name, most in (("RLIMIT_NOFILE", 24), ("RLIMIT_FSIZE", 2048), ("RLIMIT_CORE", 0)):
    limit = getattr(resource, name)
    resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
files = []
try:
    while True:
        files.append(open("/dev/null"))  # noqa: SIM115
except OSError as error:
    print(type(error).__name__, len(files))
kept = []
for _ in range(14):
    step(kept)
try:
    with open("large.txt", "wb", buffering=0) as file:
        files[0].close()
except OSError as error:
    print(type(error).__name__)
print([resource.getrlimit(name) for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)])
for file in files:
    file.close()
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # of which a write beyond the limit dies
step(kept)

resident = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for name, most in (("AS", resident + (600 << 20)), ("DATA", 4 << 30), ("STACK", 1 << 20), ("MEMLOCK", 0)):
    limit = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
hold = []
for size in (8 << 30, 1 << 20):
    try:
        while True:
            hold.append(bytearray(size))
    except MemoryError:
        print("MemoryError", len(hold) > 400)
hold.clear()
step(kept)
worker = threading.Thread(target=step)
worker.start()
worker.join()

alarms = []
signal.signal(signal.SIGXCPU, lambda signum, frame: alarms.append(signum))
hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1, hard))
while not alarms:
    step()
print(set(alarms), subprocess.run(["true"]).returncode)
signal.signal(signal.SIGXCPU, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 10, hard))  # for the end of this program
state.show("after")
