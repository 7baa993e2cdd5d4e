"""The tables of docs/results.md: complete runs of `evaluate` on four data sets, with the commit that they were made at.

    make tables                                      # all of them
    python -m benchmarks.tables --only digits        # one section; the others stay as they are

Each section is a run of `ntk-iterncgp evaluate configs/NAME.yaml`, whose report is written to runs/NAME.
MNIST, Fashion-MNIST and CIFAR-10 with the checkpoint of the ResNet-20 must lie under `NTK_ITERNCGP_DATA`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from ntk_iterncgp.experiments.config import load
from ntk_iterncgp.experiments.evaluation import report
from ntk_iterncgp.experiments.evaluation.compare import Comparison
from ntk_iterncgp.experiments.evaluation.tables import Table
from ntk_iterncgp.experiments.runs import evaluate

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
NAMES = ("digits", "mnist_lenet", "fashion_lenet", "cifar10_resnet20")
COLUMNS = ("accuracy", "NLL", "± to IterNCGP", "ECE", "Brier", "NLL probit")
TOY = ("model.train_epochs=1", "data.train_limit=150", "data.test_limit=60", "data.ood_limit=30")
TOY += ("fit.num_actions=8", "evaluate.link_samples=32", "evaluate.bootstrap=50", "evaluate.baselines=[map, prior]")


def section(comparison: Comparison, numbers: dict[str, Any], command: str, commit: str) -> str:
    """The caption, the table with the best of each column in bold, and a sentence about the detector."""
    about, cost = numbers["about"], numbers["cost"]
    caption = (
        f"`{command}` at commit `{commit}`: {about['weights']:,} weights, {about['data']:,} training data, "
        f"{numbers['num_scored']:,} test inputs, {about['rank']} actions; the whole run took "
        f"{cost['seconds'] / 60:.0f} min."
    )
    columns = [column for column in report.results_table(comparison).columns if column.heading in COLUMNS]
    others = report.others_table(comparison)
    columns += [column for column in others.columns if column.heading.endswith(": AUROC")] if others else []
    lines = [_line(["", *(column.heading for column in columns)]), _line(["---", *["---:"] * len(columns)])]
    for label, cells in Table(comparison.results, columns, {}).rows():
        lines.append(_line([label, *(f"**{value}**" if "best" in kinds else value for _, value, kinds in cells)]))
    return "\n\n".join([caption, "\n".join(lines), *_detector(numbers["novelty"])])


def _detector(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    each = "; ".join(
        f"{name}: AUROC {part['auroc']:.3f}, alarms at {100 * part['alarms']:.1f} %"
        for name, part in found["sets"].items()
    )
    return [
        f"`la.detector`, calibrated on {found['num_ranked']} held-out inputs and asked for alarms at "
        f"{100 * found['rate']:.3g} % of familiar inputs, raises them at {100 * found['test_alarms']:.1f} % of the "
        f"test inputs. {each}."
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str, name: str, text: str) -> str:
    """The page with the section of this name replaced; it stands between two marks."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    found = re.sub(f"{first}.*?{last}", lambda _: f"{first}\n{text}\n{last}", page, count=1, flags=re.DOTALL)
    if first not in page or last not in page:
        raise SystemExit(f"The page must hold the marks {first} and {last}; got one without. Try the committed page.")
    return found


def commit_of_tree() -> str:
    """Short, with a plus sign where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "ntk_iterncgp", "configs")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


def main(flags: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy version of the digits; the page is not written")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="some of the data sets")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="where reports and posteriors go")
    options = parser.parse_args(flags)
    commit, found = commit_of_tree(), {}
    for name in NAMES[:1] if options.quick else options.only:
        folder = options.output_dir / (f"{name}-quick" if options.quick else name)
        changes = [*(TOY if options.quick else ()), f"output_dir={folder}"]
        comparison = evaluate(load(ROOT / "configs" / f"{name}.yaml", changes))
        assert isinstance(comparison, Comparison)
        found[name] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        text = section(comparison, found[name], f"ntk-iterncgp evaluate configs/{name}.yaml", commit)
        print(f"\n{text}\n", flush=True)
        if not options.quick:
            PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
