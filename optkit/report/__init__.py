"""Evidence made readable: the HTML report, the Perfetto timeline, and the README's table of figures.

Reads evidence, Plans and cost figures; nothing in the package reads this. `html` makes report.html, `trace` makes
trace.json, `readme_table` fills the README from the results committed under benchmarks/.
"""
