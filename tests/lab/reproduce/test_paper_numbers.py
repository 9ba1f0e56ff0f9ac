"""The paper's numbers, entered a second time from its source: a misquoted one differs here."""

from __future__ import annotations

import math

from adapmixed_lab.reproduce import paper

ADAPTIVE = "AdaPMixED"
# Method, queries, ε, perplexity, its deviation; as \label{tab:main_results} prints them.
MAIN_RESULTS = {
    "wikitext-103": [
        ("public model", 1024, 0, 40.86, 6.11),
        ("DP-SGD", 1024, 8, 35.09, 5.50),
        ("PMixED", 1024, 8, 33.8, 5.29),
        (ADAPTIVE, 1024, 0.494, 32.35, 4.63),
        ("DP-SGD", 99_840, 8, 32.53, None),
        (ADAPTIVE, 99_840, 5.248, 29.99, None),
    ],
    "one-billion-word": [
        ("public model", 1024, 0, 67.73, 6.77),
        ("DP-SGD", 1024, 8, 54.54, 5.42),
        ("PMixED", 1024, 8, 52.68, 5.29),
        (ADAPTIVE, 1024, 0.485, 49.25, 4.65),
        ("DP-SGD", 99_840, 8, 52.97, None),
        (ADAPTIVE, 99_840, 3.186, 47.99, None),
    ],
    "pubmed": [
        ("public model", 19_968, 0, 32.28, None),
        ("DP-SGD", 19_968, 8, 28.07, None),
        (ADAPTIVE, 19_968, 2.858, 26.83, None),
    ],
    "air-dialogue": [
        ("public model", 16_384, 0, 17.33, None),
        ("DP-SGD", 16_384, 8, 8.13, None),
        (ADAPTIVE, 16_384, 6.906, 7.67, None),
    ],
}
# Method, ε, perplexity, queries that were screened (\label{tab:noisy_screen_priv_util}).
SCREENING = [
    ("PMixED", 4.399, 38.07, 0),
    ("PMixED with noisy screening", 4.139, 38.15, 716),
    ("AdaPMixED without screening", 0.960, 31.42, 0),
    (ADAPTIVE, 0.924, 31.75, 1026),
]
BREAKDOWN = {"mixing": 0.472, "screening": 0.002, "conversion": 0.450, "total": 0.924}
# The coordinates of \label{fig:ablation} by what is set, as its source lists them.
ABLATION = {
    ("threshold",): [
        ((2,), 0.461, 33.26), ((3,), 0.476, 30.9), ((4,), 0.483, 29.77), ((4.5,), 0.489, 29.34),
        ((math.inf,), 0.492, 29.07),
    ],
    ("screen_top_k",): [
        ((20,), 0.491, 29.08), ((60,), 0.489, 29.34), ((500,), 0.482, 30.64),
        ((2000,), 0.476, 31.08), ((3000,), 0.469, 32.56),
    ],
    ("target_leakage",): [
        ((0.05,), 0.460, 33.30), ((0.1,), 0.475, 31.70), ((0.15,), 0.484, 30.42),
        ((0.2,), 0.489, 29.34), ((0.3,), 0.493, 28.41),
    ],
    ("num_models",): [
        ((16,), 1.377, 29.01), ((32,), 0.979, 29.19), ((64,), 0.54, 29.08), ((80,), 0.526, 29.4),
        ((100,), 0.489, 29.34),
    ],
    ("screen_weight", "sigma"): [
        ((1e-2, 1e-1), 0.501, 30.26), ((1e-3, 1e-2), 0.504, 29.77), ((1e-4, 1e-2), 0.488, 29.34),
        ((1e-5, 1e-3), 0.49, 29.1),
    ],
    ("order",): [
        ((16,), 0.552, 29.78), ((17,), 0.518, 29.56), ((18,), 0.489, 29.34), ((19,), 0.464, 29.16),
        ((20,), 0.448, 28.97),
    ],
}  # fmt: skip
LABELS = [
    "2 3 4 4.5 ∞", "20 60 500 2000 3000", "0.05 0.1 0.15 0.2 0.3", "16 32 64 80 100",
    "10⁻²,10⁻¹ 10⁻³,10⁻² 10⁻⁴,10⁻² 10⁻⁵,10⁻³", "16 17 18 19 20",
]  # fmt: skip


def test_the_numbers_of_table_1() -> None:
    assert {
        dataset: [
            (row.method, row.queries, row.epsilon, row.perplexity, row.deviation) for row in rows
        ]
        for dataset, rows in paper.TABLE_1.items()
    } == MAIN_RESULTS
    assert (paper.RUNS, paper.DELTA) == (8, 1e-5)


def test_the_numbers_of_table_2() -> None:
    found = [(row.method, row.epsilon, row.perplexity, row.screened) for row in paper.TABLE_2A]
    assert found == SCREENING
    assert {row.queries for row in paper.TABLE_2A} == {9728}
    assert paper.TABLE_2B == BREAKDOWN
    assert (paper.PMIXED_ORDER, paper.PMIXED_LEAKAGE) == (6, 0.01)  # of the caption


def test_the_points_of_figure_2() -> None:
    found = {
        tuple(panel.points[0].setting): [
            (tuple(point.setting.values()), point.epsilon, point.perplexity)
            for point in panel.points
        ]
        for panel in paper.FIGURE_2
    }
    assert found == ABLATION and list(found) == list(ABLATION)
    for panel, labels in zip(paper.FIGURE_2, LABELS, strict=True):
        assert [point.label.replace(" ", "") for point in panel.points] == labels.split()
