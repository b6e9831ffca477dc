"""Pictures of docs/concepts and of the front pages: small problems, most of them solved to the optimum.

They stand among the examples because each is one: a problem built in Python, solved by a named method, timed and drawn.
`make pictures` draws all of them anew; the same code gives the same bytes.

pipelines.py    small problems with equal stages
sheet.py        several schedules beneath one another at one time scale
memory.py       the memory of one device on such a sheet
front.py        the picture of the first pages
passes.py, objectives.py, budgets.py, offload.py, placements.py, any_timing.py    the pictures of one page each
blocks.py       a schedule as optpipe plot draws it
spread.py       a layer in the last stage and on every device
"""
