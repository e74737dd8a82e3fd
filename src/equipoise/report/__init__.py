"""The report of a study: `report.html`, one self-contained page, and `results.md`, the same tables as Markdown.

Not for: computing anything (`results` does), or writing `results.json`. Nothing is imported here: whoever wants only
the tables, such as the terminal, loads no drawing library (`write` does).
"""
