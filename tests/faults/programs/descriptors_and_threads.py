"""Closes every descriptor, opens files of its own, and waits for all threads."""

import os
import threading
from pathlib import Path

import state
from training import step

kept = []
state.show("before")
step(kept)
os.closerange(3, 4096)
files = [open(f"mine-{number}.txt", "w") for number in range(12)]  # noqa: SIM115
for _ in range(13):
    step(kept)
for file in files:
    file.write("data\n")
    file.close()
print([Path(f"mine-{number}.txt").read_text() for number in range(12)])

worker = threading.Thread(target=lambda: [step() for _ in range(3)])
worker.start()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print("joined", threading.active_count())
state.show("after")
os.close(2)
second = open("second.txt", "w")  # noqa: SIM115
step()
