"""`npu-backend bench`: the PPO head against every other head that this process can import.

contestants.py  who takes part, found by import, with versions
measure.py      one shape: times interleaved over rounds, GEMM rates in the same rounds, memory, errors against float64
report.py       the results as a table, as JSON, as a plot
actor_update.py, actor_report.py  the same heads in a whole actor update (--end-to-end)
"""
