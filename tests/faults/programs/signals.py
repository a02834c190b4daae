"""Waits for signals and children, has storms of alarms, runs an event loop, and becomes another program."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import state
from training import step

kept = []
for _ in range(4):
    step(kept)
for options in (0, os.WNOHANG):
    try:
        print(os.waitpid(-1, options))
    except ChildProcessError:
        print("no child")

waited = {signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
for _ in range(8):  # whoever does not block it takes it, and dies of it
    os.kill(os.getpid(), signal.SIGUSR1)
    print(signal.sigwait({signal.SIGUSR1}))
    step(kept)
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigwait({signal.SIGTERM}))
signal.setitimer(signal.ITIMER_REAL, 0.05)
print(signal.sigwait({signal.SIGALRM}), signal.sigpending())
print(signal.pthread_sigmask(signal.SIG_UNBLOCK, waited))

MASK = "import os, signal; print(signal.pthread_sigmask(0, []), sorted(os.listdir('/proc/self/fd')))"
print(subprocess.run([sys.executable, "-S", "-c", MASK], capture_output=True, text=True).stdout)

storm = []
signal.signal(signal.SIGALRM, lambda signum, frame: storm.append(signum))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while len(storm) < 5:
    step(kept)
signal.setitimer(signal.ITIMER_REAL, 0)
print("storm")


async def loop():
    received = []
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, received.append, signum)
    for _ in range(3):
        step(kept)
        for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), signum)
        while len(received) % 3 or not received:
            await asyncio.sleep(0.01)
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 3")
    print(len(received), await child.wait())


asyncio.run(loop())
for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signum)
        time.sleep(60)
    print(signum, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
state.show("after")
os.execv(sys.executable, [sys.executable, "-S", "-c", f"{MASK}; raise SystemExit(9)"])
