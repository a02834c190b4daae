"""Lowers its own limits: of descriptors, of a file's size, of processes."""

import resource

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
state.show("after")
