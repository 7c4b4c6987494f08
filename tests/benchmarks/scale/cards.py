"""Cards and links by their public figures.

Figures are those of the makers, for one card, without sparsity; none was measured here:

    a100      NVIDIA A100 80GB SXM datasheet
    h100      NVIDIA H100 SXM datasheet (1,979 TFLOPS with sparsity, half of that without)
    h200      NVIDIA H200 SXM datasheet
    b200      NVIDIA DGX B200 datasheet, an eighth of a machine, half of the figure with sparsity
    l40s      NVIDIA L40S datasheet
    rtx4090   NVIDIA Ada GPU architecture whitepaper, bfloat16 with float32 accumulation

NVLink and PCIe count one direction, which is half of what their makers print. Ethernet and InfiniBand are those of a node, which
all of its cards share.
"""

from dataclasses import dataclass

LATENCY_S = 5e-6
"""Assumed time that a message takes between two cards of a node."""
NETWORK_LATENCY_S = 20e-6
"""Assumed time that a message takes between two nodes."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two cards or two nodes."""

    name: str
    bytes_per_s: float
    """In one direction."""
    latency_s: float
    """Time of a message without contents."""


@dataclass(frozen=True, slots=True)
class Card:
    """What one card can do at most."""

    name: str
    flops: float
    """Operations per second in bfloat16 with dense matrices."""
    bandwidth: float
    """Bytes per second between the card and its memory."""
    memory: float
    """Bytes."""
    link: Link
    """To the other cards of its node."""


NVLINK3 = Link("NVLink 3", 300e9, LATENCY_S)
NVLINK4 = Link("NVLink 4", 450e9, LATENCY_S)
NVLINK5 = Link("NVLink 5", 900e9, LATENCY_S)
PCIE4 = Link("PCIe 4.0 x16", 32e9, 2 * LATENCY_S)

CARDS = {
    card.name: card
    for card in (
        Card("a100", 312e12, 2.039e12, 80e9, NVLINK3),
        Card("h100", 989e12, 3.35e12, 80e9, NVLINK4),
        Card("h200", 989e12, 4.8e12, 141e9, NVLINK4),
        Card("b200", 2250e12, 8e12, 180e9, NVLINK5),
        Card("l40s", 362e12, 0.864e12, 48e9, PCIE4),
        Card("rtx4090", 165e12, 1.008e12, 24e9, PCIE4),
    )
}
"""Known cards by name."""

NETWORKS = {
    link.name: link
    for link in (
        Link("10gbit", 1.25e9, 2 * NETWORK_LATENCY_S),
        Link("100gbit", 12.5e9, NETWORK_LATENCY_S),
        Link("400gbit", 50e9, NETWORK_LATENCY_S),
        Link("3200gbit", 400e9, NETWORK_LATENCY_S),
    )
}
"""Known networks of a node by name; 3200gbit is eight cards of 400 Gbit/s."""
