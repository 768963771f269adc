"""Planted faults: is every gate able to fail? A library of small, realistic mistakes, each of which must turn a gate red.

Five places can hold a mistake, a module each: the Plan (`plan_faults`), the descriptor table (`table_faults`), a constant
(`constant_faults`), what a stage's body does (`body_faults`) and the device source (`device_faults`). `runner` plants them,
runs the gates and prints who caught what. Sits above `validate`: it judges all gates, and no gate knows of it.
"""
