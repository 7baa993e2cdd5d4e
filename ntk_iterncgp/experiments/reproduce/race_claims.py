"""What the paper says of its races, checked on the table of where each method ended.

Equal time is the time of the slowest IterNCGP run. SVGP is trained for that long and finishes the step that it is in;
subsets of the data that took longer are left out of the comparison (but for the fastest), and named beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ntk_iterncgp.experiments.reproduce.outcome import Claim

SCORES = {"test_accuracy": -1, "test_nll": 1, "test_ece": 1}  # and which sign makes smaller better
LONGER = 1.5  # from where on it is not the step that SVGP finishes, but another budget
RIVALS = {"sod": "subset of data", "svgp": "SVGP"}
WHO = {"paper": "the paper's algorithm", "ours": "ours"}

Line = dict[str, Any]


def claims(summary: Sequence[Line]) -> list[Claim]:
    """One for each pair of methods and each score, and one for each compression."""
    iterncgp = [line for line in summary if line["group"] not in RIVALS]
    budget = max(line["seconds"] for line in iterncgp)
    found = []
    for group, who in WHO.items():
        line = _of_group(summary, group)[0]
        for rival, name in RIVALS.items():
            lines = _of_group(summary, rival)
            for score, sign in SCORES.items():
                if lines:
                    found.append(_beats(line, lines, who, name, score, sign, budget))
    return found + [_compresses(summary, group) for group in WHO if _of_group(summary, f"{group}, compressed")]


def _compresses(summary: Sequence[Line], group: str) -> Claim:
    (plain, *_), (compressed, *_) = _of_group(summary, group), _of_group(summary, f"{group}, compressed")
    ratio = compressed["test_nll"] / plain["test_nll"]
    numbers = f"ratio {ratio:.5f}; ranks {compressed['rank']:g} and {plain['rank']:g}"
    sentence = f"compression stays within 2 % of R = ∞ in test NLL: {compressed['method']}"
    return Claim(sentence, abs(ratio - 1) < 0.02, numbers)


def _of_group(summary: Sequence[Line], group: str) -> list[Line]:
    return [line for line in summary if line["group"] == group]


def _beats(line: Line, rivals: list[Line], who: str, name: str, score: str, sign: int, budget: float) -> Claim:
    def best(lines: list[Line]) -> Line:
        return min(lines, key=lambda other: sign * other[score])

    fastest = min(other["seconds"] for other in rivals)
    late = [o for o in rivals if o["group"] == "sod" and o["seconds"] > max(budget, fastest)]
    in_time = best([other for other in rivals if other not in late])
    numbers = f"{_of(line, score)} against {_of(in_time, score)}"
    if late:
        numbers += f"; with more time {_of(best(late), score)}"
    holds = sign * line[score] < sign * in_time[score]
    longer = max(other["seconds"] for other in rivals if other not in late) / budget
    time = "at equal time" if longer < LONGER else f"given {longer:.0f} times as long"
    return Claim(f"{who}: better {score.replace('_', ' ')} than any {name} {time}", holds, numbers)


def _of(line: Line, score: str) -> str:
    return f"{line[score]:.4f} ({line['method']}, {line['seconds']:.1f} s)"
