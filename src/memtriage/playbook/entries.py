"""The playbook M1 ... M21: what is known about each way to run out of memory, or to need less of it.

This is the only place for these texts: every finding, fix and remedy names an entry by its key.

B is bytes. In formulas: N parameters, b micro-batch, s sequence length, h hidden size, a attention heads,
L layers, V vocabulary, w ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtriage.model.explanation import Maths

LEAKS: Final = "M21"
"""The entry that findings of growing memory belong to."""


@dataclass(frozen=True, slots=True)
class PlaybookAction:
    """One thing to do.

    Attributes:
        key: its name in the code of rules.
        action: what to do.
        saves: bytes saved, as a formula or a measured share, with what it rests on.
        costs: what it does to speed.
        maths: what it does to the result.
        maths_note: exceptions to `maths`; None where there is none.
        no_help: when it saves nothing.
    """

    key: str
    action: str
    saves: str
    costs: str
    maths: Maths
    maths_note: str | None
    no_help: str


@dataclass(frozen=True, slots=True)
class PlaybookEntry:
    """One entry of the playbook.

    Attributes:
        name: `M1` ... `M21`.
        subject: a title.
        says: the advice, in whole sentences.
        picture: a drawing in text; empty where there is none.
        rungs: the changes that the entry adds to the ladder of M4, in order of cost.
        actions: what else the entry proposes, for cases in which the ladder is not the answer.
    """

    name: str
    subject: str
    says: str
    rungs: tuple[PlaybookAction, ...] = ()
    actions: tuple[PlaybookAction, ...] = ()
    picture: str = ""


_CUTS: Final = """\
losses --bound--> loss --detach--> grad_fn --> ... --> node --context--> ctx.cache
                   |                                    |
                   |                                    +--pack--> saved tensor
                   +--clone--> storage of the whole batch
                   +--grad--> .grad --create_graph--> grad_fn of the gradient

