"""How results are shown: a table in the terminal, `result.json`, one self-contained HTML page."""
