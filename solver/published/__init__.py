"""The published schedules: each a function of the Problem that gives orders, or says why not. And their papers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper: first author, year, title, and its arXiv number or where it was published."""

    authors: str
    year: int
    title: str
    source: str

    def __str__(self) -> str:
        return f"{self.authors} {self.year}, {self.source}"


GPIPE = Paper(
    "Huang et al.",
    2019,
    "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    "arXiv 1811.06965",
)
PIPEDREAM_FLUSH = Paper("Narayanan et al.", 2021, "Memory-Efficient Pipeline-Parallel DNN Training", "arXiv 2006.09503")
MEGATRON = Paper(
    "Narayanan et al.",
    2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    "arXiv 2104.04473",
)
RECOMPUTATION = Paper("Chen et al.", 2016, "Training Deep Nets with Sublinear Memory Cost", "arXiv 1604.06174")
MARIO = Paper(
    "Liu et al.", 2025, "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism", "PPoPP 2025"
)
SEQ1F1B = Paper(
    "Sun et al.",
    2024,
    "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
    "arXiv 2406.03488",
)
SLIMPIPE = Paper(
    "Li et al.",
    2025,
    "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context LLM Training",
    "arXiv 2504.14519",
)
ZERO_BUBBLE = Paper("Qi et al.", 2024, "Zero Bubble Pipeline Parallelism", "arXiv 2401.10241")
CONTROLLABLE_MEMORY = Paper("Qi et al.", 2024, "Pipeline Parallelism with Controllable Memory", "arXiv 2405.15362")
PIPE_OFFLOAD = Paper(
    "Wan et al.",
    2025,
    "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization",
    "arXiv 2503.01328",
)
OPTPIPE = Paper(
    "Li et al.",
    2025,
    "OptPipe: Memory- and Scheduling-Optimized Pipeline Parallelism for LLM Training",
    "arXiv 2510.05186",
)
VOCABULARY = Paper(
    "Yeung, Qi, Lin, Wan", 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism", "arXiv 2411.05288"
)
DUALPIPE = Paper("DeepSeek-AI", 2024, "DeepSeek-V3 Technical Report", "arXiv 2412.19437")
