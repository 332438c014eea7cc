"""The numbers that the Samba paper prints: perplexity on SlimPajama at 20B tokens, by row length, and Table 2's
average.
"""

from __future__ import annotations

from studies.papers.claim import Table

LENGTHS = ("4096", "8192", "16384")

TABLE_3 = Table(
    ("438M", *LENGTHS),
    (
        ("Llama-2", "11.14", "47.23", "249.03"),
        ("Llama-2-SWA", "11.12", "10.66", "10.57"),
        ("Mamba", "10.70", "10.30", "10.24"),
        ("Sliding GLA", "10.43", "10.00", "9.92"),
        ("Sliding RetNet", "10.38", "9.96", "9.87"),
        ("Samba", "10.06", "9.65", "9.57"),
    ),
)
TABLE_2 = Table(
    ("about 1.7B, 230B tokens", "average of 15 tasks"),
    (
        ("Llama-3 1.6B", "51.17"),
        ("Mistral 1.6B (SWA)", "51.12"),
        ("Mamba 1.8B", "52.31"),
        ("Mamba-SWA-MLP 1.6B", "53.77"),
        ("Mamba-MLP 1.9B", "51.38"),
        ("Samba 1.7B", "54.33"),
    ),
)
TABLE_5 = Table(
    ("Llama-2-SWA: batch, rows", "2048", *LENGTHS),
    (
        ("1024, 2048 (full attention)", "11.59", "38.12", "156.18", "357.32"),
        ("512, 4096", "11.87", "11.16", "10.69", "10.61"),
        ("256, 8192", "11.98", "11.26", "10.79", "10.69"),
        ("128, 16384", "12.37", "11.63", "11.12", "11.02"),
        ("64, 32768", "12.94", "12.46", "11.96", "11.86"),
    ),
)
TABLE_6 = Table(
    ("Mamba-MLP: block of full attention, of 12", *LENGTHS),
    (
        ("11", "10.29", "10.53", "13.66"),
        ("5", "10.10", "10.05", "12.83"),
        ("0", "10.89", "10.55", "10.63"),
        ("1, 5", "10.06", "10.34", "13.57"),
        ("Samba", "10.06", "9.65", "9.57"),
    ),
)
TABLE_7 = Table(
    ("query and key/value heads", *LENGTHS),
    (
        ("Llama-2-SWA 12, 12", "11.12", "10.66", "10.57"),
        ("Llama-2-SWA 12, 2", "11.11", "10.64", "10.56"),
        ("Llama-2-SWA 6, 1", "11.09", "10.62", "10.54"),
        ("Llama-2-SWA 12, 1", "10.89", "10.44", "10.35"),
        ("Llama-2-SWA 12, 4", "11.11", "10.64", "10.56"),
        ("Samba 12, 12", "10.06", "9.65", "9.57"),
        ("Samba 12, 2", "10.09", "9.68", "9.60"),
        ("Samba 6, 1", "9.99", "9.59", "9.51"),
        ("Samba 12, 1", "10.07", "9.66", "9.58"),
        ("Samba 12, 4", "10.02", "9.62", "9.55"),
    ),
)
TABLE_8 = Table(
    ("with a short convolution (SC)", *LENGTHS),
    (
        ("Llama-2-SWA", "11.12", "10.66", "10.57"),
        ("+ SC", "10.83", "10.39", "10.31"),
        ("Sliding GLA", "10.43", "10.00", "9.92"),
        ("+ SC", "10.39", "9.96", "9.87"),
        ("Sliding RetNet", "10.38", "9.96", "9.87"),
        ("+ SC", "10.25", "9.82", "9.74"),
    ),
)
