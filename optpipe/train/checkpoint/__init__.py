"""The state of a run on disk: written whole or not at all, and gone on from exactly.

Import from the modules: `config` is read where no torch is.
"""
