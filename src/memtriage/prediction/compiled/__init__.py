"""`torch.compile` without a GPU.

`entry.py` stands for `torch.compile`, `inductor.py` keeps Inductor off the device, `fakes.py` lets its fake
tensors and those of a trace work together, `padding.py` decides what Inductor would measure, `trials.py`
allocates what its trials do.
"""
