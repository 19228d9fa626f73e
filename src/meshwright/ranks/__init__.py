"""Who this rank is: of real processes or simulated ones.

Read ``launchers`` (what the environment says), ``runtime`` (the rank, and what is kept per rank), ``simulation`` (all
ranks in one process), ``process_group`` (how real ranks hold and leave a group of torch.distributed).
"""
