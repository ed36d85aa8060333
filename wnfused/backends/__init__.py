"""The backends: modules that have one function for each op, all with the op's own signature.

A backend has ``unavailable() -> str | None``, the reason why nothing of it runs here, and
``refusal(op, arguments) -> str | None``, the reason why it cannot run this op on these arguments.
"""
