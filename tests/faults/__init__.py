"""Kills training processes, at named points of the program or at any time, and looks at what they leave.

`points` names the places, `child` is a `detector` that dies at one, `nursery` starts many children cheaply, `run`
starts, kills and resumes a run, and `compare` holds it against the one that was not killed.
"""
