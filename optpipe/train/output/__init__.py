"""What a run tells and leaves while it goes.

watch.py     measures each step and reports it
leave.py     all files of a run, put together
metrics.py   one JSON object a step and line
scalars.py   the same for TensorBoard
picture.py   the run as one picture, at its end
"""
