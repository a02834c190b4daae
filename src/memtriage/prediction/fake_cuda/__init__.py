"""What passes for a GPU during a trace: fake tensors, `torch.cuda`, and the choices that CUDA would make.

Whatever is replaced in torch is put back when the trace ends.
"""
