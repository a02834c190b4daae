"""Trains in children of every start method, of torch's pools and of joblib; passes tensors through queues."""

import multiprocessing
import threading

import joblib
import torch
from training import step


def train(number):
    return number, f"{[step() for _ in range(4)][-1]:.6f}"


one_at_a_time = threading.Lock()


def train_alone(number):
    with one_at_a_time:  # threads share the model: no gradient may go while another thread reads it
        return train(number)


def send(queue, received):
    queue.put(torch.arange(4))
    received.wait()  # the tensor's memory is handed over by this process


if __name__ == "__main__":
    step()
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(train, range(2)), flush=True)
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    received = context.Event()
    child = context.Process(target=send, args=(queue, received))
    child.start()
    print(queue.get(), flush=True)
    received.set()
    child.join()
    print(child.exitcode, multiprocessing.active_children(), flush=True)
    for backend, function in (("loky", train), ("threading", train_alone)):
        calls = (joblib.delayed(function)(seed) for seed in range(3))
        results = joblib.Parallel(n_jobs=2, backend=backend)(calls)
        print(backend, [number for number, _ in results], flush=True)
