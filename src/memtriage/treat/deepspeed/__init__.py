"""A remedy for those who keep DeepSpeed's optimizer offload: fewer bytes on the host, the same bits."""

from memtriage.treat.deepspeed.internals import UnknownDeepSpeed
from memtriage.treat.deepspeed.remedy import ExactHostMemory
from memtriage.treat.deepspeed.sums import SumsLost

__all__ = ["ExactHostMemory", "SumsLost", "UnknownDeepSpeed"]
