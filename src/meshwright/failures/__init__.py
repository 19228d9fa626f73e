"""Ranks that die or stop: noticed by the operating system's word, and told to all.

Read ``process`` (what the system says of a process), ``watchdog`` (the thread that hears it), ``report`` (what the
ranks are told, and the error that each leaves with).
"""
