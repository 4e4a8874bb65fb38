"""Goldens: what every method computes on small networks, so that nothing changes unseen.

`adapter.py` is the only file that uses enfold; `cases.py` names what is computed; `python -m tests.goldens.record` (or
`make goldens`) writes the JSON files; `test_goldens.py` compares.
"""
