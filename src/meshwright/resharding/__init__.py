"""From one layout to another.

Read ``conversions`` (steps as values, with their transposes), ``executor`` (steps run, differentiably), ``cost``
(their bytes), ``planner`` (the cheapest sequence of steps), ``record`` (notes of what was sent, and why).
"""
