"""The PPO output head: log-probs and entropy of given tokens without ever holding the full logits.

linear_log_prob.py  the API; inputs.py checks and flattens what it is given
backends.py         which backend runs a call, and why; liger.py the one that is not ours
chunked.py          the autograd function: chunks of rows, a library GEMM per chunk, row kernels around it
rows_eager.py       the row kernels in plain torch; a device's own kernels stand beside it
modules.py          `FusedLinearForPPO`, verl's class
"""
