"""Verification without a GPU: proofs on the Plan (`proofs`) and an audit of compiled code (`audit`).

Reads Plans and cubins; makes neither. May assume nothing about the planner or the kernel writer beyond docs/design.md
section 2: whatever a proof takes for granted is written into the `reason` of its check.
"""
