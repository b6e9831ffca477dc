"""A data set of Hugging Face's `datasets`, packed into sequences, by a loader that resumes where a checkpoint was.

python -m examples.dataset
optpipe train --schedule schedule.json --model hf:tiny-llama --loader examples.dataset:build --steps 4 --checkpoint run
optpipe train --schedule schedule.json --model hf:tiny-llama --loader examples.dataset:build --steps 8 --checkpoint run

The first command makes the data set, of Python's own modules, a byte a token; nothing is downloaded. What
`datasets.load_dataset` returns for a tokenised text is used in the same way.
"""

import os
from pathlib import Path

from datasets import Dataset, load_from_disk
from torchdata.stateful_dataloader import StatefulDataLoader

from optpipe.models.packing import PackedTokens

CORPUS = "corpus"
MODULES, SEQUENCE, ROWS = 40, 32, 2


def build(replica: int, replicas: int) -> StatefulDataLoader[dict[str, object]]:
    """Return the loader of a replica, which takes every so many-th document; they are read from the disk as needed."""
    documents = load_from_disk(CORPUS)["input_ids"]
    return StatefulDataLoader(PackedTokens(documents, SEQUENCE, replica, replicas), batch_size=ROWS)


def main() -> None:
    """Write the data set to the folder `corpus`."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:MODULES]
    texts = Dataset.from_dict({"text": [path.read_text(errors="replace") for path in modules]})
    tokens = texts.map(lambda row: {"input_ids": list(row["text"].encode())}, remove_columns="text")
    tokens.save_to_disk(CORPUS)


if __name__ == "__main__":
    main()