module._forward_hooks --remove--> hook --> what its function refers to
functools.lru_cache --cache--> result         error --traceback--> frames --> local variables
a variable --shorten--> rows of all steps     generator --close--> local variables
object --break--> object that refers to it    (only a collection frees a cycle: collect)
"""

_ENTRIES: Final = (
    PlaybookEntry(
        "M1",
        "Anatomy of training memory",
        "With 16-bit weights (2 B), an fp32 master copy (4 B), Adam's two states (8 B) and fp32 gradients "
        "(4 B), training takes 18 B per parameter whatever the batch. Plain fp32 Adam takes 16, pure bf16 "
        "with bf16 states 8. Activations come on top and grow with batch, length, depth and width; "
        "temporaries make spikes. Inference needs 2 B per parameter, so 'it runs in inference' proves "
        "nothing about training.",
    ),
    PlaybookEntry(
        "M2",
        "Reading the error",
        "Before any advice, read off the message what was asked, the device's capacity, what is free, what "
        "is allocated and what is reserved but unallocated. Free memory is not a sign of another process: "
        "others lower that figure. A refusal although enough is free is a refusal by the driver. Memory that "
        "is neither free nor reserved is outside this process's allocator. The message prints its hint about "
        "fragmentation always: the hint is not evidence.",
        actions=(
            PlaybookAction(
                key="read-on",
                action="read what was asked and what was there: in the lines around this one, or with the "
                "program's own log at a higher level",
                saves="nothing yet",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="the program does not say",
            ),
            PlaybookAction(
                key="raise-cap",
                action="raise or remove the cap on this process (an engine's share, a library's limit; in "
                "PyTorch torch.cuda.set_per_process_memory_fraction)",
                saves="what the device has beyond the cap",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="others use the rest of the device",
            ),
            PlaybookAction(
                key="less-on-device",
                action="put less on the device: fewer layers of the model, a smaller quantization, a shorter "
                "context, fewer requests at once, a smaller batch",
                saves="what is left out",
                costs="depends on what is left out",
                maths="same",
                maths_note="except a smaller quantization",
                no_help="others hold the device",
            ),
            PlaybookAction(
                key="fewer-weights",
                action="fewer bytes of weights on each device: a smaller model, a 4-bit quantization, "
                "tensor parallel over several devices, or weights offloaded to the host",
                saves="the weights that are left out",
                costs="offloaded weights are slower; a quantization may change answers",
                maths="approximate",
                maths_note="the same with tensor parallel and offload",
                no_help="the weights are a small part of the device",
            ),
            PlaybookAction(
                key="in-pieces",
                action="run the step that failed in pieces: tiled VAE decoding, smaller images, shorter "
                "clips, fewer items at once; unload models that are not in use",
                saves="all but one piece",
                costs="about none",
                maths="rounding",
                maths_note=None,
                no_help="the weights alone fill the device",
            ),
            PlaybookAction(
                key="room-for-engine",
                action="before the engine wakes up, move the trainer's weights, gradients and optimizer to "
                "the host and call torch.cuda.empty_cache(); wake weights and cache one after the other",
                saves="what the trainer has on the device",
                costs="copies at each change between training and generation",
                maths="same",
                maths_note=None,
                no_help="the trainer is on other devices",
            ),
            PlaybookAction(
                key="page-cache",
                action="stop what else runs on this machine, and drop the page cache (sync; echo 3 | sudo "
                "tee /proc/sys/vm/drop_caches)",
                saves="what other programs and cached files take",
                costs="files are read again",
                maths="same",
                maths_note=None,
                no_help="the device has a memory of its own",
            ),
            PlaybookAction(
                key="no-expandable",
                action="run without expandable segments: unset PYTORCH_CUDA_ALLOC_CONF, or what a library "
                "puts there",
                saves="nothing: it avoids calls that this driver refuses",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="expandable segments are off",
            ),
            PlaybookAction(
                key="less-on-host",
                action="load less into host memory: a smaller quantization, memory-mapped weights, more "
                "layers on the GPU, a shorter context",
                saves="what is left out",
                costs="depends on what is left out",
                maths="same",
                maths_note="except a smaller quantization",
                no_help="other processes hold the memory",
            ),
            PlaybookAction(
                key="lower-share",
                action="ask for a smaller share of the device (an engine's gpu_memory_utilization), or "
                "start it before others fill the device",
                saves="nothing: the engine takes less",
                costs="a smaller key-value cache: fewer requests at once",
                maths="same",
                maths_note=None,
                no_help="weights and activations alone exceed the smaller share",
            ),
            PlaybookAction(
                key="leave-headroom",
                action="lower the engine's static share: SGLang --mem-fraction-static, vLLM "
                "--gpu-memory-utilization, TensorRT-LLM kv_cache_config.free_gpu_memory_fraction",
                saves="the bytes by which the share shrinks",
                costs="a smaller key-value cache: fewer requests at once",
                maths="same",
                maths_note=None,
                no_help="weights and activations alone exceed the device",
            ),
            PlaybookAction(
                key="smaller-graphs",
                action="capture CUDA graphs for smaller batches only: SGLang --cuda-graph-max-bs, vLLM "
                "--max-num-seqs and cudagraph_capture_sizes, or none at all (--disable-cuda-graph, "
                "--enforce-eager)",
                saves="what graphs of larger batches keep",
                costs="launch overhead comes back for batches that are not captured",
                maths="same",
                maths_note=None,
                no_help="the failure is before graphs are captured",
            ),
            PlaybookAction(
                key="metal-limit",
                action="raise Metal's limit: PYTORCH_MPS_HIGH_WATERMARK_RATIO above its default of 1.7 (0.0 "
                "switches it off)",
                saves="what the machine has beyond the limit",
                costs="the machine may swap, or freeze",
                maths="same",
                maths_note=None,
                no_help="physical memory is used up too",
            ),
            PlaybookAction(
                key="check-driver",
                action="find what makes the driver refuse: the limit of a MIG slice or of one allocation, "
                "the driver's version, the commit limit on Windows",
                saves="nothing: the memory is free already",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="another process took the memory for an instant",
            ),
            PlaybookAction(
                key="split-request",
                action="split the one large tensor: compute that operation in chunks",
                saves="the largest single request, not the sum",
                costs="about none",
                maths="same",
                maths_note=None,
                no_help="the refused request is small",
            ),
            PlaybookAction(
                key="find-size",
                action="find the length or the index that became this size: print the shapes in the "
                "innermost line of the traceback that is yours",
                saves="all of it: no machine has that much",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="another error came first: chase that",
            ),
            PlaybookAction(
                key="no-fallback",
                action="switch off the driver's fall-back to system memory (NVIDIA control panel, CUDA - "
                "Sysmem Fallback Policy: Prefer No Sysmem Fallback), so that the run fails early and "
                "not slowly",
                saves="nothing: it shows what fits",
                costs="none: spilled memory is many times slower",
                maths="same",
                maths_note=None,
                no_help="the platform has no such setting",
            ),
        ),
    ),
    PlaybookEntry(
        "M3",
        "Device or host",
        "A Python traceback with sizes is the device, unless the CPU allocator wrote it. A kill without a "
        "traceback is the host only if there is evidence of it: the cgroup's `memory.events` (`oom_kill`), "
        "`dmesg`, the scheduler's record; `Killed` or exit status 137 alone proves nothing. The fixes are "
        "opposite: what frees the GPU often fills the host. An 'empty' card may still hold memory of dead "
        "processes or of other containers.",
        actions=(
            PlaybookAction(
                key="free-device",
                action="free the device first, by ending or moving what else holds it",
                saves="what the others hold",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="what is outside the allocator is this process's own: its context, NCCL, libraries",
            ),
            PlaybookAction(
                key="own-context",
                action="call torch.cuda.set_device(local_rank) before anything else touches CUDA, so that "
                "no rank has a second context on GPU 0",
                saves="0.4 to 0.9 GiB for each stray rank",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="every rank has one context already",
            ),
            PlaybookAction(
                key="headroom",
                action="leave room outside the allocator: cap it "
                "(torch.cuda.set_per_process_memory_fraction), and make the libraries' handles "
                "before the large tensors",
                saves="nothing: it moves the limit",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="live bytes need the whole device; the versions of library and driver do not fit",
            ),
            PlaybookAction(
                key="fewer-workers",
                action="fewer DataLoader workers and a smaller prefetch_factor",
                saves="workers x (what each un-shares + prefetch_factor x batch)",
                costs="loading may become the bottleneck",
                maths="same",
                maths_note=None,
                no_help="the main process holds the memory",
            ),
            PlaybookAction(
                key="lazy-data",
                action="load lazily and share: memory-mapped arrays instead of Python lists, "
                "torch.load(mmap=True), one reader per node",
                saves="a copy of the data for each rank and worker",
                costs="about none: pages come from the cache",
                maths="same",
                maths_note=None,
                no_help="the memory is not data's: optimizer state offloaded, pinned buffers",
            ),
            PlaybookAction(
                key="host-limit",
                action="raise the limit: memory of the job (--mem), of the container "
                "(resources.limits.memory), or of the machine",
                saves="nothing: it moves the limit",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="the host's memory is growing: find the leak first",
            ),
            PlaybookAction(
                key="chunk-host",
                action="make that tensor in pieces, lazily, or in a smaller dtype",
                saves="all but a piece of the request",
                costs="about none",
                maths="same",
                maths_note="except in a smaller dtype",
                no_help="the size is a mistake: see the traceback",
            ),
            PlaybookAction(
                key="larger-shm",
                action="give /dev/shm more room: docker run --shm-size=8g or --ipc=host; in Kubernetes an "
                "emptyDir of medium Memory at /dev/shm",
                saves="nothing: containers have 64 MiB by default",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="batches are kept, so that any size fills up",
            ),
            PlaybookAction(
                key="largest-process",
                action="find what holds the memory (ps aux --sort=-rss | head), then end or shrink it",
                saves="what it holds",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="the memory is shared, pinned or the page cache: see memory.stat of the cgroup",
            ),
            PlaybookAction(
                key="map-count",
                action="allow more mappings (sysctl -w vm.max_map_count=1048576), or share fewer and larger "
                "tensors: a list of small ones as one",
                saves="nothing: mappings ran out, and not memory",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="the number of mappings grows without end: shared tensors are kept",
            ),
            PlaybookAction(
                key="commit-limit",
                action="raise what may be promised: more swap or a larger page file (Windows), "
                "vm.overcommit_memory=1, no `ulimit -v`",
                saves="nothing: it moves the limit",
                costs="none while the promised memory is not used",
                maths="same",
                maths_note=None,
                no_help="the memory is used, and not only promised",
            ),
            PlaybookAction(
                key="fork-early",
                action="start workers and subprocesses before the process is large, or with the "
                "forkserver or spawn method",
                saves="the promise for a copy of the process",
                costs="spawned workers start more slowly",
                maths="same",
                maths_note=None,
                no_help="the number of processes is the limit (ulimit -u, pids.max)",
            ),
            PlaybookAction(
                key="build-jobs",
                action="compile fewer files at once (MAX_JOBS=2, make -j2), or install a prebuilt wheel",
                saves="some GiB for each compiler that does not run",
                costs="the build takes longer",
                maths="same",
                maths_note=None,
                no_help="one file alone takes more than there is",
            ),
            PlaybookAction(
                key="prove-kill",
                action="look for evidence before changing anything: memory.events (oom_kill) of the cgroup, "
                "dmesg, the scheduler's record",
                saves="nothing yet",
                costs="none",
                maths="same",
                maths_note=None,
                no_help="the machine and its logs are lost: run again under `memtriage run`",
            ),
        ),
    ),
    PlaybookEntry(
        "M4",
        "The ladder",
        "When the run does not fit, take the changes in order of cost: smaller micro-batch with accumulation "
        "(M5), bf16 (M6), activation checkpointing (M7), expandable segments (M8), memory-efficient "
        "attention and shorter inputs (M11), 8-bit optimizer (M12), sharding (M9), offload (M10), LoRA "
        "(M13). Recompute the peak after each change, because it moves, and stop at the first that fits with "
        "5 % to spare. Say which of them change the result.",
    ),
    PlaybookEntry(
        "M5",
        "Micro-batch and accumulation",
        "The effective batch is micro-batch x accumulation x ranks: keep it by accumulating more when the "
        "micro-batch gets smaller. Keep the micro-batch as large as fits. Where micro-batches hold different "
        "numbers of tokens, weight their losses by those numbers.",
        (
            PlaybookAction(
                key="micro-batch",
                action="a smaller micro-batch, with gradient accumulation",
                saves="(1 - new / old micro-batch) x (activations + logits)",
                costs="lower utilization of the device",
                maths="same",
                maths_note="except batch-norm statistics, and means over micro-batches with different "
                "numbers of tokens",
                no_help="weights, gradients and optimizer state alone exceed the device; b is 1 already; the "
                "peak is the optimizer step; something is kept from every micro-batch, so that memory "
                "follows their number",
            ),
        ),
    ),
    PlaybookEntry(
        "M6",
        "bf16",
        "Under bf16 autocast activations take 16 bits. bf16 needs no loss scaling, fp16 does. At small "
        "batches fp16 and bf16 autocast can cost memory, because the casts of the weights are cached.",
        (
            PlaybookAction(
                key="bf16",
                action="bf16 autocast",
                saves="at most half of the fp32 activations of operations that autocast covers, minus up to "
                "2 B per parameter for cached casts",
                costs="none: faster on Ampere and newer",
                maths="rounding",
                maths_note="fp16 instead of bf16 needs loss scaling",
                no_help="the loss dominates (8 B per logit stay); activations are 16-bit already",
            ),
        ),
    ),
    PlaybookEntry(
        "M7",
        "Activation checkpointing",
        "Keep only each block's input and recompute the rest in backward. Set `use_reentrant=False` (with "
        "DDP in particular) and, in Transformers, `use_cache=False`.",
        (
            PlaybookAction(
                key="checkpointing",
                action="activation checkpointing of every block",
                saves="L s b h (32 + 5 a s / h) at 16 bits, minus the working set of one layer; the term "
                "with a exists only where attention materializes its scores",
                costs="20 to 33 % more computation",
                maths="same",
                maths_note=None,
                no_help="the peak is the loss or the optimizer step; weights, gradients and optimizer state "
                "alone exceed the device",
            ),
        ),
    ),
    PlaybookEntry(
        "M8",
        "Expandable segments",
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` removes holes between live blocks; it "
        "does nothing "
        "about the live blocks. Set it before the process starts. It conflicts with some users of virtual "
        "memory management and with memory shared between processes by CUDA IPC.",
        (
            PlaybookAction(
                key="expandable",
                action="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                saves="at most what is reserved but unallocated; nothing of what is allocated",
                costs="about none in steady training; 33 to 40 % per step were reported where weights travel "
                "by CUDA IPC",
                maths="same",
                maths_note=None,
                no_help="the request exceeds free plus unallocated; live bytes fill the device; the bytes "
                "are in private pools; a pluggable allocator or an old driver; set after the first CUDA "
                "call; combined with max_split_size_mb",
            ),
        ),
    ),
    PlaybookEntry(
        "M9",
        "ZeRO and FSDP",
        "Shard the optimizer's state first, then gradients, then weights. It takes several ranks, and for "
        "weights fast links between them.",
        (
            PlaybookAction(
                key="shard",
                action="shard over w ranks: ZeRO stage 1 to 3, FSDP",
                saves="stage 1: 8 N (1 - 1/w), 12 N where the optimizer has the fp32 master; stage 2: also "
                "gradients, (2 to 4) N (1 - 1/w); stage 3: also weights, minus the groups gathered at once",
                costs="low for stages 1 and 2; stage 3 gathers the weights of every layer",
                maths="same",
                maths_note=None,
                no_help="there is one GPU; activations dominate; the largest unsharded group does not fit",
            ),
        ),
    ),
    PlaybookEntry(
        "M10",
        "Offload to CPU or NVMe",
        "The last resort on one GPU. The cost moves to host memory and to the bus.",
        (
            PlaybookAction(
                key="offload",
                action="keep optimizer state, and weights if need be, on the host or on NVMe",
                saves="8 to 12 B per parameter of device memory, 2 to 6 more with the weights",
                costs="several times slower",
                maths="same",
                maths_note=None,
                no_help="host memory is short too: DeepSpeed ZeRO-2 takes 18 B per parameter there (20 with "
                "accumulation), or 8 + 10 r pinned, r from 1 to 2 by rounding up to powers of two",
            ),
        ),
    ),
    PlaybookEntry(
        "M11",
        "Attention, length, resolution",
        "Memory-efficient attention comes first, since its result is the same up to rounding. Shorter inputs "
        "or lower resolution save much more, but they change the task: say so.",
        (
            PlaybookAction(
                key="attention",
                action="scaled_dot_product_attention or flash attention",
                saves="5 a s^2 b per layer at 16 bits (4 without dropout)",
                costs="none: faster",
                maths="rounding",
                maths_note=None,
                no_help="it is in use already; a mask, a head size or `output_attentions` forces the path "
                "that materializes the scores; attention is not the large term",
            ),
            PlaybookAction(
                key="shorter",
                action="shorter inputs, or lower resolution",
                saves="(1 - s'/s) of the linear terms, 1 - (s'/s)^2 of the score terms",
                costs="none: faster",
                maths="different",
                maths_note="the task changes",
                no_help="weights, gradients and optimizer state set the peak",
            ),
        ),
    ),
    PlaybookEntry(
        "M12",
        "8-bit and paged optimizers",
        "An 8-bit Adam keeps 2 B of state per parameter instead of 8, which cuts the jump at the first "
        "optimizer step by three quarters. Paging survives spikes. Adafactor changes convergence.",
        (
            PlaybookAction(
                key="optimizer-8bit",
                action="8-bit or paged optimizer",
                saves="6 B per parameter against fp32 Adam (8 to 2), 2 B against bf16 Adam; tensors under "
                "4,096 elements stay 32-bit",
                costs="about none; pages that spill cost",
                maths="approximate",
                maths_note="the update is approximated; Adafactor changes convergence",
                no_help="the optimizer is SGD; only adapters are trained, so that its state is tiny; the "
                "peak is reached by activations before the first step only",
            ),
        ),
    ),
    PlaybookEntry(
        "M13",
        "LoRA and QLoRA",
        "Gradients and optimizer state exist for the adapters only; QLoRA also keeps the base in 4 "
        "bits. The model has a different capacity; for finetuning only.",
        (
            PlaybookAction(
                key="adapters",
                action="train adapters (LoRA), over a 4-bit base (QLoRA)",
                saves="(6 to 16) B for each parameter that is no longer trained, from pure bf16 to fp32 "
                "states with a master copy; a 4-bit base saves 1.5 B per parameter more",
                costs="about none",
                maths="different",
                maths_note="different capacity",
                no_help="activations dominate: they stay",
            ),
        ),
    ),
    PlaybookEntry(
        "M14",
        "The first backward",
        "Gradients come on top of every activation that the forward saved, and the loss adds about 8 B per "
        "logit for an instant. Checkpoint the large blocks first (M7), or use a fused or chunked "
        "cross-entropy where the logits are the large term; then M5 and M6.",
        actions=(
            PlaybookAction(
                key="fused-loss",
                action="fused or chunked linear + cross-entropy",
                saves="up to 12 to 14 B per logit: b s V logits",
                costs="none or faster",
                maths="rounding",
                maths_note=None,
                no_help="the vocabulary is small; the loss is not a cross-entropy",
            ),
        ),
    ),
    PlaybookEntry(
        "M15",
        "Evaluation only",
        "Three causes: gradients are on (wrap evaluation in `torch.no_grad()` or `inference_mode()`), the "
        "batch is larger than in training, or predictions are kept on the GPU (reduce before you keep: "
        "argmax instead of logits; `eval_accumulation_steps` in Transformers).",
        actions=(
            PlaybookAction(
                key="no-grad",
                action="run evaluation under torch.no_grad() or torch.inference_mode()",
                saves="the whole graph: every activation",
                costs="none: faster",
                maths="same",
                maths_note=None,
                no_help="it does already",
            ),
            PlaybookAction(
                key="keep-reduced",
                action="keep reduced results instead of outputs: argmax, a running sum, .cpu(), "
                "eval_accumulation_steps",
                saves="4 b s V bytes for each kept batch of logits",
                costs="about none",
                maths="same",
                maths_note=None,
                no_help="nothing is kept from batch to batch",
            ),
        ),
    ),
    PlaybookEntry(
        "M16",
        "The longest batch",
        "It dies at a random late step, and the same data fails again. Cap the length, bucket by length, or "
        "size the run for the largest batch by running that batch first. Varying shapes also fragment.",
        actions=(
            PlaybookAction(
                key="bucket",
                action="steadier shapes: bucket batches by length, pad to few sizes, cap outliers, run the "
                "largest batch first",
                saves="the difference between the longest and a usual batch; holes that changing shapes "
                "leave",
                costs="padding is computed too",
                maths="approximate",
                maths_note="different batches; a cap cuts inputs",
                no_help="shapes are the same in every step",
            ),
        ),
    ),
    PlaybookEntry(
        "M17",
        "The second step",
        "Optimizers create their state in their first step: 8 B per parameter for fp32 Adam, 4 for bf16 "
        "Adam, 2 for bf16 momentum. Measure the peak after two whole steps. An 8-bit optimizer cuts this "
        "jump by three quarters.",
        actions=(
            PlaybookAction(
                key="fused-step",
                action="fused=True or foreach=False in the optimizer",
                saves="one temporary copy of the weights at the step",
                costs="none with fused; foreach=False is slower",
                maths="rounding",
                maths_note=None,
                no_help="the step is not the peak",
            ),
        ),
    ),
    PlaybookEntry(
        "M18",
        "Statistics",
        "Compare allocated with reserved, read the peak of each phase and reset it in between, and take "
        "`max_memory_allocated()` after two whole steps.",
        actions=(
            PlaybookAction(
                key="watch",
                action="run again under `memtriage run`, which records what is allocated, by whom, up to "
                "the failure",
                saves="nothing yet",
                costs="a mark takes under 0.2 ms",
                maths="same",
                maths_note=None,
                no_help="the failure comes before training begins to allocate",
            ),
        ),
    ),
    PlaybookEntry(
        "M19",
        "Snapshot",
        "Record the allocator's history, dump it, and read who was alive at the peak and which line made it. "
        "The out-of-memory observer fires before the exception; nothing fires on SIGKILL.",
        actions=(
            PlaybookAction(
                key="fewer-graphs",
                action="capture fewer or smaller CUDA graphs, let them share one pool (graph_pool_handle), "
                "or run eagerly",
                saves="what is parked in private pools",
                costs="launch overhead comes back for what is not captured",
                maths="same",
                maths_note=None,
                no_help="the pools are full of live tensors",
            ),
        ),
    ),
    PlaybookEntry(
        "M20",
        "Myths",
        "`empty_cache()` does not help: the allocator does the same before it gives up, and what is "
        "left cannot be returned. Rising reserved memory is not a leak. Allocated memory that rises "
        "at the same point of each step is (M21).",
    ),
    PlaybookEntry(
        LEAKS,
        "Leaks: something keeps what a step makes",
        "Memory in use that rises at the same point of each step, until it runs out. Something that outlives "
        "the step keeps a tensor that the step made: a list, a dict, a cache, a hook, a closure, a buffer. A "
        "tensor with a grad_fn keeps its whole graph, and with it every activation saved for backward. Find "
        "what keeps it, then the line that stores it there. Store a number (`loss.item()`) or `x.detach()`, "
        "or clear or bound the container. Update state under `torch.no_grad()`, and run code without a "
        "backward under `torch.inference_mode()`. A larger device, a smaller batch and `empty_cache()` only "
        "move the step at which memory runs out. Every cure removes references of one kind, a cut. memtriage "
        "computes from the references in the heap what each cut would release, and prints first the smallest "
        "change that stops the growth; the JSON has all of them, best first (`cuts`).",
        picture=_CUTS,
    ),
)

PLAYBOOK: Final[dict[str, PlaybookEntry]] = {entry.name: entry for entry in _ENTRIES}
"""The entries by name, M1 to M21."""

ACTIONS: Final[dict[str, tuple[PlaybookEntry, PlaybookAction]]] = {
    rung.key: (entry, rung) for entry in _ENTRIES for rung in (*entry.rungs, *entry.actions)
}
"""Everything that can be done, by key, with the entry that proposes it."""

LADDER: Final = ("M5", "M6", "M7", "M8", "M11", "M12", "M9", "M10", "M13")
"""The entries with rungs, in order of cost (M4)."""
