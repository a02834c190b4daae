"""What a program sees of the interpreter: tracing, modules of its own names, handlers, exits."""

import os
import queue  # the one beside this file
import signal
import sys
import threading

import rich  # likewise
import state

print(queue.WHOSE, rich.WHOSE)
state.show("start")

lines = []


def tracer(frame, event, argument):
    if frame.f_code.co_filename == __file__:
        lines.append((event, frame.f_code.co_name))
        return tracer
    return None


def traced():
    return 1


sys.settrace(tracer)
traced()
sys.settrace(None)
print(lines)

for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    seen = []
    previous = signal.signal(signum, lambda number, frame, seen=seen: seen.append(number))
    os.kill(os.getpid(), signum)
    print(previous, seen, signal.signal(signum, previous) is not None, signal.getsignal(signum))

statuses = []
for form in (None, 0, 3, 256, -1, True, 2**80, "text", ("a", 1), 1.5):
    child = os.fork()
    if child == 0:
        if form == 3:
            raise SystemExit(form)
        sys.exit(form)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(statuses)

os.environ["CHANGED"] = "1"
sys.stderr = None
state.show("end")
print("last", threading.current_thread().name, sorted(os.listdir(".")), flush=True)
sys.exit(7)
